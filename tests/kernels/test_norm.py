"""RMS norms against float64."""

from __future__ import annotations

import pytest
import torch

from tests.covering import covering
from tests.kernels import oracle
from tests.kernels.tolerance import assert_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@covering(
    indirect=["threads"], threads=[1, 2], dtype=DTYPES, width=[1, 15, 16, 17, 33, 64, 129, 2048]
)
def test_rms_norm(kernels, threads, dtype, width):
    torch.manual_seed(width)
    x = (torch.randn(5, width) * 3).to(dtype)
    weight = (1 + 0.1 * torch.randn(width)).to(dtype)
    assert_close(kernels.rms_norm(x, weight, 1e-5), oracle.rms_norm(x, weight, 1e-5), dtype)


@pytest.mark.parametrize("rows", [0, 1, 300])
def test_any_number_of_rows(kernels, threads, rows):
    x, weight = torch.randn(rows, 96), torch.randn(96)
    assert_close(kernels.rms_norm(x, weight, 1e-6), oracle.rms_norm(x, weight, 1e-6), x.dtype)


def test_float32_weight_with_bfloat16_activations(kernels):
    x, weight = torch.randn(3, 40).bfloat16(), torch.randn(40)
    assert_close(kernels.rms_norm(x, weight, 1e-6), oracle.rms_norm(x, weight, 1e-6), x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [17, 256])
def test_fused_add_rms_norm_adds_in_place(kernels, threads, dtype, width):
    x, residual = torch.randn(7, width).to(dtype), torch.randn(7, width).to(dtype)
    weight = torch.randn(width).to(dtype)
    added = (x.float() + residual.float()).to(dtype)
    normed = kernels.fused_add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, added)
    assert_close(normed, oracle.rms_norm(added, weight, 1e-5), dtype)


def test_rows_are_independent_of_the_batch(kernels):
    x, weight = torch.randn(64, 768), torch.randn(768)
    full = kernels.rms_norm(x, weight, 1e-6)
    assert torch.equal(full[5:6], kernels.rms_norm(x[5:6], weight, 1e-6))


def test_strided_rows(kernels):
    x, weight = torch.randn(6, 64)[:, :32], torch.randn(32)
    assert_close(kernels.rms_norm(x, weight, 1e-6), oracle.rms_norm(x, weight, 1e-6), x.dtype)


def test_a_weight_that_does_not_fit_is_refused(compiled):
    with pytest.raises(ValueError, match="doesn't fit"):
        compiled.rms_norm(torch.randn(2, 32), torch.randn(31), 1e-6)
    with pytest.raises(ValueError, match="differ"):
        compiled.fused_add_rms_norm(torch.randn(2, 32), torch.randn(3, 32), torch.randn(32), 1e-6)
