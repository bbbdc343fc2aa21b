"""Quantized weights: integers with a scale, and optionally a zero point, per group of a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from engine.quantization.formats.bitmask import SparseRows
from engine.quantization.packing import DequantizedSource, NativeFormat, Rows
from kernels.interface import IntegerRows
from kernels.linear_factory import MAX_VALUE, CodeFormat, CodeRows, IntegerFormat

WORD = 32


def row_numbers(rows: Rows, count: int) -> Tensor:
    """Return int64 row numbers, from a slice or numbers."""
    if isinstance(rows, slice):
        return torch.arange(*rows.indices(count))
    return rows


def pack_factor(bits: int) -> int:
    """Return the number of complete integers of that many bits in a word."""
    return WORD // bits


def unpack_columns(words: Tensor, bits: int, count: int) -> Tensor:
    """Return int32 [n, count], unsigned, from int32 words [n, ceil(count / factor)].

    A word contains as many complete integers as fit, lowest bits first.
    """
    factor = pack_factor(bits)
    shifts = torch.arange(factor, dtype=torch.int32) * bits
    values = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return values.flatten(-2)[..., :count]


def unpack_stream(words: Tensor, bits: int) -> Tensor:
    """Return uint8 [n, 32 * words / bits] from int32 [n, words]: without gaps, lowest bits first.

    Some integers of 3 bits begin in one word and end in the next.
    """
    if WORD % bits == 0:
        return unpack_columns(words, bits, words.shape[-1] * WORD // bits).to(torch.uint8)
    runs = words.unflatten(-1, (-1, bits)).long() & 0xFFFFFFFF
    following = torch.cat((runs[..., 1:], torch.zeros_like(runs[..., :1])), -1)
    starts = torch.arange(WORD) * bits
    word, shift = starts // WORD, starts % WORD
    both = runs[..., word] | (following[..., word] << WORD)
    return ((both >> shift) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)


def pick(
    words: Tensor, rows: Rows, bits: int, count: int, positions: tuple[int, ...] = ()
) -> Tensor:
    """Return int32 [n, rows]: some of `count` integers packed in the words' last dimension.

    `positions`: index within the word of each of its integers; default: in order.
    """
    numbers = row_numbers(rows, count)
    factor = pack_factor(bits)
    shift_positions = torch.tensor(positions or tuple(range(factor)), dtype=torch.int32)
    shifts = shift_positions[numbers % factor] * bits
    return (words[:, numbers // factor] >> shifts) & ((1 << bits) - 1)


def pick_stream(words: Tensor, rows: Rows, bits: int, count: int) -> Tensor:
    """As `pick`, for integers without gaps, see `unpack_stream`."""
    if WORD % bits == 0:
        return pick(words, rows, bits, count)
    return unpack_stream(words, bits)[:, row_numbers(rows, count)].to(torch.int32)


def nibbles(packed: Tensor, high_first: bool = False) -> Tensor:
    """Return uint8 [n, 2 k] from bytes [n, k]."""
    low, high = packed & 15, packed >> 4
    pair = (high, low) if high_first else (low, high)
    return torch.stack(pair, -1).flatten(-2)


class ScaledMatrix(DequantizedSource):
    """weight[r, k] = value[r, k] * scale[r // block rows, k // block columns].

    Args:
        source: name of the format, for the load report.
        values: float8 or int8 [N, K], possibly sparse.
        scales: [ceil(N / block rows), ceil(K / block columns)], finite.
        block: (rows, columns) that share a scale.
    """

    quantized = False
    bits = 8

    def __init__(
        self, source: str, values: Tensor | SparseRows, scales: Tensor, block: tuple[int, int]
    ) -> None:
        self.source, self.shape = source, (values.shape[0], values.shape[1])
        self.row_bytes = values.shape[1] * 12
        self._values, self._scales, self._block = values, scales, block
        group = code_group(block[1], values.shape[1])
        if values.dtype == torch.float8_e4m3fn and group is not None:
            self.native_format = CodeFormat("e4m3", group)

    def floats(self, rows: Rows) -> Tensor:
        """See `WeightSource`: float32, not rounded."""
        scales = self._scales_of(rows)
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(self._block[1], 1)[:, : self.shape[1]]
        return _select_rows(self._values, rows).to(torch.float32).mul_(scales)

    def _scales_of(self, rows: Rows) -> Tensor:
        return self._scales.float()[row_numbers(rows, self.shape[0]) // self._block[0]]

    def as_native(self, rows: Rows) -> CodeRows:
        """See `WeightSource`."""
        if not isinstance(self.native_format, CodeFormat):
            raise ValueError(f"{self.source} has no form of the kernels")
        codes = _select_rows(self._values, rows).view(torch.uint8)
        return CodeRows(
            codes,
            by_group(self._scales_of(rows), self._block[1], self.native_format, self.shape[1]),
        )


def code_group(block: int, width: int) -> int | None:
    """Return the group size in which kernels store codes whose scales are for `block` neighbors.

    A single scale of a row or weight is repeated. None: no such group size.
    """
    if block >= width:
        return min(MAX_VALUE, -(-width // 16) * 16)
    return next((size for size in range(MAX_VALUE, 0, -16) if block % size == 0), None)


def by_group(scales: Tensor, block: int, coding: CodeFormat, width: int) -> Tensor:
    """Convert scales of blocks of columns [n, blocks] to scales of the kernels' groups."""
    groups = -(-width // coding.group_size)
    if scales.shape[1] == 1:
        return scales.expand(len(scales), groups)
    return scales.repeat_interleave(block // coding.group_size, 1)[:, :groups]


def _select_rows(values: Tensor | SparseRows, rows: Rows) -> Tensor:
    """Return some rows; torch can't index 8-bit floats except by slices."""
    if isinstance(rows, slice) or isinstance(values, SparseRows) or values.element_size() > 1:
        return values[rows]
    return values.view(torch.uint8)[rows].view(values.dtype)


class CodebookMatrix(DequantizedSource):
    """weight[r, k] = table[r, number[r, k]] * factor[r, k].

    Args:
        source: name of the format, for the load report.
        shape: (N, K).
        numbers: returns numbers of some rows, [n, K].
        tables: returns tables of some rows, [n or 1, entries].
        factors: returns factors of some rows, [n, K]; None: 1.
        group: number of neighbors in a row with the same factor, if kernels have such groups. Then
            all rows share one table.
    """

    quantized = False
    bits = 4

    def __init__(
        self,
        source: str,
        shape: tuple[int, int],
        numbers: Callable[[Rows], Tensor],
        tables: Callable[[Rows], Tensor],
        factors: Callable[[Rows], Tensor] | None = None,
        group: int | None = None,
    ) -> None:
        self.source, self.shape, self.row_bytes = source, shape, shape[1] * 20
        self._numbers, self._tables, self._factors = numbers, tables, factors
        if group is not None:
            table = tuple(tables(slice(0, 1))[0].float().tolist())
            self.native_format = CodeFormat("table", group, table)

    def floats(self, rows: Rows) -> Tensor:
        """See `WeightSource`: float32, not rounded."""
        numbers, tables = self._numbers(rows).long(), self._tables(rows).float()
        if len(tables) == 1:
            weights = tables[0][numbers]
        else:
            weights = tables.gather(1, numbers)
        return weights if self._factors is None else weights.mul_(self._factors(rows))

    def as_native(self, rows: Rows) -> CodeRows:
        """See `WeightSource`."""
        if not isinstance(self.native_format, CodeFormat) or self._factors is None:
            raise ValueError(f"{self.source} has no form of the kernels")
        factors = self._factors(rows)[:, :: self.native_format.group_size]
        return CodeRows(self._numbers(rows).to(torch.uint8), factors)


#: Maximum relative error of a scale in float16: less than half the error of a weight in bfloat16.
_MAX_SCALE_ERROR = 2.0**-10
#: Offset from unsigned bytes to the kernels' signed ones.
_MIDDLE = 128
#: Temporary bytes per value while reading: integers, floats, copies of both.
_READ_BYTES = 16


class GroupedMatrix(DequantizedSource):
    """weight[r, k] = scale[r, g] * (value[r, k] - zero[r, g]), where g is the group of column k.

    Args:
        source: name of the format, for the load report.
        shape: (N, K).
        group: neighbors in a row that share a scale; the last group may be shorter.
        bits: bits of an integer.
        values: returns integers [n, K] of some rows: unsigned with zero points, else signed.
        scales: [N, groups], finite.
        zeros: returns zero points [n, groups] of some rows; a number: the same everywhere.
        group_of: int64 [K], the group of each column; None: groups are consecutive.
        integer_zeros: whether zero points are integers from 0 to 255.
        factor: factor of all scales.
        stored_bits: bits of a value in the checkpoint, if different.
        codes: returns codes [n, K] of some rows, if values are twice the floats of e2m1.
    """

    quantized = False

    def __init__(
        self,
        source: str,
        shape: tuple[int, int],
        group: int,
        bits: int,
        values: Callable[[Rows], Tensor],
        scales: Tensor,
        zeros: Callable[[Rows], Tensor] | int = 0,
        group_of: Tensor | None = None,
        integer_zeros: bool = True,
        factor: float = 1.0,
        stored_bits: int | None = None,
        codes: Callable[[Rows], Tensor] | None = None,
    ) -> None:
        self.source, self.shape, self.row_bytes = source, shape, shape[1] * _READ_BYTES
        self._group, self._bits, self.bits = group, bits, stored_bits or bits
        self._values, self._scales, self._factor = values, scales, factor
        self._zeros = zeros if isinstance(zeros, int) else _constant(zeros)
        self._group_of = group_of
        self._integer_zeros, self._codes = integer_zeros, codes
        form = self._format()
        usual = group_of is None and form is not None and not _has_byte_zeros(form)
        self.integers = form if usual else None
        self.native_format = self._find_native_format(form)

    def floats(self, rows: Rows) -> Tensor:
        """See `WeightSource`: float32, not rounded."""
        values, scales = self._values(rows).float(), self._scales_of(rows)
        if self._zeros == 0:
            return values * self._by_column(scales)
        return (values - self._by_column(self._zeros_of(rows).float())) * self._by_column(scales)

    def _by_column(self, groups: Tensor) -> Tensor:
        if groups.shape[1] == 1:
            return groups
        if self._group_of is not None:
            return groups[:, self._group_of]
        return groups.repeat_interleave(self._group, 1)[:, : self.shape[1]]

    def _scales_of(self, rows: Rows) -> Tensor:
        return _select_rows(self._scales, rows).float() * self._factor

    def _zeros_of(self, rows: Rows) -> Tensor:
        if isinstance(self._zeros, int):
            return torch.tensor([[self._zeros]])
        return self._zeros(rows)

    def _format(self) -> IntegerFormat | None:
        """The kernels' format for this weight; None: no such format."""
        group = kernel_group_size(self._group, self.shape[1])
        if group is None or not self._rescale_to_half():
            return None
        shared = isinstance(self._zeros, int)
        if self._bits <= 4:
            shiftable = shared and self._shift_zero_points(8) is not None
            integer_zeros = self._integer_zeros
            return IntegerFormat(
                4, group, not shiftable and not integer_zeros, not shiftable and integer_zeros
            )
        around = self._bits == 8 and self._zeros not in (0, _MIDDLE)
        if not around and not self._integer_zeros:
            return None
        return IntegerFormat(8, group, with_zeros=around)

    def _find_native_format(self, form: IntegerFormat | None) -> NativeFormat | None:
        """Native formats: e2m1, bytes with zero points, or integers with columns sorted into
        complete groups; None: none of these.
        """
        if form is None:
            return None
        if self._codes is not None:
            return CodeFormat("e2m1", form.group_size)
        if self._group_of is None:
            return form if _has_byte_zeros(form) else None
        order = sorted_columns(self._group_of, self._group)
        return None if order is None else replace(form, order=order.numpy().tobytes())

    def _shift_zero_points(self, zero: int) -> int | None:
        """Return the offset of values that makes `zero` 0; None if they would exceed four bits."""
        if not isinstance(self._zeros, int):
            return None
        if self._zeros == 0:  # signed
            return zero if self._bits <= 4 else None
        added = zero - self._zeros
        return added if added >= 0 and (1 << self._bits) - 1 + added <= 15 else None

    def _rescale_to_half(self) -> bool:
        """Whether float16 represents the scales accurately enough."""
        if self._scales.dtype == torch.float16 and self._factor == 1.0:
            return True
        exact = self._scales_of(slice(None))
        lost = (exact.half().float() - exact).abs()
        return bool((lost <= exact.abs() * _MAX_SCALE_ERROR).all())

    def as_integers(self, rows: Rows) -> IntegerRows:
        """See `WeightSource`."""
        if self.integers is None:
            raise ValueError(f"{self.source} has no format of the kernels")
        return self._as(self.integers, self._values(rows), rows)

    def as_native(self, rows: Rows) -> IntegerRows | CodeRows:
        """See `WeightSource`."""
        if isinstance(self.native_format, CodeFormat) and self._codes is not None:
            scales = self._scales_of(rows) * 2
            times = self.shape[1] // self.native_format.group_size // scales.shape[1]
            return CodeRows(self._codes(rows), scales.repeat_interleave(times, 1))
        if not isinstance(self.native_format, IntegerFormat):
            raise ValueError(f"{self.source} has no form of its own in the kernels")
        values = self._values(rows)
        if self._group_of is not None:
            values = values[:, torch.argsort(self._group_of, stable=True)]
        return self._as(self.native_format, values, rows)

    def _as(self, kind: IntegerFormat, values: Tensor, rows: Rows) -> IntegerRows:
        scales = self._scales_of(rows)
        minima = zeros = None
        if kind.with_zeros:
            zeros = self._zeros_of(rows).expand_as(scales)
            if kind.bits == 8:  # the kernels' are signed
                values, zeros = values.to(torch.int16) - _MIDDLE, zeros - _MIDDLE
        elif kind.with_minima:
            minima = scales * self._zeros_of(rows).float()
        elif kind.bits == 4:
            values = values + (self._shift_zero_points(8) or 0)
        elif self._zeros != 0:
            values = values - self._by_column(self._zeros_of(rows)).to(values.dtype)
        integers = IntegerRows(values.to(torch.int8), scales, minima, zeros)
        return _repeated(integers, -(-self.shape[1] // kind.group_size) // scales.shape[1])


def _has_byte_zeros(form: IntegerFormat) -> bool:
    """Whether only some kernel sets support the format."""
    return form.bits == 8 and form.with_zeros


def _repeated(integers: IntegerRows, times: int) -> IntegerRows:
    """Split each group into parts of equal size."""
    if times == 1:
        return integers
    scales, minima, zeros = (
        None if part is None else part.repeat_interleave(times, 1)
        for part in (integers.scales, integers.minima, integers.zeros)
    )
    return IntegerRows(
        integers.values, integers.scales if scales is None else scales, minima, zeros
    )


def kernel_group_size(group: int, width: int) -> int | None:
    """Return the group size in which kernels store such groups, perhaps as parts; None: none."""
    group = min(group, width)
    if width % group:
        return None
    return next((part for part in range(MAX_VALUE, 0, -16) if group % part == 0), None)


def sorted_columns(group_of: Tensor, group: int) -> Tensor | None:
    """Return int64 [K]: columns sorted by group, stably; None unless all groups are complete."""
    if bool((torch.bincount(group_of) != group).any()):
        return None
    return torch.argsort(group_of, stable=True)


def _constant(zeros: Callable[[Rows], Tensor]) -> Callable[[Rows], Tensor] | int:
    """Return the common value of all zero points, if there is one and it isn't 0; or None."""
    points = zeros(slice(None))
    first = points.flatten()[0]
    is_integer = float(first) == int(first) and int(first) != 0
    return int(first) if is_integer and bool((points == first).all()) else zeros
