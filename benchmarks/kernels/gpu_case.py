"""One row of the GPU benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Run = Callable[[], object]


@dataclass(slots=True)
class GpuCase:
    """One row: `goal` is the part of the ceiling that is to be reached, 0 for none."""

    op: str
    shape: str
    run: Run
    check: Run
    bytes: int = 0
    flops: int = 0
    goal: float = 0.0


def compare(got: Tensor, expected: Tensor, allowed: float) -> None:
    """Raise ValueError unless |got - expected| / |expected|, by norms, is at most `allowed`."""
    error = (got.double() - expected.double()).norm() / expected.double().norm()
    if not bool(error <= allowed):
        raise ValueError(f"off by {float(error):.2g} from the reference, {allowed} is allowed")
