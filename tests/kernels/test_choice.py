"""Kernel sets keep their tensors on their own device."""

from __future__ import annotations

import torch

from kernels.reference import ReferenceKernels
from tests.kernels.linears import integer_linear


def test_the_reference_packs_weights_on_its_device():
    meta = ReferenceKernels(device="meta")
    layer = meta.PackedLinear(torch.randn(4, 32), torch.randn(4))
    assert layer.weight.device.type == layer.bias.device.type == "meta"
    values = torch.zeros((4, 32), dtype=torch.int8)
    layer = integer_linear(meta, values, torch.ones(4, 2), bits=8)
    assert layer.weight.device.type == "meta"
    assert meta.new_kv_cache((1, 1, 4, 8), torch.float32).device.type == "meta"
