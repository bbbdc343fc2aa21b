"""Mixtures of experts in few bits, in Triton's interpreter, against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.interface import ActivationSpec, ExpertLayers
from kernels.layers import gated_activation
from kernels.moe import SequentialMoe
from kernels.triton import TritonKernels
from kernels.triton.batch_invariant import InvariantTritonKernels
from kernels.triton.moe import align
from kernels.triton.quantized import GroupedExperts
from kernels.triton.quantized.linear import SortedRows
from kernels.triton.quantized.moe import StackedLinear, stackable
from tests.kernels.linears import integer_linear

OPS = TritonKernels("cpu", "a test")
HIDDEN, INNER = 48, 32
CLAMPED = ActivationSpec("swiglu_clamped", 0.7, 1.7)
ROUNDED_INPUTS = {"int8": 0.02, "int4": 0.0, "fp8": 0.12}
"""What rounding activations to eight bits, twice, may move a result by, of its size."""


@pytest.fixture(autouse=True)
def seeded():
    """Inputs without a token that likes two experts equally well: either may have it then."""
    torch.manual_seed(1)


def mixture(quantization, count, top_k, *, bias=False, shared=False, ops=OPS, **more):
    def layer(rows, columns, quantization=quantization, added=bias):
        weight = torch.randn(rows, columns) / columns**0.5
        return ops.PackedLinear(
            weight, torch.randn(rows) if added else None, quantization=quantization
        )

    layers = {
        "router": layer(count, HIDDEN, None, False),
        "gate_up": [layer(2 * INNER, HIDDEN) for _ in range(count)],
        "down": [layer(HIDDEN, INNER) for _ in range(count)],
    }
    if shared:
        layers |= {"shared_gate_up": layer(48, HIDDEN), "shared_down": layer(HIDDEN, 24)}
        layers["shared_gate"] = layer(1, HIDDEN, None, False)
    settings = {"softmax_first": True, "renormalize": True, "activation": ActivationSpec()}
    return ExpertLayers(**layers, top_k=top_k, **{**settings, **more})


def exact(experts, x):
    """Each token's experts by their weights as they were rounded, in float64."""
    act = gated_activation(_DirectProducts, experts.activation)

    def run(layer, rows):
        weight = layer.rows(torch.arange(layer.out_features)).double()
        return rows @ weight.T + (0 if layer.bias is None else layer.bias.double())

    scores = experts.router(x).double()
    if experts.sigmoid:
        shares = scores.sigmoid()
        chosen = (shares + experts.choice_bias.double()).topk(experts.top_k).indices
        weights = shares.gather(1, chosen) * experts.scale
        weights = weights / (weights.sum(-1, keepdim=True) / experts.scale)
    elif experts.softmax_first:
        weights, chosen = scores.softmax(-1).topk(experts.top_k)
        if experts.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
    else:
        best, chosen = scores.topk(experts.top_k)
        weights = best.softmax(-1)
    rows, out = x.double(), torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for token, (few, ids) in enumerate(zip(weights, chosen, strict=True)):
        for weight, expert in zip(few, ids.tolist(), strict=True):
            inside = act(run(experts.gate_up[expert], rows[token : token + 1]))
            out[token] += weight * run(experts.down[expert], inside)[0]
    if experts.shared_gate_up is not None:
        shared_out = run(experts.shared_down, act(run(experts.shared_gate_up, rows)))
        out += run(experts.shared_gate, rows).sigmoid() * shared_out
    return out


