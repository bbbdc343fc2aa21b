"""A native decoder as an OpenVINO graph over OpenVINO's paged attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import Node, Type
from openvino import opset13 as ops
from openvino.op import Constant, Parameter, _PagedAttentionExtension
from torch import Tensor

from engine.models.decoder import NativeDecoder
from engine.models.decoder_spec import DecoderSpec
from engine.models.layers.weights import LayerWeights
from kernels import LinearLayer
from kernels.interface import (
    ActivationSpec,
    AttentionWeights,
    ExpertLayers,
    HeadNormWeights,
    MlpWeights,
    NormWeights,
)

_TYPES = {torch.float32: Type.f32, torch.bfloat16: Type.bf16, torch.float16: Type.f16}
_ACTIVATIONS: dict[str, Callable[[Node], Node]] = {
    "silu": ops.swish,
    "gelu": lambda x: ops.gelu(x, "erf"),
    "gelu_tanh": lambda x: ops.gelu(x, "tanh"),
    "relu": ops.relu,
    "relu2": lambda x: ops.power(ops.relu(x), _number(2.0)),
}


def unsupported_feature(spec: DecoderSpec) -> str:
    """The first thing about an architecture that the graph can't express; "" for none."""
    moe = spec.moe
    features = {
        "layers that carry a state": spec.states is not None,
        "attention over latents": spec.latents is not None,
        "attention to an encoder": spec.cross is not None,
        "a soft cap of attention scores": bool(spec.attention_soft_cap),
        "block-sparse attention": any(spec.sparse_layers),
        "layers without an MLP": not all(spec.has_mlp),
        "an MLP beside the experts": spec.residual_size > 0,
        "expert groups": moe is not None and moe.groups > 1,
        "experts chosen by other scores than they are weighed by": moe is not None
        and (moe.sigmoid or bool(moe.choice_bias)),
        "positions in three planes": spec.rope is not None and bool(spec.rope.planes),
        f"the activation {spec.activation}": spec.activation not in _ACTIVATIONS,
    }
    return next((name for name, present in features.items() if present), "")


def build_graph(decoder: NativeDecoder, groups: Sequence[int], int8_weights: bool) -> ov.Model:
    """The graph of a loaded decoder.

    Inputs: input_ids and position_ids int64 [tokens], logits_rows int64 [rows], past_lens int32
    [sequences], subsequence_begins and block_indices_begins int32 [sequences + 1], max_context_len
    int32 [], block_indices.G int32 [blocks] for each KV cache group G, and key_cache.L and
    value_cache.L for each layer L. Output: logits float32 [rows, vocab_size].

    The graph shares the memory of the decoder's weights.

    Args:
        decoder: its linear layers must be those of the reference kernels.
        groups: KV cache group by layer.
        int8_weights: round linear weights to 8 bits, with a scale for each row.
    """
    return _GraphBuilder(decoder, groups, int8_weights).build()


def _float_constant(value: Tensor) -> Constant:
    """A constant on the same memory, which must live as long as it; of a view a copy."""
    dense, kind = value.detach().contiguous(), _TYPES[value.dtype]
    # numpy has no bfloat16.
    array = dense.numpy() if kind == Type.f32 else dense.view(torch.int16).numpy()
    tensor = ov.Tensor(array, ov.Shape(list(dense.shape)), kind)
    return Constant(tensor, shared_memory=dense.data_ptr() == value.data_ptr())


def _number(value: float) -> Node:
    return ops.constant(np.float32(value))


def _indices(*values: int) -> Node:
    return ops.constant(np.array(values, dtype=np.int64))


