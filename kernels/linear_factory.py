"""Creates the linear layers of a kernel set from weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels.layers import IntegerRows, LinearLayer

GROUP_SIZES = {"int8": 128, "int4": 32}
"""Default number of neighbours in a row that share a scale."""

MAX_VALUE = 256


def group_size_for(quantization: str, group_size: int | None) -> int:
    """Return the group size. Raises ValueError for one that no kernel supports."""
    if quantization not in GROUP_SIZES:
        supported = ", ".join(GROUP_SIZES)
        raise ValueError(f"quantization must be one of {supported}; got {quantization!r}")
    group = GROUP_SIZES[quantization] if group_size is None else group_size
    if group < 16 or group > MAX_VALUE or group % 16:
        raise ValueError(f"group_size must be a multiple of 16 in [16, {MAX_VALUE}], got {group}")
    return group


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """Floats kept in `dtype` or, with `quantization`, quantized; see `PackedLinear`."""

    dtype: torch.dtype
    quantization: str | None = None
    group_size: int | None = None
    round_inputs: bool = False


@dataclass(frozen=True, slots=True)
class IntegerFormat:
    """Quantized integers; see `IntegerRows`.

    Attributes:
        bits: 4 or 8.
        group_size: number of neighbours in a row that share a scale.
        with_minima, with_zeros: whether rows have minima (with 4 bits), or zero points.
        order: int64 [K] as bytes: column i is multiplied with value order[i] of x; b"" for the
        natural order. Only if `supports_act_order`.
    """

    bits: int
    group_size: int
    with_minima: bool = False
    with_zeros: bool = False
    order: bytes = b""

    def check(self, width: int) -> None:
        """Raise ValueError if no kernel supports rows of `width` values in this format."""
        if self.bits not in (4, 8):
            raise ValueError(f"bits must be 4 or 8, got {self.bits}")
        if self.with_minima and self.bits != 4:
            raise ValueError("minima are for 4 bits")
        if width % group_size_for(f"int{self.bits}", self.group_size):
            raise ValueError(f"rows of {width} values have no whole groups of {self.group_size}")

    def check_rows(self, rows: IntegerRows, width: int) -> None:
        """Raise ValueError unless the tensors match each other, the format and the width."""
        values, scales, second = rows.values, rows.scales, rows.second
        if values.dtype != torch.int8 or values.dim() != 2 or values.shape[1] != width:
            raise ValueError(f"values must be int8 [N, {width}]")
        if scales.shape != (len(values), width // self.group_size):
            raise ValueError(f"scales {list(scales.shape)} don't fit values {list(values.shape)}")
        present = rows.minima is not None, rows.zeros is not None
        if present != (self.with_minima, self.with_zeros) or (
            second is not None and second.shape != scales.shape
        ):
            raise ValueError(
                "minima or zero points are for layers that have them, and have the shape of the "
                "scales"
            )
        low, high = (-128, 127) if self.bits == 8 else (0, 15)
        if values.numel() and (int(values.min()) < low or int(values.max()) > high):
            raise ValueError(f"values of {self.bits} bits must lie in [{low}, {high}]")

    def column_order(self, width: int) -> Tensor | None:
        """Return `order` as int64 [K]. Raises ValueError unless it permutes `width` inputs."""
        if not self.order:
            return None
        order = torch.frombuffer(bytearray(self.order), dtype=torch.int64)
        if order.shape != (width,) or not torch.equal(order.sort().values, torch.arange(width)):
            raise ValueError(f"order must name each of the {width} inputs once")
        return order


def check_row_slice(row_slice: Tensor, shape: tuple[int, int]) -> None:
    """Raise ValueError unless a slice can belong to a weight of `shape`."""
    if row_slice.dim() != 2 or row_slice.shape[1] != shape[1]:
        raise ValueError(f"a piece {list(row_slice.shape)} doesn't fit the weight {list(shape)}")


def concatenate_rows(shape: tuple[int, int], slices: Iterable[Tensor]) -> Tensor:
    """Concatenate slices to a weight. Raises ValueError unless it has `shape`."""
    weight, rows = torch.empty((0, shape[1])), 0
    for row_slice in slices:
        check_row_slice(row_slice, shape)
        if not rows:
            weight = torch.empty(shape, dtype=row_slice.dtype, device=row_slice.device)
        if rows + len(row_slice) <= shape[0]:
            weight[rows : rows + len(row_slice)] = row_slice
        rows += len(row_slice)
    if rows != shape[0]:
        raise ValueError(f"the pieces have {rows} rows, the weight {shape[0]}")
    return weight


CodeKind = Literal["e4m3", "e2m1", "table"]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of floats with a sign, two exponent bits and a mantissa bit."""


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """A format of codes that represent weights.

    Attributes:
        kind: "e4m3" for 8-bit floats, "e2m1" for indices of `E2M1`, "table" for indices of `table`.
        group_size: neighbours in a row that share a scale, a multiple of 16 up to 256.
        table: 16 floats.
    """

    kind: CodeKind
    group_size: int
    table: tuple[float, ...] = ()

    @property
    def bits(self) -> int:
        return 8 if self.kind == "e4m3" else 4


@dataclass(frozen=True, slots=True)
class CodeRows:
    """Rows of coded weights: codes uint8 [N, K], scales float32 [N, ceil(K / group_size)].

    weight = value of the code * scale. 4-bit codes are in [0, 15].
    """

    codes: Tensor
    scales: Tensor


