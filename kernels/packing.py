"""How weights become the linear layers of a set of kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

from kernels.codes import CodeKind, Codes, Coding, check_codes, check_coding, decoded
from kernels.layers import Integers, LinearLayer
from kernels.quantization import check_integer_groups, check_integers, stacked


class LinearMaker(ABC):
    """Packs weights, whole or in pieces, as they are or in few bits."""

    quantizations: tuple[str, ...] = ("int8", "int4")
    """What `PackedLinear` takes as `quantization`."""

    codings: frozenset[CodeKind] = frozenset()
    """Of which kinds `StreamedCodedLinear` keeps codes; others become float32."""

    sorts_inputs: bool = False
    """Whether `StreamedIntegerLinear` takes an order of the inputs."""

    byte_zeros: bool = False
    """Whether integers of 8 bits may have zero points."""

    def keeps_codes(self, coding: Coding) -> bool:
        """Whether `StreamedCodedLinear` keeps codes of that kind, in groups of that size."""
        return coding.kind in self.codings

    @abstractmethod
    def PackedLinear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        quantization: str | None = None,
        group_size: int | None = None,
        round_inputs: bool = False,
    ) -> LinearLayer:
        """A linear layer of weight [N, K] and bias [N].

        Nothing refers to `weight` afterwards where a packed copy is made, so the caller can free
        it layer by layer. `quantization` is None or one of `quantizations`: "int8" or "int4", with
        one scale for `group_size` neighbours of a row (a multiple of 16 up to 256, by default 128
        for int8 and 32 for int4), or "fp8" (e4m3), with one scale a row. `round_inputs` lets bf16
        weights meet x rounded to bf16, as a bf16 model would, where that is faster (AVX512-BF16:
        twice as fast for many rows); sums stay float32.
        """

    @abstractmethod
    def IntegerLinear(
        self,
        values: Tensor,
        scales: Tensor,
        minima: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        bits: int,
        zeros: Tensor | None = None,
    ) -> LinearLayer:
        """A linear layer of weights that are quantised already, see `Integers`.

        Scales and minima are kept in float16.
        """

    def StreamedLinear(
        self,
        shape: tuple[int, int],
        pieces: Iterable[Tensor],
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        quantization: str | None = None,
        group_size: int | None = None,
        round_inputs: bool = False,
    ) -> LinearLayer:
        """`PackedLinear` of a weight [N, K] = `shape` that comes in pieces.

        `pieces` are its rows, one piece over the other, each of a multiple of `PIECE_ROWS` rows but
        the last. Each is packed as it comes and nothing of it is kept: its memory may be used again
        for the next. The weight is kept in `dtype` unless it is quantised. Raises
        ValueError for pieces that don't make up `shape`.
        """
        return self.PackedLinear(
            stacked(shape, pieces).to(dtype),
            bias,
            quantization=quantization,
            group_size=group_size,
            round_inputs=round_inputs,
        )

    def StreamedIntegerLinear(
        self,
        shape: tuple[int, int],
        pieces: Iterable[Integers],
        bias: Tensor | None = None,
        *,
        bits: int,
        group_size: int,
        with_minima: bool = False,
        with_zeros: bool = False,
        order: Tensor | None = None,
    ) -> LinearLayer:
        """`IntegerLinear` of a weight [N, K] = `shape` that comes in pieces.

        They are as for `StreamedLinear`; K must be a multiple of `group_size`, and either all
        pieces have minima (or zero points) or none has. With `order` int64 [K], where
        `sorts_inputs` holds, column i of the pieces meets value order[i] of x.
        """
        if order is not None:
            raise ValueError("these kernels have no order of inputs")
        check_integer_groups(shape, bits, group_size, with_minima)
        parts = list(pieces)
        for part in parts:
            check_integers(part, shape[1], bits, group_size, with_minima, with_zeros)
        minima = [part.minima for part in parts if part.minima is not None]
        zeros = [part.zeros for part in parts if part.zeros is not None]
        return self.IntegerLinear(
            stacked(shape, (part.values for part in parts)),
            torch.cat([part.scales for part in parts]),
            torch.cat(minima) if minima else None,
            bias,
            bits=bits,
            zeros=torch.cat(zeros) if zeros else None,
        )

    def StreamedCodedLinear(
        self,
        shape: tuple[int, int],
        pieces: Iterable[Codes],
        bias: Tensor | None = None,
        *,
        coding: Coding,
    ) -> LinearLayer:
        """A linear layer of weights that are codes of floats, see `Codes`; the last group may be
        shorter.

        They come in pieces as for `StreamedLinear`. Sums are float32; x stays as it is, but for
        "e2m1", where it's rounded to 8 bits for each group as for integers, and scales are kept in
        float16.
        """
        check_coding(coding)
        parts = list(pieces)
        for part in parts:
            check_codes(part, shape[1], coding)
        return self.PackedLinear(stacked(shape, (decoded(part, coding) for part in parts)), bias)
