"""From a checkpoint's tensors to the functions that a layer is made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.layers.rotary import RopeSpec, cos_sin_table
from engine.models.attention import Attention, Clamped, FullWidthNorm, HeadLayerNorm
from engine.models.blocks import Layer, ParallelLayer, ResidualExpertsLayer, SequentialLayer
from engine.models.compiled_experts import compile_experts
from engine.models.experts import Weights, read_experts
from engine.models.fused_experts import FusedExperts, fuses_experts
from engine.models.mlp import activation, gated_activation
from engine.models.moe import GatedExpert, MixtureOfExperts, Router
from engine.models.norms import LayerNorm, NoNorm, Norm, RMSNorm, Scaled, Step, chain
from engine.models.spec import DecoderSpec
from engine.quantization.matrix import DenseMatrix, Matrix
from engine.quantization.scheme import Scheme
from engine.quantization.scratch import Scratch
from engine.quantization.stack import Stack
from kernels import KernelSet, LinearLayer


class ModelBuilder:
    """Builds layers from weights, one at a time, so that never more than a layer is held twice.

    Args:
        spec: the architecture.
        ops: kernels of the device.
        dtype: in which linear weights are kept. Norms and biases are float32.
        max_model_len: length of the rotary tables.
        scheme: which weights are kept in few bits.
        compiled_experts: run a mixture of experts in one call where the kernels can.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        ops: KernelSet,
        dtype: torch.dtype,
        max_model_len: int,
        weights: Weights,
        scheme: Scheme = Scheme(),  # noqa: B008
        compiled_experts: bool = True,
    ) -> None:
        self.spec, self.ops, self.dtype, self.weights = spec, ops, dtype, weights
        self.scheme = scheme
        self._compiled_experts = compiled_experts
        self._max_model_len = max_model_len
        self._tables: list[tuple[RopeSpec, Tensor]] = []
        self._scratch = Scratch()
        optional = spec.names.optional_prefix
        bare = f"{spec.names.embedding.removeprefix(optional)}.weight"
        whole = f"{spec.names.embedding}.weight"
        self._strip = optional if whole not in weights and bare in weights else ""

    # -- tensors ------------------------------------------------------------------------------

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of the checkpoint, in its dtype, maybe backed by the mapped file."""
        return self.weights.get(name.removeprefix(self._strip), shape)

    def vector(self, name: str, *shape: int) -> Tensor:
        """A small tensor of our own, in float32, on the kernels' device."""
        return self.tensor(name, shape).float().clone().to(self.ops.device)

    def norm(self, name: str) -> Norm:
        """The norm over hidden states of this name."""
        return self._norm(name, self.spec.hidden_size)

    def _norm(self, name: str, size: int) -> Norm:
        spec = self.spec
        weight = self._norm_weight(name, size) if spec.norm_weight else None
        if spec.norm == "rms" and weight is not None:
            return RMSNorm(self.ops, weight, spec.norm_eps)
        bias = self.vector(f"{name}.bias", size) if spec.norm_bias else None
        # torch's norm wants its weights in the dtype of what is normed.
        kept = self.ops.activation_dtype(self.dtype)
        weight = weight.to(kept) if weight is not None else None
        return LayerNorm(size, weight, bias.to(kept) if bias is not None else None, spec.norm_eps)

    def _norm_weight(self, name: str, *shape: int) -> Tensor:
        return self.vector(f"{name}.weight", *shape) + self.spec.norm_offset

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        """A weight [rows, columns], whichever way around the checkpoint keeps it."""
        if self.spec.transposed:
            return DenseMatrix(self.tensor(f"{name}.weight", (columns, rows)).T)
        return self.weights.matrix(f"{name}.weight".removeprefix(self._strip), (rows, columns))

    def linear(
        self,
        names: list[tuple[str, int]],
        columns: int,
        bias: bool,
        order: Tensor | None = None,
        quantized: bool = True,
    ) -> LinearLayer:
        """One linear layer of (name, rows) parts over each other, its rows taken in `order`.

        `quantized=False` keeps it in the model's dtype whatever the scheme says.
        """
        matrices = [self.matrix(name, rows, columns) for name, rows in names]
        biases = [self.vector(f"{name}.bias", rows) for name, rows in names] if bias else []
        added = torch.cat(biases) if biases else None
        if order is not None and added is not None:
            added = added[order]
        return self._pack(matrices, added, self.scheme.layers if quantized else None, order)

    def table(self, name: str, bias: Tensor | None = None, normalized: bool = False) -> LinearLayer:
        """The output layer or the embedding [vocab_size, hidden_size]; rows of length 1, if so."""
        shape = (self.spec.vocab_size, self.spec.hidden_size)
        if normalized:
            rows = torch.nn.functional.normalize(self.tensor(f"{name}.weight", shape).float())
            return self._pack([DenseMatrix(rows)], bias, self.scheme.tables)
        matrix = self.weights.matrix(f"{name}.weight".removeprefix(self._strip), shape)
        return self._pack([matrix], bias, self.scheme.tables)

    def pack(self, weight: Tensor, bias: Tensor | None) -> LinearLayer:
        """A linear layer of [rows, columns]."""
        return self._pack([DenseMatrix(weight)], bias, self.scheme.layers)

    def _pack(
        self,
        matrices: list[Matrix],
        bias: Tensor | None,
        quantization: str | None,
        order: Tensor | None = None,
    ) -> LinearLayer:
        bias = bias.float() if bias is not None else None
        stack = Stack(matrices, order, self.weights.release, self._scratch)
        return stack.pack(self.ops, bias, self.dtype, quantization, self.scheme.round_inputs)

    # -- layers -------------------------------------------------------------------------------

    def first_norm(self) -> Norm:
        """What is between the embedding and the first layer."""
        return self._input_norm(0)

    def _input_norm(self, index: int) -> Norm:
        """The norm before layer `index`, the final one after the last layer."""
        names = self.spec.names
        if index == self.spec.num_layers:
            return self.norm(names.final_norm)
        name = names.attention_norm
        return self.norm(names.layer.format(index) + name) if name else NoNorm()

    def layer(self, index: int) -> Layer:
        """One layer, with the norm that follows it."""
        names, at = self.spec.names, self.spec.names.layer.format(index)
        attention = self._attention(index, at)
        mlp_norm = self.norm(at + names.mlp_norm) if names.mlp_norm else None
        mlp = self._finished(self._feed_forward(index, at), at, names.mlp_out_norm)
        following = self._input_norm(index + 1)
        nbytes = sum(
            int(getattr(step, "nbytes", 0)) for step in (attention.project, attention.output, mlp)
        )
        if self.spec.residual_size and self._has_experts(index):
            norm, after = self.norm(at + names.residual_norm), self._residual_mlp(at)
            nbytes += int(getattr(after, "nbytes", 0))
            before = mlp_norm or NoNorm()
            return ResidualExpertsLayer(attention, norm, after, before, mlp, following, nbytes)
        if self.spec.wiring == "parallel":
            return ParallelLayer(attention, mlp_norm, mlp, following, nbytes)
        return SequentialLayer(attention, mlp_norm or NoNorm(), mlp, following, nbytes)

    def _finished(self, step: Step, at: str, out_norm: str) -> Step:
        """`step`, followed by the norm and the factor that its family puts before the residual."""
        after: list[Step] = []
        if out_norm:
            after.append(self.norm(at + out_norm))
        if self.spec.residual_scale != 1.0:
            after.append(Scaled(self.spec.residual_scale))
        return chain(step, *after)

    def _attention(self, index: int, at: str) -> Attention:
        spec, names = self.spec, self.spec.names
        slopes = spec.alibi_slopes
        per_head = spec.qk_norm == "rms_head"
        output = self.linear([(at + names.o, spec.hidden_size)], spec.q_size, spec.o_bias)
        return Attention(
            ops=self.ops,
            project=chain(self._qkv(index, at), *self._after_qkv(at)),
            output=self._finished(output, at, names.attention_out_norm),
            sizes=(spec.q_size, spec.kv_size, spec.kv_size),
            head_dim=spec.head_dim,
            scale=spec.attention_scale or spec.head_dim**-0.5,
            eps=spec.norm_eps,
            cos_sin=self._table(spec.rope_of(index)),
            neox=spec.rope_neox,
            q_norm=self._norm_weight(at + names.q_norm, spec.head_dim) if per_head else None,
            k_norm=self._norm_weight(at + names.k_norm, spec.head_dim) if per_head else None,
            window=spec.windows[index] if spec.windows else 0,
            soft_cap=spec.attention_soft_cap,
            alibi_slopes=self._slopes(slopes) if slopes else None,
            sinks=self.vector(at + names.sinks, spec.num_heads) if spec.sinks else None,
        )

    def _slopes(self, slopes: Sequence[float]) -> Tensor:
        return torch.tensor(slopes, dtype=torch.float32, device=self.ops.device)

    def _table(self, rope: RopeSpec | None) -> Tensor | None:
        """The rotary table, one for all layers with the same embedding."""
        if rope is None:
            return None
        for known, table in self._tables:
            if known == rope:
                return table
        table = cos_sin_table(rope, self._max_model_len).to(self.ops.device)
        self._tables.append((rope, table))
        return table

    def _qkv(self, index: int, at: str) -> LinearLayer:
        spec, names = self.spec, self.spec.names.qkv
        sizes = (spec.q_size, spec.kv_size, spec.kv_size)
        if spec.layer_kv_heads:
            return self._repeated_qkv(at, spec.layer_kv_heads[index])
        if len(names) == 3:
            parts = [(at + name, size) for name, size in zip(names, sizes, strict=True)]
            return self.linear(parts, spec.hidden_size, spec.qkv_bias)
        order = _ungrouped_rows(spec) if spec.qkv_layout == "grouped" else None
        return self.linear([(at + names[0], sum(sizes))], spec.hidden_size, spec.qkv_bias, order)

    def _repeated_qkv(self, at: str, kv_heads: int) -> LinearLayer:
        """Of a layer with fewer KV heads than others: each as often as it takes to have as many."""
        spec, (q, k, v) = self.spec, self.spec.names.qkv
        rows = torch.arange(kv_heads * spec.head_dim).view(kv_heads, spec.head_dim)
        order = rows.repeat_interleave(spec.num_kv_heads // kv_heads, dim=0).flatten()
        queries = self.tensor(f"{at}{q}.weight", (spec.q_size, spec.hidden_size))
        shape = (kv_heads * spec.head_dim, spec.hidden_size)
        keys, values = (self.tensor(f"{at}{name}.weight", shape)[order] for name in (k, v))
        return self.pack(torch.cat((queries, keys, values)), None)

    def _after_qkv(self, at: str) -> list[Step]:
        """What happens to queries, keys and values before they are rotated."""
        spec, names = self.spec, self.spec.names
        steps: list[Step] = []
        if spec.qk_norm == "rms_full":
            q_weight = self._norm_weight(at + names.q_norm, spec.q_size)
            k_weight = self._norm_weight(at + names.k_norm, spec.kv_size)
            steps.append(FullWidthNorm(self.ops, q_weight, k_weight, spec.norm_eps))
        elif spec.qk_norm.startswith("layer_"):
            steps.append(self._head_norm(at + names.q_norm, 0, spec.num_heads))
            steps.append(self._head_norm(at + names.k_norm, spec.q_size, spec.num_kv_heads))
        if spec.clip_qkv:
            steps.append(Clamped(spec.clip_qkv))
        return steps

    def _head_norm(self, name: str, start: int, heads: int) -> HeadLayerNorm:
        spec, dim = self.spec, self.spec.head_dim
        if spec.qk_norm == "layer_list":
            rows = [self._norm_weight(f"{name}.norms.{head}", dim) for head in range(heads)]
            weight = torch.stack(rows)
        elif spec.qk_norm == "layer_heads":
            weight = self._norm_weight(name, heads, dim)
        else:
            weight = self._norm_weight(name, dim).unsqueeze(0)
        bias = self.vector(f"{name}.bias", dim) if spec.qk_norm_bias else None
        return HeadLayerNorm(start, heads, dim, weight, bias, spec.norm_eps)

    # -- feed-forward -------------------------------------------------------------------------

    def _feed_forward(self, index: int, at: str) -> Step:
        spec, names = self.spec, self.spec.names
        if self._has_experts(index):
            return self._experts(at)
        up = [at + name for name in names.up]
        return self._mlp(up, at + names.down, spec.intermediate_size)

    def _has_experts(self, index: int) -> bool:
        return self.spec.moe is not None and self.spec.moe.layers[index]

    def _residual_mlp(self, at: str) -> Step:
        """The MLP that a layer has beside its experts."""
        spec, names = self.spec, self.spec.names
        up = [at + name for name in names.residual_up]
        return self._mlp(up, at + names.residual_down, spec.residual_size)

    def _mlp(self, up: list[str], down: str, inner: int) -> Step:
        spec = self.spec
        rows = inner * (2 if spec.gated else 1) // len(up)
        first = self.linear([(name, rows) for name in up], spec.hidden_size, spec.mlp_bias)
        second = self.linear([(down, spec.hidden_size)], inner, spec.mlp_bias)
        return chain(first, self._activation(), second)

    def _activation(self) -> Step:
        spec = self.spec
        if not spec.gated:
            return activation(spec.activation)
        return gated_activation(
            self.ops, spec.activation, spec.activation_limit, spec.activation_alpha
        )

    def _experts(self, at: str) -> Step:
        spec, moe = self.spec, self.spec.moe
        if moe is None:
            raise ValueError("the spec has no experts")
        routes = [(at + moe.router, moe.num_experts)]
        linear = self.linear(routes, spec.hidden_size, moe.router_bias, quantized=False)
        router = Router(linear, moe.top_k, moe.softmax_first, moe.renormalize)
        shared = self._shared_expert(at)
        read = read_experts(self.weights, at, moe, spec.hidden_size)
        if fuses_experts(self.ops, spec, self.scheme.layers is not None):
            fused = FusedExperts(
                self.ops, router, read, moe.num_experts, self.dtype, spec.activation, shared
            )
            self.weights.release()
            return fused
        layers = self._streamed_experts(at) or [
            (self.pack(up, up_bias), self.pack(down, down_bias))
            for up, up_bias, down, down_bias in read
        ]
        if self._compiled_experts:
            compiled = compile_experts(self.ops, spec, router, layers, shared)
            if compiled is not None:
                return compiled
        act = self._activation()
        return MixtureOfExperts(router, [chain(up, act, down) for up, down in layers], shared)

    def _streamed_experts(self, at: str) -> list[tuple[LinearLayer, LinearLayer]]:
        """Gate over up, and down, of experts that have tensors of their own; else none.

        Read some rows at a time, and as they are where the checkpoint keeps them in few bits.
        """
        moe, hidden = self.spec.moe, self.spec.hidden_size
        if moe is None or moe.layout != "split":
            return []
        inner, (gate, up, down) = moe.intermediate_size, moe.expert_names
        first = f"{at}{moe.experts}"
        if f"{first}0.{gate}.weight".removeprefix(self._strip) not in self.weights:
            return []
        return [
            (
                self.linear([(f"{one}.{gate}", inner), (f"{one}.{up}", inner)], hidden, False),
                self.linear([(f"{one}.{down}", hidden)], inner, False),
            )
            for one in (f"{first}{expert}" for expert in range(moe.num_experts))
        ]

    def _shared_expert(self, at: str) -> Step | None:
        spec, moe = self.spec, self.spec.moe
        if moe is None or not moe.shared_size:
            return None
        gate, up, down = (
            f"{at}{moe.shared}{name}" for name in ("gate_proj", "up_proj", "down_proj")
        )
        expert = self._mlp([gate, up], down, moe.shared_size)
        if not moe.shared_gate:
            return expert
        return GatedExpert(
            expert,
            self.linear([(at + moe.shared_gate, 1)], spec.hidden_size, False, quantized=False),
        )


def _ungrouped_rows(spec: DecoderSpec) -> Tensor:
    """Row numbers that bring [KV head][its queries, key, value] to all queries, keys, values."""
    group, dim = spec.num_heads // spec.num_kv_heads, spec.head_dim
    rows = torch.arange(spec.q_size + 2 * spec.kv_size).view(spec.num_kv_heads, group + 2, dim)
    return torch.cat((rows[:, :group].flatten(), rows[:, group].flatten(), rows[:, -1].flatten()))
