"""Norms and gated activations in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

from kernels.triton.elementwise import fused_add_rms_norm, gelu_and_mul, rms_norm, silu_and_mul
from tests.kernels import oracle
from tests.kernels.test_activation import gated
from tests.kernels.test_norm import DTYPES
from tests.kernels.tolerance import assert_close


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 16, 17, 129, 2048])
def test_rms_norm(dtype, width):
    x = (torch.randn(5, width) * 3).to(dtype)
    weight = (1 + 0.1 * torch.randn(width)).to(dtype)
    assert_close(rms_norm(x, weight, 1e-5), oracle.rms_norm(x, weight, 1e-5), dtype)


def test_a_float32_weight_strided_rows_and_none():
    x, weight = torch.randn(6, 64).bfloat16()[:, :33], torch.randn(33)
    assert_close(rms_norm(x, weight, 1e-6), oracle.rms_norm(x, weight, 1e-6), x.dtype)
    assert rms_norm(x[:0], weight, 1e-6).shape == (0, 33)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_add_rms_norm_adds_in_place(dtype):
    x, residual = torch.randn(7, 17).to(dtype), torch.randn(7, 17).to(dtype)
    weight = torch.randn(17).to(dtype)
    added = x.double() + residual.double()
    normed = fused_add_rms_norm(x, residual, weight, 1e-5)
    assert_close(residual, added, dtype)
    assert_close(normed, oracle.rms_norm(residual, weight, 1e-5), dtype)


def test_norms_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match="doesn't fit"):
        rms_norm(torch.randn(2, 32), torch.randn(31), 1e-6)
    with pytest.raises(ValueError, match="differ"):
        fused_add_rms_norm(torch.randn(2, 32), torch.randn(3, 32), torch.randn(32), 1e-6)
    with pytest.raises(ValueError, match="at most"):
        rms_norm(torch.randn(1, 70_000), torch.randn(70_000), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 17, 1500])
def test_silu_and_mul(dtype, width):
    x = (torch.randn(3, 2 * width) * 4).to(dtype)
    assert_close(silu_and_mul(x), gated(x, torch.nn.functional.silu), dtype)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_and_mul(approximate):
    x = torch.randn(9, 2 * 77) * 3
    expected = gated(x, lambda gate: torch.nn.functional.gelu(gate, approximate=approximate))
    assert_close(gelu_and_mul(x, approximate), expected, torch.float32)


def test_extreme_values_stay_finite():
    x = torch.tensor([[-1e4, -200.0, -0.0, 200.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]])
    for result in (silu_and_mul(x), gelu_and_mul(x, "tanh"), gelu_and_mul(x)):
        torch.testing.assert_close(result, torch.tensor([[0.0, 0.0, 0.0, 200.0, 1e4]]))


def test_activations_refuse_what_does_not_fit():
    assert silu_and_mul(torch.empty(0, 64)).shape == (0, 32)
    with pytest.raises(ValueError, match="approximate"):
        gelu_and_mul(torch.randn(1, 4), "sigmoid")
    with pytest.raises(ValueError, match="halves"):
        silu_and_mul(torch.randn(1, 5))
