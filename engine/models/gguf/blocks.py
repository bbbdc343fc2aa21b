"""What the bytes of quantised blocks stand for.

Each type is read as integers with a scale for `group` neighbours: weight = scale * value - minimum.
The layouts are ggml's (ggml-common.h and ggml-quants.c of llama.cpp, whose facts these are).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from engine.models.gguf import types
from engine.quantization.matrix import IntegerFormat
from kernels.interface import Integers


class Blocks(NamedTuple):
    """Rows of blocks, read.

    Attributes:
        values: int8 [n, K], signed around `zero`.
        scales: float32 [n, K / group].
        minima: the same, or None.
        zero: what is taken from a value before it is scaled.
    """

    values: Tensor
    scales: Tensor
    minima: Tensor | None = None
    zero: int = 0

    def floats(self) -> Tensor:
        """float32 [n, K]."""
        rows, groups = self.scales.shape
        grouped = self.values.view(rows, groups, -1).float()
        result = (grouped - self.zero) * self.scales[..., None]
        if self.minima is not None:
            result -= self.minima[..., None]
        return result.flatten(1)

    def integers(self) -> Integers:
        """As the kernels take them."""
        return Integers(self.values, self.scales, self.minima)


def _half(raw: Tensor, at: int) -> Tensor:
    """float32 [n, blocks]: the float16 at byte `at` of each block."""
    return raw[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _nibbles(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The low halves and the high halves of bytes."""
    return packed & 15, packed >> 4


def _rows(values: Tensor) -> Tensor:
    """int8 [n, K] from uint8 [n, blocks, ...]."""
    return values.flatten(1).to(torch.int8)


def _q8_0(raw: Tensor) -> Blocks:
    values = raw[..., 2:].contiguous().view(torch.int8).flatten(1)
    # Its quantiser never writes -128, which the kernels haven't got.
    return Blocks(values.clamp(min=-127), _half(raw, 0))


def _q4_0(raw: Tensor) -> Blocks:
    return Blocks(_rows(torch.cat(_nibbles(raw[..., 2:]), -1)), _half(raw, 0), zero=8)


def _q4_1(raw: Tensor) -> Blocks:
    values = _rows(torch.cat(_nibbles(raw[..., 4:]), -1))
    return Blocks(values, _half(raw, 0), -_half(raw, 2))


def _q5_0(raw: Tensor) -> Blocks:
    """The fifth bits of the 32 values lie in four bytes before the others."""
    places = torch.arange(8, dtype=torch.uint8)
    fifth = ((raw[..., 2:6, None] >> places) & 1).flatten(-2)
    values = torch.cat(_nibbles(raw[..., 6:]), -1) | fifth << 4
    return Blocks(_rows(values) - 16, _half(raw, 0))


def _k_scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of Q4_K and Q5_K, float32 [n, 8 blocks]: six bits each, in 12 bytes."""
    packed = raw[..., 4:16]
    low, mid, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), -1).float()
    minima = torch.cat((mid & 63, high >> 4 | mid >> 6 << 4), -1).float()
    scales, minima = scales * _half(raw, 0)[..., None], minima * _half(raw, 2)[..., None]
    return scales.flatten(1), minima.flatten(1)


def _q4_k(raw: Tensor) -> Blocks:
    """Runs of 64 values, of which 32 bytes hold the first half low and the second half high."""
    runs = raw[..., 16:].unflatten(-1, (4, 32))
    return Blocks(_rows(torch.stack(_nibbles(runs), -2)), *_k_scales(raw))


def _q5_k(raw: Tensor) -> Blocks:
    """Q4_K with a fifth bit: bit j of byte i belongs to value i of the j-th 32 values."""
    runs = torch.stack(_nibbles(raw[..., 48:].unflatten(-1, (4, 32))), -2).flatten(-3, -2)
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = (raw[..., None, 16:48] >> places) & 1
    return Blocks(_rows(runs | fifth << 4), *_k_scales(raw))


def _q6_k(raw: Tensor) -> Blocks:
    """Halves of 128 values: 64 bytes of low nibbles, 32 of the two bits above them."""
    low = raw[..., :128].unflatten(-1, (2, 64))
    high = raw[..., 128:192].unflatten(-1, (2, 1, 32))
    nibbles = torch.cat(_nibbles(low), -1).unflatten(-1, (4, 32))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    values = nibbles | ((high >> shifts) & 3) << 4
    scales = raw[..., 192:208].contiguous().view(torch.int8).float() * _half(raw, 208)[..., None]
    return Blocks(_rows(values) - 32, scales.flatten(1))


READERS: dict[int, Callable[[Tensor], Blocks]] = {
    types.Q8_0: _q8_0,
    types.Q4_0: _q4_0,
    types.Q4_1: _q4_1,
    types.Q5_0: _q5_0,
    types.Q4_K: _q4_k,
    types.Q5_K: _q5_k,
    types.Q6_K: _q6_k,
}
"""uint8 [n, blocks, bytes of a block] -> what it says."""

FORMATS: dict[int, IntegerFormat] = {
    types.Q8_0: IntegerFormat(8, 32),
    types.Q5_0: IntegerFormat(8, 32),
    types.Q6_K: IntegerFormat(8, 16),
    types.Q4_0: IntegerFormat(4, 32),
    types.Q4_1: IntegerFormat(4, 32, with_minima=True),
    types.Q4_K: IntegerFormat(4, 32, with_minima=True),
}
"""Formats of the kernels that hold a type as it is, but for scales rounded to float16."""
