"""The product of low-rank adapters, by segments of rows (Hu et al. 2021, "LoRA")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kernels.reference.elementwise import wide
from kernels.tensors import describe


@dataclass(frozen=True, slots=True)
class LoraSegment:
    """Neighbouring rows that go through one adapter.

    Attributes:
        start, end: the rows [start, end).
        a: [rank, K] of float32 or bfloat16.
        b: [N, rank] of the same dtype.
        scale: of what the adapter adds.
    """

    start: int
    end: int
    a: Tensor
    b: Tensor
    scale: float = 1.0


def add_lora(y: Tensor, x: Tensor, segments: Sequence[LoraSegment]) -> None:
    """y[rows] += scale * (x[rows] A^T) B^T for each segment, in place; other rows stay as they are.

    y [T, N] and x [T, K]. Segments are in ascending order and have no row in common; ranks may
    differ. Products are computed in float32, or in float64 where x is, and rounded once, to y's
    dtype. Raises ValueError, before anything is written, for what doesn't fit together.
    """
    _check(y, x, segments)
    for segment in segments:
        rows = slice(segment.start, segment.end)
        a, b, inputs = (
            wide(part).to(wide(x[:0]).dtype) for part in (segment.a, segment.b, x[rows])
        )
        added = (inputs @ a.T) @ b.T * segment.scale
        y[rows] = (wide(y[rows]) + added).to(y.dtype)


def _check(y: Tensor, x: Tensor, segments: Sequence[LoraSegment]) -> None:
    if x.dim() != 2 or y.dim() != 2 or len(y) != len(x):
        raise ValueError(f"y {describe(y)} and x {describe(x)} must be rows of the same number")
    end = 0
    for segment in segments:
        if not end <= segment.start <= segment.end <= len(x):
            raise ValueError(
                f"segment [{segment.start}, {segment.end}) must lie behind row {end} of {len(x)}"
            )
        end = segment.end
        a, b = segment.a, segment.b
        if a.dim() != 2 or a.shape[1] != x.shape[1]:
            raise ValueError(f"a {describe(a)} must be [rank, {x.shape[1]}]")
        if b.shape != (y.shape[1], a.shape[0]) or b.dtype != a.dtype:
            raise ValueError(f"b {describe(b)} must be [{y.shape[1]}, {a.shape[0]}] like a")
