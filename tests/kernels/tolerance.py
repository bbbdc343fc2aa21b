"""How close to float64 a result must come."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Half a unit in the last place of the dtype, with room for sums done in float32."""


def assert_close(got: Tensor, expected: Tensor, dtype: torch.dtype, slack: float = 1.0) -> None:
    """Relative to each value, and to a thousandth of the largest where values cancel out."""
    assert got.shape == expected.shape
    assert torch.isfinite(got).all()
    error = (got.double() - expected.double()).abs()
    top = float(expected.abs().max()) if expected.numel() else 0.0
    allowed = ROUNDING[dtype] * slack * (expected.double().abs() + 0.1 * top)
    worst = float((error - allowed).max()) if error.numel() else 0.0
    assert worst <= 0, f"off by {float(error.max()):.3g} with values up to {top:.3g}"
