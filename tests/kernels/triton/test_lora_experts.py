"""Adapters of experts by slots, in Triton's interpreter: what each row's own would give it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.models.decoder_spec import MoeSpec
from engine.models.layers.moe import GroupedMoe
from kernels.interface import ActivationSpec, ExpertLayers, MlpWeights
from kernels.lora import EXPERTS, LoraMapping, LoraSlice, LoraWeights, MoeLoraMapping
from kernels.moe import SequentialMoe
from kernels.triton import TritonKernels
from kernels.triton.lora import TritonLoraSlots
from kernels.triton.quantized import GroupedExperts
from tests.kernels.tolerance import assert_close
from tests.kernels.triton.test_invariant import InterpreterBuilder, dot

OPS = TritonKernels("cpu", "a test")
HIDDEN, INNER, SHARED, COUNT, TOP_K = 48, 24, 32, 5, 2
LAYER = 3
SILU = ActivationSpec("silu")


def mixture(dtype, quantization=None):
    """Five experts, and one of all rows."""

    def layer(rows, columns, kind=None):
        weight = (torch.randn(rows, columns) / columns**0.5).to(dtype)
        return OPS.PackedLinear(weight, None, quantization=kind)

    return ExpertLayers(
        router=layer(COUNT, HIDDEN),
        gate_up=[layer(2 * INNER, HIDDEN, quantization) for _ in range(COUNT)],
        down=[layer(HIDDEN, INNER, quantization) for _ in range(COUNT)],
        top_k=TOP_K, softmax_first=True, renormalize=True, activation=SILU,
        shared_gate_up=layer(2 * SHARED, HIDDEN), shared_down=layer(HIDDEN, SHARED),
        shared_gate=layer(1, HIDDEN),
    )  # fmt: skip


def fused(layers, dtype):
    """The same weights, stacked."""
    weights = ((up.weight, None, down.weight, None)
               for up, down in zip(layers.gate_up, layers.down, strict=True))  # fmt: skip
    moe = MoeSpec(num_experts=COUNT, top_k=TOP_K, intermediate_size=INNER, layers=(True,))
    shared = MlpWeights(layers.shared_gate_up, layers.shared_down, SILU, True)
    return GroupedMoe(OPS, layers.router, weights, moe, dtype, "silu", shared, layers.shared_gate)


def adapter(layers, rank, dtype, *remaining_out):
    """Of all its layers but some; gate and up of an expert have ranks of their own."""
    weights = {}
    for slot, layer in layers.linears().items():
        if slot in remaining_out:
            continue
        half = layer.out_features // 2 if "up" in slot else layer.out_features
        cuts = [(0, half), (half, layer.out_features)][: layer.out_features // half]
        parts = [
            LoraSlice(first, (0.4 * torch.randn(last - first, rank)).to(dtype), index * rank, 0.75)
            for index, (first, last) in enumerate(cuts)
        ]
        a = (torch.randn(len(parts) * rank, layer.in_features) / layer.in_features**0.5).to(dtype)
        weights[slot] = LoraWeights(a=a, parts=parts, out_features=layer.out_features)
    return weights


def slots_of(dtype, *, alike=False, max_slots=3):
    positions = {(LAYER, "router"): 1, (LAYER, "shared_up"): 2, (LAYER, "shared_down"): 1}
    positions |= {(LAYER, "shared_gate"): 1, (LAYER, EXPERTS["up"]): 2, (LAYER, EXPERTS["down"]): 1}
    cpu = torch.device("cpu")
    return TritonLoraSlots(positions, max_slots, 20, dtype, cpu, alike=alike, experts=COUNT)


def store_lora(slots, lora):
    layers = [{}] * LAYER + [{slot: slots.pack(tensors) for slot, tensors in lora.items()}]
    return slots.put(layers)


def rows_of(slots, owner, tables, *, padded=True):
    """Rows of adapters by their tables; `owner` -1: of none."""
    groups = [(table.slot, (owner == index).nonzero().flatten().numpy())
              for index, table in enumerate(tables)]  # fmt: skip
    groups = [(slot, slot_rows) for slot, slot_rows in groups if len(slot_rows)]
    mapping = slots.sort(groups, len(owner), padded=padded)
    return MoeLoraMapping(
        slots, LAYER, LoraMapping(*(torch.from_numpy(array) for array in mapping))
    )


def case(dtype, quantization=None):
    torch.manual_seed(2)
    layers = mixture(dtype, quantization)
    loras = [adapter(layers, 4, dtype), adapter(layers, 17, dtype, "router", "up.1", "down.3")]
    loras.append({slot: weights for slot, weights in loras[0].items() if slot == "router"})
    owner = torch.tensor([0, -1, 1, 1, 0, 2, -1, 1, 0, 2, 1, 1, 1, -1, 0, 0, 1, 2, 0])
    return layers, loras, owner, torch.randn(len(owner), HIDDEN).to(dtype)


def expected(layers, loras, owner, x):
    """One adapter after the other by torch, one expert after the other."""
    uses = [
        ({slot: OPS.pack_lora(weights) for slot, weights in lora.items()},
         (owner == index).nonzero().flatten())
        for index, lora in enumerate(loras)
    ]  # fmt: skip
    return SequentialMoe(OPS, layers).forward_with_adapters(x, uses)


def check(make_experts, dtype, quantization=None, *, padded=True):
    layers, loras, owner, x = case(dtype, quantization)
    slots, experts = slots_of(dtype), make_experts(layers)
    tables = [store_lora(slots, lora) for lora in loras]
    adapted_out = experts.forward_with_slots(x, rows_of(slots, owner, tables, padded=padded))
    expected_out = expected(layers, loras, owner, x)
    rounded = torch.float32 if quantization is None else torch.bfloat16
    assert_close(adapted_out, expected_out, dtype if quantization is None else rounded, 16.0)
    baseline_experts = experts(x)
    assert_close(adapted_out[owner < 0], baseline_experts[owner < 0], dtype, 4.0)
    for index in range(len(loras)):
        assert not torch.allclose(
            adapted_out[owner == index], baseline_experts[owner == index], atol=1e-2
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padded", [True, False])
def test_stacked_experts_give_each_row_what_its_adapter_adds(dtype, padded):
    check(lambda layers: fused(layers, dtype), dtype, padded=padded)


def test_experts_one_by_one_do_so_too():
    check(lambda layers: SequentialMoe(OPS, layers), torch.float32)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_in_few_bits_do_so_too(quantization):
    def grouped(layers):
        experts = OPS.compile_experts(layers)
        assert isinstance(experts, GroupedExperts)
        return experts

    check(grouped, torch.float32, quantization)


def test_a_row_of_an_expert_has_the_same_bits_alone_where_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
    _, loras, owner, x = case(torch.float32)
    slots = slots_of(torch.float32, alike=True)
    tables, target = [store_lora(slots, lora) for lora in loras], (LAYER, EXPERTS["up"])
    y = torch.randn(len(x), 2 * INNER)
    owners = rows_of(slots, owner, tables).slot_by_row(len(x))
    assert owners.tolist() == [
        -1 if adapter_index < 0 else tables[adapter_index].slot for adapter_index in owner.tolist()
    ]
    together = y.clone()
    slots.add_expert(target, 2, together, x, owners)
    assert torch.equal(together[owner == 2], y[owner == 2])  # it has a router's matrices alone
    for row in np.flatnonzero((owner == 1).numpy())[:3]:
        isolated_copy = y[row : row + 1].clone()
        slots.add_expert(target, 2, isolated_copy, x[row : row + 1], owners[row : row + 1])
        assert torch.equal(isolated_copy[0], together[row])
        assert not torch.equal(isolated_copy[0], y[row])


def test_what_does_not_fit_is_refused():
    _, loras, owner, x = case(torch.float32)
    slots = slots_of(torch.float32)
    bias = {"up.0": LoraWeights(a=torch.zeros(1, HIDDEN), parts=[], out_features=2 * INNER,
                                shift=torch.ones(2 * INNER))}  # fmt: skip
    with pytest.raises(ValueError, match="matrices alone"):
        store_lora(slots, bias)
    owners = rows_of(slots, owner, [store_lora(slots, lora) for lora in loras]).slot_by_row(len(x))
    with pytest.raises(ValueError, match="owners for"):
        slots.add_expert((LAYER, EXPERTS["up"]), 0, torch.zeros(3, 2 * INNER), x[:3], owners)