class _GraphBuilder:
    """Builds one graph."""

    def __init__(self, decoder: NativeDecoder, groups: Sequence[int], int8_weights: bool) -> None:
        self._decoder, self._spec, self._int8 = decoder, decoder.spec, int8_weights
        self._groups = groups
        self._parameters: dict[str, Parameter] = {}
        self._constants: dict[tuple[int, int], Node] = {}
        self._rotations: dict[int, tuple[Node, Node]] = {}

    def _input(self, name: str, shape: list[int], kind: Any = np.int32) -> Node:
        if name not in self._parameters:
            parameter = ops.parameter(ov.PartialShape(shape), kind, name=name)
            parameter.output(0).get_tensor().set_names({name})
            self._parameters[name] = parameter
        return self._parameters[name]

    def _constant(self, value: Tensor) -> Node:
        """A float32 node of a weight; weights that layers share are one constant."""
        key = value.data_ptr(), value.numel()
        if key not in self._constants:
            constant = _float_constant(value)
            is_float32 = value.dtype == torch.float32
            self._constants[key] = constant if is_float32 else ops.convert(constant, Type.f32)
        return self._constants[key]

    def build(self) -> ov.Model:
        decoder, spec = self._decoder, self._spec
        x = self._embed()
        last = len(decoder.weights) - 1
        for index, layer in enumerate(decoder.weights):
            x = self._layer(x, layer, index, index == last)
        logits = self._linear(self._norm(x, decoder.final_norm), decoder.lm_head)
        logits = self._scaled(logits, spec.logit_scale)
        if spec.logit_soft_cap:
            cap = _number(spec.logit_soft_cap)
            logits = ops.multiply(ops.tanh(ops.divide(logits, cap)), cap)
        return ov.Model([ops.result(logits)], list(self._parameters.values()))

    def _embed(self) -> Node:
        decoder, spec = self._decoder, self._spec
        ids = self._input("input_ids", [-1], np.int64)
        table = _float_constant(_weight(decoder.embedding))
        x = ops.convert(ops.gather(table, ids, _indices(0)), Type.f32)
        x = self._scaled(
            ops.reshape(x, _indices(-1, spec.hidden_size), False), spec.embedding_scale
        )
        if decoder._positions is not None:
            positions = ops.add(self._positions, _indices(spec.position_offset))
            rows = ops.gather(self._constant(decoder._positions), positions, _indices(0))
            x = ops.add(x, ops.reshape(rows, _indices(-1, spec.hidden_size), False))
        return self._norm(x, decoder._embedding_norm_weights)

    @property
    def _positions(self) -> Node:
        return self._input("position_ids", [-1], np.int64)

    def _scaled(self, x: Node, factor: float) -> Node:
        return x if factor == 1.0 else ops.multiply(x, _number(factor))

    def _logits_rows(self, x: Node) -> Node:
        """The rows of x that logits are computed from."""
        rows = ops.gather(x, self._input("logits_rows", [-1], np.int64), ops.constant(0))
        return ops.reshape(rows, _indices(-1, self._spec.hidden_size), False)

    def _layer(self, residual: Node, layer: LayerWeights, index: int, is_last: bool) -> Node:
        spec = self._spec
        x = self._norm(residual, layer.input_norm)
        if not isinstance(layer.attention, AttentionWeights):
            raise TypeError(f"layer {index} has no attention over keys and values")
        attended = self._attention(x, layer.attention, index)
        attended = self._scaled(attended, spec.attention_output_scale)
        attended = self._norm(attended, layer.attention_out_norm)
        attended = self._scaled(attended, spec.residual_scale)
        if is_last:  # tokens don't meet any more
            x, residual, attended = map(self._logits_rows, (x, residual, attended))
        if layer.wiring == "parallel":
            if layer.mlp_norm is not None:
                x = self._norm(residual, layer.mlp_norm)
        else:
            residual = ops.add(residual, attended)
            x = residual if layer.mlp_norm is None else self._norm(residual, layer.mlp_norm)
        if layer.experts is not None:
            if layer.experts.layers is None:
                raise TypeError(f"layer {index} has experts of an unknown kind")
            x = self._experts(x, layer.experts.layers)
        elif layer.mlp is not None:
            x = self._scaled(self._mlp(x, layer.mlp), spec.mlp_output_scale)
        x = self._scaled(self._norm(x, layer.mlp_out_norm), spec.residual_scale)
        if layer.wiring == "parallel":
            x = ops.add(attended, x)
        return ops.add(residual, x)

    def _linear(self, x: Node, layer: LinearLayer) -> Node:
        return self._linears(x, layer, layer.out_features)[0]

    def _linears(self, x: Node, layer: LinearLayer, *sizes: int) -> list[Node]:
        """Parts of a linear layer's outputs: cheaper than to split the outputs of all rows."""
        bias = layer.tensors().get("bias")
        weights = _weight(layer).split(sizes)
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        return [self._product(x, *part) for part in zip(weights, biases, strict=True)]

    def _product(self, x: Node, weight: Tensor, bias: Tensor | None) -> Node:
        if self._int8:
            rows = weight.float()
            scales = rows.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            integers = ops.constant((rows / scales).round().to(torch.int8).numpy())
            values = ops.convert(integers, Type.f32)
            matrix = ops.multiply(values, ops.constant(scales.numpy()))
        else:
            matrix = self._constant(weight)
        product = ops.matmul(x, matrix, False, True)
        return product if bias is None else ops.add(product, self._constant(bias))

    def _norm(self, x: Node, norm: NormWeights) -> Node:
        if norm.kind == "none":
            return x
        if norm.kind == "rms" and norm.weight is not None:
            return self._rms_norm(x, norm.weight)
        x = ops.mvn(x, _indices(-1), True, self._spec.norm_eps, "inside_sqrt")
        if norm.weight is not None:
            x = ops.multiply(x, self._constant(norm.weight))
        return x if norm.bias is None else ops.add(x, self._constant(norm.bias))

    def _rms_norm(self, x: Node, weight: Tensor) -> Node:
        # In the form that OpenVINO fuses.
        mean = ops.reduce_mean(ops.power(x, _number(2.0)), _indices(-1), True)
        root = ops.sqrt(ops.add(mean, _number(self._spec.norm_eps)))
        normed = ops.multiply(x, ops.divide(_number(1.0), root))
        return ops.multiply(normed, self._constant(weight))

    def _head_norm(self, x: Node, norm: HeadNormWeights) -> Node:
        """LayerNorm of each head of [tokens, heads, head_dim]."""
        x = ops.mvn(x, _indices(-1), True, self._spec.norm_eps, "inside_sqrt")
        x = ops.multiply(x, self._constant(norm.weight))
        return x if norm.bias is None else ops.add(x, self._constant(norm.bias))

    def _attention(self, x: Node, weights: AttentionWeights, index: int) -> Node:
        spec = self._spec
        q_size = spec.q_size * (2 if spec.attention_output_gate else 1)
        q, k, v = self._linears(x, weights.qkv, q_size, spec.kv_size, spec.kv_size)
        gate = None
        if spec.attention_output_gate:
            pairs = ops.reshape(q, _indices(-1, spec.num_heads, 2 * spec.head_dim), False)
            q, gate = ops.split(pairs, ops.constant(2), 2).outputs()
            q = ops.reshape(q, _indices(-1, spec.q_size), False)
            gate = ops.reshape(gate, _indices(-1, spec.q_size), False)
        if weights.q_full_norm is not None and weights.k_full_norm is not None:
            q = self._rms_norm(q, weights.q_full_norm)
            k = self._rms_norm(k, weights.k_full_norm)
        heads = []
        for part, full, rms, layer in (
            (q, spec.num_heads, weights.q_norm, weights.q_head_norm),
            (k, spec.num_kv_heads, weights.k_norm, weights.k_head_norm),
        ):
            part = ops.reshape(part, _indices(-1, full, spec.head_dim), False)
            if layer is not None:
                part = self._head_norm(part, layer)
            if spec.clip_qkv:
                part = ops.clamp(part, -spec.clip_qkv, spec.clip_qkv)
            if rms is not None:
                part = self._rms_norm(part, rms)
            if weights.cos_sin is not None:
                part = self._rotate(part, weights.cos_sin, full)
            heads.append(ops.reshape(part, _indices(-1, full * spec.head_dim), False))
        if spec.clip_qkv:
            v = ops.clamp(v, -spec.clip_qkv, spec.clip_qkv)
        attended = self._paged_attention(heads[0], heads[1], v, weights, index)
        if gate is not None:
            attended = ops.multiply(attended, ops.sigmoid(gate))
        return self._linear(attended, weights.o)

    def _rotate(self, x: Node, cos_sin: Tensor, num_heads: int) -> Node:
        """Rotary embedding of [tokens, heads, head_dim]; cos_sin [positions, rotary_dim].

        Two halves are rotated in the form that OpenVINO fuses.
        """
        spec, width = self._spec, cos_sin.shape[1]
        rotated, rest = x, None
        if width < spec.head_dim:
            sizes = _indices(width, spec.head_dim - width)
            rotated, rest = ops.variadic_split(x, _indices(2), sizes).outputs()
        if spec.rope_neox:
            cos, sin = self._rotation(cos_sin, 2)
            rotated = ops.reshape(rotated, _indices(-1, num_heads, 1, width), False)
            halves = _indices(width // 2, width // 2)
            first, second = ops.variadic_split(rotated, _indices(3), halves).outputs()
            turned = ops.concat([ops.multiply(second, _number(-1.0)), first], 3)
            rotated = ops.add(ops.multiply(rotated, cos), ops.multiply(turned, sin))
        else:
            cos, sin = self._rotation(cos_sin, 1)
            pairs = ops.reshape(rotated, _indices(-1, num_heads, width // 2, 2), False)
            first, second = (
                ops.reshape(
                    ops.gather(pairs, ops.constant(side), ops.constant(3)),
                    _indices(-1, num_heads, 1, width // 2),
                    False,
                )
                for side in (0, 1)
            )
            turned = [
                ops.subtract(ops.multiply(first, cos), ops.multiply(second, sin)),
                ops.add(ops.multiply(second, cos), ops.multiply(first, sin)),
            ]
            rotated = ops.concat([ops.unsqueeze(part, ops.constant(4)) for part in turned], 4)
        rotated = ops.reshape(rotated, _indices(-1, num_heads, width), False)
        return rotated if rest is None else ops.concat([rotated, rest], 2)

    def _rotation(self, cos_sin: Tensor, repeats: int) -> tuple[Node, Node]:
        """Cosines and sines at the tokens' positions, [tokens, 1, 1, repeats * rotary_dim / 2]."""
        if cos_sin.data_ptr() not in self._rotations:
            tables = [part.repeat(1, repeats).numpy() for part in cos_sin.chunk(2, dim=1)]
            cos, sin = (
                ops.reshape(
                    ops.gather(ops.constant(table), self._positions, ops.constant(0)),
                    _indices(-1, 1, 1, table.shape[1]),
                    False,
                )
                for table in tables
            )
            self._rotations[cos_sin.data_ptr()] = cos, sin
        return self._rotations[cos_sin.data_ptr()]

    def _paged_attention(
        self, q: Node, k: Node, v: Node, weights: AttentionWeights, index: int
    ) -> Node:
        spec = self._spec

        def none(kind: Any, *shape: int) -> Node:
            return ops.constant(np.zeros(shape, dtype=kind))

        group = self._groups[index]
        sinks = none(np.float32, 0, 0, 0, 0)
        if weights.sinks is not None:
            sinks = ops.reshape(self._constant(weights.sinks), _indices(1, -1, 1, 1), False)
        alibi = none(np.float32, 0) if weights.alibi is None else self._constant(weights.alibi)
        cache = [-1, -1, -1, -1]  # shapes and types are OpenVINO's choice
        arguments = [
            q, k, v,
            self._input(f"key_cache.{index}", cache, Type.dynamic),
            self._input(f"value_cache.{index}", cache, Type.dynamic),
            self._input("past_lens", [-1]),
            self._input("subsequence_begins", [-1]),
            self._input(f"block_indices.{group}", [-1]),
            self._input("block_indices_begins", [-1]),
            _number(spec.attention_scale or spec.head_dim**-0.5),
            ops.constant(np.int32(weights.window)),
            alibi,
            self._input("max_context_len", []),
            none(np.int32, 0),  # tokens whose attention scores are returned
            # Rotation of cached blocks: blocks, deltas, table.
            none(np.int32, 0), none(np.int32, 0), none(np.float32, 0),
            # Sparse attention: threshold, block size, stride.
            none(np.float32, 0), none(np.int32), none(np.int32),
            sinks,
            # Eviction of cached blocks, kinds of tokens, tree masks.
            none(np.int32), none(np.int32, 0), none(np.int32, 0), none(np.int32, 0),
            none(np.int32, 0), none(np.uint8, 0), none(np.int32, 0),
        ]  # fmt: skip
        attention = _PagedAttentionExtension([_output(argument) for argument in arguments])
        info = attention.get_rt_info()
        for plane in "kv":
            info[f"num_{plane}_heads"] = spec.num_kv_heads
            info[f"{plane}_head_size"] = spec.head_dim
        return attention.output(0)

    def _mlp(self, x: Node, mlp: MlpWeights) -> Node:
        x = self._up(x, mlp.up, mlp.activation, mlp.gated, self._spec.mlp_gate_scale)
        return self._linear(x, mlp.down)

    def _up(
        self, x: Node, layer: LinearLayer, activation: ActivationSpec, gated: bool, scale: float
    ) -> Node:
        activate = _ACTIVATIONS[activation.name]
        if not gated:
            return activate(self._linear(x, layer))
        gate, up = self._linears(x, layer, *[layer.out_features // 2] * 2)
        return ops.multiply(activate(self._scaled(gate, scale)), up)

    def _experts(self, x: Node, experts: ExpertLayers) -> Node:
        """Every expert computes every token; those that aren't chosen have weight 0."""
        scores = self._linear_in_float(x, experts.router)
        if experts.softmax_first:
            scores = ops.softmax(scores, 1)
        best = ops.topk(scores, ops.constant(experts.top_k), 1, "max", "value", Type.i64)
        weights, chosen = best.outputs()
        if not experts.softmax_first:
            weights = ops.softmax(weights, 1)
        elif experts.renormalize:
            weights = ops.divide(weights, ops.reduce_sum(weights, _indices(1), True))
        weights = self._scaled(weights, experts.scale)
        zeros = ops.multiply(scores, _number(0.0))
        dense = ops.scatter_elements_update(zeros, chosen, weights, ops.constant(1))
        columns = ops.split(dense, ops.constant(1), len(experts.down)).outputs()
        total: Node | None = None
        for column, up, down in zip(columns, experts.gate_up, experts.down, strict=True):
            part = self._up(x, up, experts.activation, True, 1.0)
            part = ops.multiply(self._linear(part, down), column)
            total = part if total is None else ops.add(total, part)
        if experts.shared_gate_up is not None and experts.shared_down is not None:
            part = self._up(x, experts.shared_gate_up, experts.activation, True, 1.0)
            part = self._linear(part, experts.shared_down)
            if experts.shared_gate is not None:
                part = ops.multiply(
                    part, ops.sigmoid(self._linear_in_float(x, experts.shared_gate))
                )
            total = part if total is None else ops.add(total, part)
        if total is None:
            raise ValueError("a layer of experts has none")
        return total

    def _linear_in_float(self, x: Node, layer: LinearLayer) -> Node:
        """A product whose weights are never rounded: small changes choose other experts."""
        bias = layer.tensors().get("bias")
        product = ops.matmul(x, self._constant(_weight(layer)), False, True)
        return product if bias is None else ops.add(product, self._constant(bias))


def _weight(layer: LinearLayer) -> Tensor:
    """[rows, columns]."""
    return layer.tensors()["weight"]


def _output(node: Any) -> Any:
    return node.output(0) if hasattr(node, "output") else node
