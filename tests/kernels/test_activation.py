"""Activations against float64."""

from __future__ import annotations

import pytest
import torch

from kernels.layers import activation
from tests.covering import covering
from tests.kernels.tolerance import assert_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def gated(x, activation):
    """activation(first half) * second half in float64."""
    gate, up = x.double().chunk(2, -1)
    return activation(gate) * up


@covering(indirect=["threads"], threads=[1, 2], dtype=DTYPES, width=[1, 15, 16, 17, 33, 2048, 5000])
def test_silu_and_mul(kernels, threads, dtype, width):
    x = (torch.randn(3, 2 * width) * 4).to(dtype)
    assert_close(kernels.silu_and_mul(x), gated(x, torch.nn.functional.silu), dtype)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_and_mul(kernels, threads, dtype, approximate):
    x = (torch.randn(9, 2 * 77) * 3).to(dtype)
    expected = gated(x, lambda gate: torch.nn.functional.gelu(gate, approximate=approximate))
    assert_close(kernels.gelu_and_mul(x, approximate), expected, dtype)


@covering(indirect=["threads"], threads=[1, 2], dtype=DTYPES, width=[1, 17, 5000])
def test_sigmoid_and_mul(kernels, threads, dtype, width):
    x = (torch.randn(3, 2 * width) * 4).to(dtype)
    assert_close(kernels.sigmoid_and_mul(*x.chunk(2, -1)), gated(x, torch.sigmoid), dtype)


@covering(
    indirect=["threads"], threads=[1, 2], dtype=DTYPES, width=[1, 17, 2048, 5000],
    name=["silu", "gelu", "gelu_tanh", "relu", "relu2"],
)  # fmt: skip
def test_activations_without_a_gate(kernels, threads, dtype, width, name):
    x = (torch.randn(2, 3, width) * 4).to(dtype)
    x[0, 0, 0] = 4.0  # values that cancel out are compared with one that doesn't
    result = kernels.activation(name)(x)
    assert result.shape == x.shape
    assert_close(result, activation(name)(x.double()), dtype)


def test_extreme_values_stay_finite(kernels):
    x = torch.tensor([[-1e4, -200.0, -0.0, 200.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]])
    for result in (kernels.silu_and_mul(x), kernels.gelu_and_mul(x, "tanh")):
        torch.testing.assert_close(result, torch.tensor([[0.0, 0.0, 0.0, 200.0, 1e4]]))


def test_no_rows(kernels):
    assert kernels.silu_and_mul(torch.empty(0, 64)).shape == (0, 32)


def test_an_unknown_approximation_is_refused(kernels):
    with pytest.raises(ValueError, match="approximate"):
        kernels.gelu_and_mul(torch.randn(1, 4), "sigmoid")