def check_coding(coding: CodeFormat) -> None:
    """Raise ValueError for a format that no kernel supports."""
    size = coding.group_size
    if size < 16 or size > MAX_VALUE or size % 16:
        raise ValueError(f"group_size must be a multiple of 16 in [16, {MAX_VALUE}], got {size}")
    if coding.kind not in ("e4m3", "e2m1", "table"):
        raise ValueError(f"a coding is e4m3, e2m1 or table, not {coding.kind!r}")
    if len(coding.table) != (16 if coding.kind == "table" else 0):
        raise ValueError("a coding by table has 16 floats, others have none")


def check_codes(rows: CodeRows, width: int, coding: CodeFormat) -> None:
    """Raise ValueError unless a slice's tensors match each other and their layer."""
    codes, scales = rows.codes, rows.scales
    if codes.dtype != torch.uint8 or codes.dim() != 2 or codes.shape[1] != width:
        raise ValueError(f"codes must be uint8 [N, {width}]")
    if scales.shape != (len(codes), -(-width // coding.group_size)):
        raise ValueError(f"scales {list(scales.shape)} don't fit codes {list(codes.shape)}")
    if coding.bits == 4 and codes.numel() and int(codes.max()) > 15:
        raise ValueError("codes of 4 bits must lie in [0, 15]")


def dequantize_codes(rows: CodeRows, coding: CodeFormat) -> Tensor:
    """Return the weights that codes represent, float32 [N, K]."""
    codes, width = rows.codes, rows.codes.shape[1]
    if coding.kind == "e4m3":
        values = codes.view(torch.float8_e4m3fn).float()
    else:
        values = torch.tensor(coding.table or E2M1)[codes.long()]
    scales = rows.scales.float().repeat_interleave(coding.group_size, 1)[:, :width]
    return values * scales


def restore_column_order(weight: Tensor, order: Tensor | None) -> Tensor:
    """Return columns that are sorted by `order` in their natural order."""
    if order is None:
        return weight
    placed = torch.empty_like(weight)
    placed[:, order] = weight
    return placed


WeightFormat = FloatFormat | IntegerFormat | CodeFormat
RowSlice = Tensor | IntegerRows | CodeRows
"""Rows of a weight: floats [N, K], or the rows of `IntegerFormat` and `CodeFormat`."""


def join_integers(
    shape: tuple[int, int], slices: Iterable[IntegerRows], form: IntegerFormat
) -> IntegerRows:
    """Join slices of integers. Raises ValueError unless they have `shape` together."""
    form.check(shape[1])
    parts = list(slices)
    for part in parts:
        form.check_rows(part, shape[1])
    minima = [part.minima for part in parts if part.minima is not None]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return IntegerRows(
        concatenate_rows(shape, (part.values for part in parts)),
        torch.cat([part.scales for part in parts]),
        torch.cat(minima) if minima else None,
        torch.cat(zeros) if zeros else None,
    )


def join_dequantized(
    shape: tuple[int, int], slices: Iterable[CodeRows], form: CodeFormat
) -> Tensor:
    """Join slices in float32. Raises ValueError unless they have `shape` together."""
    check_coding(form)

    def dequantized() -> Iterator[Tensor]:
        for part in slices:
            check_codes(part, shape[1], form)
            yield dequantize_codes(part, form)

    return concatenate_rows(shape, dequantized())


class LinearFactory(ABC):
    """Makes linear layers, quantized or not."""

    quantizations: tuple[str, ...] = ("int8", "int4")
    """Supported values of `quantization`."""

    codings: frozenset[CodeKind] = frozenset()
    """Supported kinds of codes; others are dequantized to float32."""

    supports_act_order: bool = False
    """Whether `IntegerFormat.order` is supported."""

    supports_int8_zero_points: bool = False
    """Whether 8-bit integers may have zero points."""

    widens_weights: bool = False
    """Whether float32 rows can be multiplied by 16-bit weights, as by the same weights in float32
    to the bit."""

    def keeps_code_format(self, coding: CodeFormat) -> bool:
        """Whether codes of this kind and group size are supported."""
        return coding.kind in self.codings

    @abstractmethod
    def make_linear(
        self,
        shape: tuple[int, int],
        slices: Iterable[RowSlice],
        form: WeightFormat,
        bias: Tensor | None = None,
    ) -> LinearLayer:
        """Make a linear layer with a weight [N, K] = `shape` in `form`, and a bias [N].

        `slices` are its rows in order; each but the last has a multiple of `SLICE_ROWS` rows. Each
        is packed when it is read and not referenced afterwards, so its memory may be reused for the
        next. Scales and minima are stored in float16. Sums are float32. Integers and codes of kind
        "e2m1" are multiplied with x rounded to 8 bits per group, other codes with x itself.

        Raises ValueError unless the slices have `shape` together, or for an unsupported format.
        """

    def PackedLinear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        quantization: str | None = None,
        group_size: int | None = None,
        round_inputs: bool = False,
    ) -> LinearLayer:
        """Make a linear layer with a whole weight [N, K] and a bias [N].

        If a packed copy is made, `weight` isn't referenced afterwards, so that the caller can free
        it layer by layer. `quantization` is None or one of `quantizations`: "int8" or "int4", with
        a scale for `group_size` neighbours in a row (a multiple of 16 up to 256, by default 128 for
        int8 and 32 for int4), or "fp8" (e4m3), with a scale per row. `round_inputs` allows bf16
        weights to be multiplied with x rounded to bf16, as in a bf16 model, where that is faster
        (AVX512-BF16: twice as fast for many rows); sums are float32.
        """
        form = FloatFormat(weight.dtype, quantization, group_size, round_inputs)
        return self.make_linear((weight.shape[0], weight.shape[1]), [weight], form, bias)
