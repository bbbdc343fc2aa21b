"""Weights that are integers with a scale, and maybe a zero point, for each group of a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from engine.quantization.matrix import IntegerFormat, Own, Plain, Rows
from kernels.codes import Codes, Coding
from kernels.interface import Integers
from kernels.quantization import MOST

#: Of a scale that is kept in float16: less than half of what a weight loses in bfloat16.
_MOST_SCALE_ERROR = 2.0**-10
#: Of unsigned bytes: what the kernels' signed ones count from.
_MIDDLE = 128
#: What reading a value takes for a while: integers, floats, copies of both.
_READ_BYTES = 16


class GroupedMatrix(Plain):
    """weight[r, k] = scale[r, g] * (value[r, k] - zero[r, g]), where g is the group of column k.

    Args:
        source: of which format it is, for the load report.
        shape: (N, K).
        group: neighbours of a row that share a scale; the last group may be shorter.
        bits: of an integer.
        values: integers [n, K] of some rows: from 0 where there are zero points, else signed.
        scales: [N, groups], finite.
        zeros: zero points [n, groups] of some rows; a number: it is that everywhere.
        group_of: int64 [K], the group of each column, where it isn't its place; None: it is.
        whole_zeros: zero points are whole numbers, from 0 to 255.
        factor: what all scales are multiplied with.
        stored_bits: of a value in the checkpoint, where it isn't `bits`.
        codes: codes [n, K] of some rows, where values are twice the floats of e2m1.
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
        whole_zeros: bool = True,
        factor: float = 1.0,
        stored_bits: int | None = None,
        codes: Callable[[Rows], Tensor] | None = None,
    ) -> None:
        self.source, self.shape, self.row_bytes = source, shape, shape[1] * _READ_BYTES
        self._group, self._bits, self.stored_bits = group, bits, stored_bits or bits
        self._values, self._scales, self._factor = values, scales, factor
        self._zeros = zeros if isinstance(zeros, int) else _constant(zeros)
        self._group_of = group_of
        self._whole_zeros, self._codes = whole_zeros, codes
        form = self._format()
        usual = group_of is None and form is not None and not _has_byte_zeros(form)
        self.integers = form if usual else None
        self.own = self._own(form)

    # -- floats -------------------------------------------------------------------------------

    def floats(self, rows: Rows) -> Tensor:
        """See `Matrix`: float32, not rounded."""
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
        return _taken(self._scales, rows).float() * self._factor

    def _zeros_of(self, rows: Rows) -> Tensor:
        if isinstance(self._zeros, int):
            return torch.tensor([[self._zeros]])
        return self._zeros(rows)

    # -- integers -----------------------------------------------------------------------------

    def _format(self) -> IntegerFormat | None:
        """The kernels' format that holds it; None: there's none."""
        group = kernel_group(self._group, self.shape[1])
        if group is None or not self._fit_half():
            return None
        shared = isinstance(self._zeros, int)
        if self._bits <= 4:
            plain = shared and self._shifted(8) is not None
            whole = self._whole_zeros
            return IntegerFormat(4, group, not plain and not whole, not plain and whole)
        around = self._bits == 8 and self._zeros not in (0, _MIDDLE)
        if not around and not self._whole_zeros:
            return None
        return IntegerFormat(8, group, with_zeros=around)

    def _own(self, form: IntegerFormat | None) -> Own | None:
        """e2m1, bytes with zero points, or integers whose columns are sorted so that groups are
        whole; None: nothing of it.
        """
        if form is None:
            return None
        if self._codes is not None:
            return Coding("e2m1", form.group_size)
        if self._group_of is None:
            return form if _has_byte_zeros(form) else None
        order = sorted_columns(self._group_of, self._group)
        return None if order is None else replace(form, order=order.numpy().tobytes())

    def _shifted(self, zero: int) -> int | None:
        """What to add to values so that `zero` stands for nothing; None: they'd leave four bits."""
        if not isinstance(self._zeros, int):
            return None
        if self._zeros == 0:  # signed
            return zero if self._bits <= 4 else None
        added = zero - self._zeros
        return added if added >= 0 and (1 << self._bits) - 1 + added <= 15 else None

    def _fit_half(self) -> bool:
        """Whether float16 holds the scales nearly as they are."""
        if self._scales.dtype == torch.float16 and self._factor == 1.0:
            return True
        exact = self._scales_of(slice(None))
        lost = (exact.half().float() - exact).abs()
        return bool((lost <= exact.abs() * _MOST_SCALE_ERROR).all())

    def as_integers(self, rows: Rows) -> Integers:
        """See `Matrix`."""
        if self.integers is None:
            raise ValueError(f"{self.source} has no format of the kernels")
        return self._as(self.integers, self._values(rows), rows)

    def as_own(self, rows: Rows) -> Integers | Codes:
        """See `Matrix`."""
        if isinstance(self.own, Coding) and self._codes is not None:
            scales = self._scales_of(rows) * 2
            times = self.shape[1] // self.own.group_size // scales.shape[1]
            return Codes(self._codes(rows), scales.repeat_interleave(times, 1))
        if not isinstance(self.own, IntegerFormat):
            raise ValueError(f"{self.source} has no form of its own in the kernels")
        values = self._values(rows)
        if self._group_of is not None:
            values = values[:, torch.argsort(self._group_of, stable=True)]
        return self._as(self.own, values, rows)

    def _as(self, kind: IntegerFormat, values: Tensor, rows: Rows) -> Integers:
        scales = self._scales_of(rows)
        minima = zeros = None
        if kind.with_zeros:
            zeros = self._zeros_of(rows).expand_as(scales)
            if kind.bits == 8:  # the kernels' are signed
                values, zeros = values.to(torch.int16) - _MIDDLE, zeros - _MIDDLE
        elif kind.with_minima:
            minima = scales * self._zeros_of(rows).float()
        elif kind.bits == 4:
            values = values + (self._shifted(8) or 0)
        elif self._zeros != 0:
            values = values - self._by_column(self._zeros_of(rows)).to(values.dtype)
        made = Integers(values.to(torch.int8), scales, minima, zeros)
        return _repeated(made, -(-self.shape[1] // kind.group_size) // scales.shape[1])


def _has_byte_zeros(form: IntegerFormat) -> bool:
    """Whether only some sets of kernels have it."""
    return form.bits == 8 and form.with_zeros


def _repeated(integers: Integers, times: int) -> Integers:
    """With each group as so many of a part of its size."""
    if times == 1:
        return integers
    scales, minima, zeros = (
        None if part is None else part.repeat_interleave(times, 1)
        for part in (integers.scales, integers.minima, integers.zeros)
    )
    return Integers(integers.values, integers.scales if scales is None else scales, minima, zeros)


def kernel_group(group: int, width: int) -> int | None:
    """The group size in which the kernels keep such groups, maybe a part of one; None: in none."""
    group = min(group, width)
    if width % group:
        return None
    return next((part for part in range(MOST, 0, -16) if group % part == 0), None)


def sorted_columns(group_of: Tensor, group: int) -> Tensor | None:
    """int64 [K]: columns by group, each in its order; None unless all groups are whole."""
    if bool((torch.bincount(group_of) != group).any()):
        return None
    return torch.argsort(group_of, stable=True)


def _constant(zeros: Callable[[Rows], Tensor]) -> Callable[[Rows], Tensor] | int:
    """The number that all zero points are, if they are one, and it isn't 0."""
    found = zeros(slice(None))
    first = found.flatten()[0]
    whole = float(first) == int(first) and int(first) != 0
    return int(first) if whole and bool((found == first).all()) else zeros


def _taken(scales: Tensor, rows: Rows) -> Tensor:
    """Those rows; of 8-bit floats torch takes slices alone."""
    if isinstance(rows, slice) or scales.element_size() > 1:
        return scales[rows]
    return scales.view(torch.uint8)[rows].view(scales.dtype)
