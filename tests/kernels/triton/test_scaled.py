"""Products of e4m3 by torch, which has them on CPUs too: against float64 and our own kernel."""

from __future__ import annotations

import pytest
import torch

from kernels.triton import TritonKernels
from kernels.triton.launch import Target
from kernels.triton.quantized import activations as scaled
from kernels.triton.quantized.activations import MANY_ROWS, library_multiplies

OPS = TritonKernels("cpu", "a test")
BF16 = torch.bfloat16
H200, A100, ADA = Target(90, 132), Target(80, 108), Target(89, 142)


@pytest.fixture
def calls(monkeypatch):
    """Have the interpreter's device count as one that torch multiplies on."""
    calls = []
    monkeypatch.setattr(scaled, "CAPABILITIES", (0,))
    monkeypatch.setattr(scaled, "MANY_ROWS", 17)
    multiply = torch._scaled_mm
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda *args, **options: calls.append(1) or multiply(*args, **options)
    )
    return calls


@pytest.mark.parametrize("biased", [False, True])
def test_many_rows_are_multiplied_by_torch(calls, biased):
    x = torch.randn(19, 160).to(BF16)
    x[3] = 0
    x[5] *= 1e4
    x[7, 2] = float("nan")
    weight, bias = torch.randn(48, 160) / 13, torch.randn(48).to(BF16).float()
    layer = OPS.PackedLinear(weight, bias if biased else None, quantization="fp8")
    wide = torch.randn(19, 200).to(BF16)
    wide[:, :160] = x
    out = torch.full((19, 48), float("nan"), dtype=BF16)
    assert layer(wide[:, :160], out) is out
    assert calls == [1]
    finite_rows = torch.arange(19) != 7
    assert out[7].isnan().all()
    assert out[finite_rows].isfinite().all()
    meant = layer.rows(torch.arange(48)).double()
    expected = x.double() @ meant.T + (bias.double() if biased else 0)
    error = (out.double() - expected)[finite_rows].norm(dim=1) / expected[finite_rows].norm(
        dim=1
    ).clamp(1e-9)
    assert error.max() < 0.06
    layer.by_library = False
    local_layer = layer(x)
    assert calls == [1]
    torch.testing.assert_close(out[finite_rows], local_layer[finite_rows], rtol=2**-7, atol=1e-3)


def test_few_rows_and_batch_invariant_layers_have_our_kernel(calls):
    layer = OPS.PackedLinear(torch.randn(32, 64), quantization="fp8")
    layer(torch.randn(16, 64).to(BF16))
    layer.fixed_tile = 64
    layer(torch.randn(17, 64).to(BF16))
    assert calls == []


def test_torch_multiplies_what_it_can():
    weight = torch.empty(4096, 4096, dtype=torch.uint8)
    assert library_multiplies(MANY_ROWS, weight, BF16, H200)
    assert not library_multiplies(MANY_ROWS - 1, weight, BF16, H200)
    assert not library_multiplies(MANY_ROWS, weight, torch.float16, H200)
    assert not library_multiplies(MANY_ROWS, weight[:, :4088], BF16, H200)
    assert not library_multiplies(MANY_ROWS, weight[:4090], BF16, H200)
    for target in (A100, ADA):
        assert not library_multiplies(MANY_ROWS, weight, BF16, target)


def test_a_torch_without_it_has_our_kernel(calls, monkeypatch):
    monkeypatch.delattr(torch, "_scaled_mm")
    layer = OPS.PackedLinear(torch.randn(32, 64), quantization="fp8")
    assert layer(torch.randn(17, 64).to(BF16)).isfinite().all()
