"""What families have beside the plain layer, in the compiled decoder, against torch in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional

from kernels.interface import (
    NO_NORM,
    ActivationSpec,
    ExpertLayers,
    HeadNormWeights,
    NormWeights,
)
from tests.kernels.decoder_layers import Layer, Shape, compile_layers

HIDDEN, HEADS, KV_HEADS, DIM, INNER = 72, 6, 2, 20, 50
SHAPE = Shape(
    hidden_size=HIDDEN, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM,
    intermediate_size=INNER, norm_eps=1e-5, attention_scale=0.2,
)  # fmt: skip
LENGTH = 37  # tokens of one sequence, all of them queries


def layer_norm(size, *, bias=True):
    return NormWeights(
        "layer", 1 + 0.1 * torch.randn(size), 0.1 * torch.randn(size) if bias else None
    )


class Dense:
    """A packed layer and its weight in float64."""

    def __init__(self, kernels, rows, columns):
        weight, bias = torch.randn(rows, columns) * columns**-0.5, 0.1 * torch.randn(rows)
        self.packed, self._of = kernels.PackedLinear(weight, bias), (weight.double(), bias.double())

    def __call__(self, x):
        return functional.linear(x, *self._of)


def normed(x, norm):
    if norm.kind == "none":
        return x
    weight = 1.0 if norm.weight is None else norm.weight.double()
    bias = 0.0 if norm.bias is None else norm.bias.double()
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + SHAPE.norm_eps).sqrt() * weight + bias


def activated(x, name):
    baseline = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "relu": torch.relu,
        "relu2": lambda x: torch.relu(x).square(),
    }
    return baseline[name](x)


def gated(both, spec):
    gate, up = both.chunk(2, -1)
    if spec.name != "swiglu_clamped":
        return activated(gate, spec.name) * up
    gate = gate.clamp(max=spec.limit)
    return (up.clamp(-spec.limit, spec.limit) + 1) * gate * torch.sigmoid(gate * spec.alpha)


def attend(q, k, v, alibi):
    """[T, heads, D] of the same, causal."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * SHAPE.attention_scale
    positions = torch.arange(LENGTH)
    distance = positions - positions[:, None]
    if alibi is not None:
        scores = scores + alibi.double()[:, None, None] * distance
    scores = scores.masked_fill(distance > 0, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", scores, v)


def expected(shape, layer, dense, residual, final):
    """One layer in float64."""
    residual = residual.double()
    x = normed(residual, layer.input_norm)
    q_size, kv_size = HEADS * DIM, KV_HEADS * DIM
    q, k, v = dense["qkv"](x).split((q_size, kv_size, kv_size), -1)
    if layer.q_full_norm is not None:
        q = normed(q, NormWeights("rms", layer.q_full_norm))
        k = normed(k, NormWeights("rms", layer.k_full_norm))
    q, k, v = (part.unflatten(-1, (-1, DIM)) for part in (q, k, v))
    if layer.q_head_norm is not None:
        q = normed(q, NormWeights("layer", layer.q_head_norm.weight, layer.q_head_norm.bias))
        k = normed(k, NormWeights("layer", layer.k_head_norm.weight, layer.k_head_norm.bias))
    if shape.clip_qkv:
        q, k, v = (part.clamp(-shape.clip_qkv, shape.clip_qkv) for part in (q, k, v))
    attended = dense["o"](attend(q, k, v, layer.alibi).flatten(1))
    attended = normed(attended, layer.attention_out_norm) * shape.residual_scale
    if shape.wiring == "parallel":
        inside = x if layer.mlp_norm.kind == "none" else normed(residual, layer.mlp_norm)
    else:
        residual = residual + attended
        inside = normed(residual, layer.mlp_norm)
    spec = ActivationSpec(shape.activation, shape.activation_limit, shape.activation_alpha)
    between = dense["gate_up"](inside)
    between = gated(between, spec) if shape.gated else activated(between, shape.activation)
    added = normed(dense["down"](between), layer.mlp_out_norm) * shape.residual_scale
    if shape.wiring == "parallel":
        added = added + attended
    return normed(residual + added, final)


def batch():
    order = torch.randperm(12).int()
    tables = order[:10][None].contiguous()
    positions = torch.arange(LENGTH)
    slots = tables[0, positions // 4].long() * 4 + positions % 4
    return positions, slots, tables, torch.tensor([LENGTH]).int(), torch.tensor([0, LENGTH]).int()


def options():
    """Name, changes of the shape, of the layer."""
    heads = {
        "q_head_norm": HeadNormWeights(1 + 0.1 * torch.randn(HEADS, DIM)),
        "k_head_norm": HeadNormWeights(1 + 0.1 * torch.randn(1, DIM), 0.1 * torch.randn(DIM)),
    }
    full = {"q_full_norm": torch.rand(HEADS * DIM), "k_full_norm": torch.rand(KV_HEADS * DIM)}
    layers = {"input_norm": layer_norm(HIDDEN), "mlp_norm": layer_norm(HIDDEN, bias=False)}
    clamped = {"activation": "swiglu_clamped", "activation_limit": 0.5, "activation_alpha": 1.7}
    yield "LayerNorm, no gate", {"gated": False, "activation": "gelu"}, layers
    yield (
        "a bare LayerNorm",
        {},
        {"input_norm": NormWeights("layer"), "mlp_norm": layer_norm(HIDDEN)},
    )
    yield "relu", {"gated": False, "activation": "relu"}, {"alibi": torch.rand(HEADS)}
    yield "relu2", {"gated": False, "activation": "relu2"}, {}
    yield "parallel, one norm", {"wiring": "parallel"}, {**layers, "mlp_norm": NO_NORM}
    yield (
        "parallel, two norms",
        {"wiring": "parallel", "gated": False, "activation": "silu"},
        layers,
    )
    yield "heads", {"residual_scale": 0.3}, heads
    yield "all heads", {"clip_qkv": 0.8}, full
    yield "clamped", clamped, {}
    yield (
        "norms of outputs alone", {"activation": "relu"},
        {"input_norm": NO_NORM, "mlp_norm": NO_NORM, "attention_out_norm": layer_norm(HIDDEN)},
    )  # fmt: skip


@pytest.mark.parametrize("name", [name for name, *_ in options()])
def test_a_layer(compiled, name):
    torch.manual_seed(1)
    changes, parts = next(
        (shape, parts) for option_name, shape, parts in options() if option_name == name
    )
    shape = dataclasses.replace(SHAPE, **changes)
    width = HEADS * DIM
    sizes = {
        "qkv": (width + 2 * KV_HEADS * DIM, HIDDEN), "o": (HIDDEN, width),
        "gate_up": (INNER * (2 if shape.gated else 1), HIDDEN), "down": (HIDDEN, INNER),
    }  # fmt: skip
    dense = {key: Dense(compiled, *size) for key, size in sizes.items()}
    caches = [compiled.new_kv_cache((12, KV_HEADS, 4, DIM), torch.float32) for _ in range(2)]
    layer = Layer(
        **{
            "input_norm": NormWeights("rms", torch.rand(HIDDEN)),
            "mlp_norm": NormWeights("rms", torch.rand(HIDDEN)),
            "cos_sin": None, "key_cache": caches[0], "value_cache": caches[1],
            **{key: value.packed for key, value in dense.items()}, **parts,
        }
    )  # fmt: skip
    final, hidden = layer_norm(HIDDEN), torch.randn(LENGTH, HIDDEN)
    decoder = compile_layers(compiled, shape, [layer], final)
    expected_hidden = expected(shape, layer, dense, hidden, final)
    rows = torch.tensor([30, 0, 36])
    retained_tensor = decoder(hidden.clone(), *batch(), rows)
    got = decoder(hidden, *batch())
    torch.testing.assert_close(got.double(), expected_hidden, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        retained_tensor.double(), expected_hidden[rows], rtol=1e-4, atol=1e-4
    )


def experts_of(kernels, count, top_k, *, shared, softmax_first, renormalize, activation, **more):
    if more.get("sigmoid"):
        more["choice_bias"] = torch.randn(count)
    dense = {
        "router": Dense(kernels, count, HIDDEN),
        "up": [Dense(kernels, 2 * INNER, HIDDEN) for _ in range(count)],
        "down": [Dense(kernels, HIDDEN, INNER) for _ in range(count)],
    }
    if shared:
        dense |= {
            "shared_up": Dense(kernels, 2 * 36, HIDDEN),
            "shared_down": Dense(kernels, HIDDEN, 36),
        }
    if shared == "gated":
        dense["shared_gate"] = Dense(kernels, 1, HIDDEN)
    options_of_layer = {
        f"shared_{name}": dense[f"shared_{key}"].packed
        for name, key in (("gate_up", "up"), ("down", "down"), ("gate", "gate"))
        if f"shared_{key}" in dense
    }
    return dense, ExpertLayers(
        router=dense["router"].packed, gate_up=[one.packed for one in dense["up"]],
        down=[one.packed for one in dense["down"]], top_k=top_k, softmax_first=softmax_first,
        renormalize=renormalize, activation=activation, **options_of_layer, **more,
    )  # fmt: skip


def in_groups(layers, scores):
    """Scores with those of groups that a row doesn't go to at -infinity, a row at a time."""
    size, retained_tensor = scores.shape[1] // layers.groups, torch.full_like(scores, -torch.inf)
    for row, score in enumerate(scores):
        groups = [sorted(part.tolist())[-layers.group_best :] for part in score.split(size)]
        best = sorted(range(layers.groups), key=lambda group: -sum(groups[group]))
        for group in best[: layers.top_groups]:
            part = slice(group * size, (group + 1) * size)
            retained_tensor[row, part] = score[part]
    return retained_tensor


def sum_of_experts(dense, layers, x):
    scores = dense["router"](x)
    if layers.sigmoid:
        scores = scores.sigmoid()
        chosen = in_groups(layers, scores + layers.choice_bias).topk(layers.top_k).indices
        weights = scores.gather(-1, chosen) * layers.scale
        if layers.renormalize:
            weights = weights / scores.gather(-1, chosen).sum(-1, keepdim=True)
    elif layers.softmax_first:
        weights, chosen = in_groups(layers, scores.softmax(-1)).topk(layers.top_k)
        if layers.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
    else:
        weights, chosen = scores.topk(layers.top_k)
        weights = weights.softmax(-1)
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for weight, expert in zip(weights[row], chosen[row].tolist()):
            between = gated(dense["up"][expert](x[row]), layers.activation)
            out[row] += weight * dense["down"][expert](between)
    if "shared_up" in dense:
        shared = dense["shared_down"](gated(dense["shared_up"](x), layers.activation))
        gate = dense["shared_gate"](x).sigmoid() if "shared_gate" in dense else 1.0
        out += gate * shared
    return out


@pytest.mark.parametrize(
    ("count", "top_k", "kind"),
    [
        (5, 2, {}),
        (4, 1, {"softmax_first": False}),
        (9, 4, {"shared": "plain", "renormalize": False}),
        (3, 3, {"shared": "gated", "activation": ActivationSpec("swiglu_clamped", 0.7, 1.7)}),
        (7, 3, {"shared": "plain", "sigmoid": True, "scale": 2.5}),
        (7, 3, {"sigmoid": True, "renormalize": False}),
        (12, 3, {"sigmoid": True, "groups": 4, "top_groups": 2, "group_best": 2, "scale": 2.5}),
        (12, 4, {"shared": "plain", "renormalize": False, "groups": 3, "top_groups": 1}),
        (8, 3, {"groups": 4, "top_groups": 4}),
    ],
)
def test_experts(kernels, threads, count, top_k, kind):
    torch.manual_seed(2)
    settings = {
        "shared": "",
        "softmax_first": True,
        "renormalize": True,
        "activation": ActivationSpec(),
    }
    dense, layers = experts_of(kernels, count, top_k, **{**settings, **kind})
    experts, x = kernels.compile_experts(layers), torch.randn(600, HIDDEN)
    got = experts(x)
    expected = sum_of_experts(dense, layers, x[:40].double())
    torch.testing.assert_close(got[:40].double(), expected, rtol=1e-4, atol=1e-4)
    # Whatever other rows there are.
    for rows in (slice(7, 8), slice(0, 33), slice(590, 600)):
        isolated_experts = experts(x[rows])
        if kernels.name == "reference":
            torch.testing.assert_close(isolated_experts, got[rows], rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(isolated_experts, got[rows])
    assert experts(x[:0]).shape == (0, HIDDEN)


def test_experts_that_do_not_fit_are_refused(kernels):
    _, layers = experts_of(
        kernels, 3, 2, shared="", softmax_first=True, renormalize=True, activation=ActivationSpec()
    )

    def refused(words, **changes):
        with pytest.raises(ValueError, match=words):
            kernels.compile_experts(dataclasses.replace(layers, **changes))

    refused("4 of 3 experts", top_k=4)
    refused("2 of them down", down=layers.down[:2])
    refused("shared expert has two", shared_down=layers.down[0])
    refused("choice_bias", choice_bias=torch.zeros(2))
    refused("1 of 2 groups of 3 experts", groups=2)
    refused("4 of 3 groups", groups=3, top_groups=4)
    refused("2 experts of 1 groups of 1", groups=3)
    refused("2 of a group's 1 scores", groups=3, top_groups=3, group_best=2)
    refused("activation", activation=ActivationSpec("tanh"))
    if kernels.name == "reference":
        return
    refused("must map", down=[*layers.down[:2], layers.gate_up[0]])
    with pytest.raises(ValueError, match="float32"):
        kernels.compile_experts(layers)(torch.randn(2, HIDDEN + 1))