class _DirectProducts:
    @staticmethod
    def silu_and_mul(x):
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize(
    ("tokens", "count", "top_k", "dtype", "kind"),
    [
        (1, 3, 1, torch.float32, {}),
        (9, 4, 3, torch.bfloat16, {"bias": True, "softmax_first": False}),
        (
            4, 4, 2, torch.float32,
            {"bias": True, "shared": True, "activation": CLAMPED},
        ),
        (
            5, 4, 2, torch.float32,
            {"sigmoid": True, "choice_bias": torch.tensor([0.3, -0.2, 0.0, 0.1]), "scale": 1.7},
        ),
    ],
)  # fmt: skip
def test_all_experts_at_once(quantization, tokens, count, top_k, dtype, kind):
    experts = mixture(quantization, count, top_k, **kind)
    x = torch.randn(tokens, HIDDEN).to(dtype)
    compiled = OPS.compile_experts(experts)
    assert isinstance(compiled, GroupedExperts)
    assert not compiled.needs_host_sync
    got, expected = compiled(x), exact(experts, x)
    assert got.dtype == dtype
    error = (got.double() - expected).norm() / expected.norm()
    rounding = 1e-2 if dtype == torch.bfloat16 else 1e-5
    assert float(error) <= ROUNDED_INPUTS[quantization] + rounding
    # And it's what the experts give one by one, whose activations are rounded as well.
    isolated_tensor = SequentialMoe(OPS, experts)
    torch.testing.assert_close(
        got, isolated_tensor(x), rtol=0, atol=3 * rounding * float(got.abs().max())
    )
    assert compiled.nbytes == isolated_tensor.nbytes
    assert compiled(x[:0]).shape == (0, HIDDEN)
    total = sum(part.nbytes for part in compiled.tensors().values())
    assert total == sum(part.nbytes for part in isolated_tensor.tensors().values())


def test_minima_of_a_checkpoint_are_kept():
    def layer(rows, columns):
        values = torch.randint(0, 16, (rows, columns), dtype=torch.int8)
        scales, min_tensor = (
            torch.rand(rows, columns // 16) / 64,
            torch.rand(rows, columns // 16) / 8,
        )
        return integer_linear(OPS, values, scales, min_tensor, bits=4)

    up, down = (
        [layer(*shape) for _ in range(3)] for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    )
    experts = dataclasses.replace(mixture("int4", 3, 2), gate_up=up, down=down)
    x = torch.randn(9, HIDDEN)
    got = OPS.compile_experts(experts)(x)
    torch.testing.assert_close(got.double(), exact(experts, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_batch_invariant_experts_are_the_same_in_every_batch(quantization):
    ops = InvariantTritonKernels("cpu", "a test")
    experts = ops.compile_experts(mixture(quantization, 4, 2, ops=ops))
    assert isinstance(experts, GroupedExperts)
    x = torch.randn(9, HIDDEN)
    full = experts(x)
    for rows in (slice(3, 4), slice(0, 7)):
        assert torch.equal(experts(x[rows]), full[rows])


def test_experts_of_several_forms_run_one_by_one():
    experts = mixture("int4", 3, 2)
    other = mixture("int8", 3, 2)
    mixed = dataclasses.replace(experts, down=[*experts.down[:2], other.down[2]])
    compiled = OPS.compile_experts(mixed)
    assert isinstance(compiled, SequentialMoe)
    assert compiled.needs_host_sync
    assert compiled(torch.randn(4, HIDDEN)).shape == (4, HIDDEN)
    assert not stackable(mixture(None, 2, 1).gate_up)
    assert not stackable([*experts.gate_up, experts.down[0]])


def test_what_does_not_go_together_is_refused():
    experts = mixture("int8", 3, 2)
    with pytest.raises(ValueError, match="4 of 3"):
        OPS.compile_experts(dataclasses.replace(experts, top_k=4))
    up, groups = StackedLinear(experts.gate_up), align(torch.zeros(4, dtype=torch.int32), 3, 16)
    with pytest.raises(ValueError, match="columns"):
        up(torch.randn(2, HIDDEN + 1), SortedRows(groups, 2, None), torch.float32)
    with pytest.raises(ValueError, match="4 sorted rows"):
        up(torch.randn(3, HIDDEN), SortedRows(groups, 2, None), torch.float32)
