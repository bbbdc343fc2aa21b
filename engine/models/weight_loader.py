"""Loads layers' weights from a checkpoint's tensors, by the layers' descriptions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from engine.contract.replica_state import LayerReport
from engine.models.decoder_spec import DecoderSpec, MambaSpec
from engine.models.expert_loader import ExpertLoader
from engine.models.layers.linear import (
    AltUpDescription,
    AltUpModelDescription,
    AttentionDescription,
    FusedLinear,
    LatentDescription,
    LayerDescription,
    LinearPart,
    MlpDescription,
    ModelDescription,
    MoeBlock,
    NormDescription,
    SharedBlockDescription,
    SparseIndexDescription,
    StateDescription,
    TableDescription,
    described_linears,
)
from engine.models.layers.moe import (
    Weights,
)
from engine.models.layers.weights import (
    AltUpModelWeights,
    AltUpWeights,
    CrossWeights,
    LatentWeights,
    LayerWeights,
    LruWeights,
    SharedBlockWeights,
    SparseIndexWeights,
    StateWeights,
    TokenMixerWeights,
)
from engine.models.lora import LowRankLinear
from engine.models.relative_position import logarithmic_bucket
from engine.models.rotary_embedding import MAX_PLANE_ROWS, RopeSpec, cos_sin_table
from engine.models.sharding import ExpertShard, ModelShard
from engine.quantization.packing import (
    DenseSource,
    LinearPacker,
    LoadBuffer,
    QuantScheme,
    RowSelection,
    WeightSource,
)
from engine.quantization.report import layer_report
from kernels import KernelSet, LinearLayer
from kernels.interface import (
    NO_NORM,
    AttentionWeights,
    HeadNormWeights,
    MlpWeights,
    NormWeights,
    PerHeadLinear,
    ScanWeights,
)
from kernels.lora import LoraSlice, LoraWeights

#: The constant c of RG-LRU's decays (arXiv 2402.19427, 2.4).
LRU_SHARPNESS = 8.0
#: Added to the logits of tokens that are never generated: finite, so that log probabilities are.
_HIDDEN = -3.0e38


class WeightLoader:
    """Loads layers one at a time, so that at most one layer is in memory twice.

    Args:
        spec: the architecture.
        ops: kernels of the device.
        dtype: the dtype of linear weights. Norms and biases are float32.
        max_model_len: the length of the rotary tables.
        scheme: the weights to quantize.
        shard: this rank's share of the model; None for all of it.
        expert_shard: this rank's experts; None for all of them, or `shard`'s part of each.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        ops: KernelSet,
        dtype: torch.dtype,
        max_model_len: int,
        weights: Weights,
        scheme: QuantScheme = QuantScheme(),  # noqa: B008
        shard: ModelShard | None = None,
        expert_shard: ExpertShard | None = None,
    ) -> None:
        self.spec, self.ops, self.dtype, self.weights = spec, ops, dtype, weights
        self.scheme, self.shard, self.expert_shard = scheme, shard, expert_shard
        self._max_model_len = max_model_len
        self._tables: list[tuple[RopeSpec, Tensor]] = []
        self._scratch = LoadBuffer()
        #: Linear layers of blocks that several layers share.
        self._shared_linears: dict[FusedLinear, LinearLayer] = {}
        #: Reports of the layers loaded so far.
        self.reports: list[LayerReport] = []
        optional = spec.names.optional_prefix
        bare = f"{spec.names.embedding.removeprefix(optional)}.weight"
        embedding_name = f"{spec.names.embedding}.weight"
        self._strip = optional if embedding_name not in weights and bare in weights else ""

    def check(self, model: ModelDescription) -> None:
        """Raise `ModelLoadError` if a packed weight's shape doesn't match config.json, or if
        a checkpoint that may have packed weights lacks a weight.

        This allocates no memory; other weights are checked when they are read.
        """
        some_packed = hasattr(self.weights, "is_packed")
        for layer in model.layers:
            for linear in described_linears(layer):
                for part in linear.parts:
                    if self.has_packed(part.name):
                        self.weight_source(part.name, part.rows, linear.columns)
                    elif some_packed and not self.has_weight(part.name):
                        self.tensor(f"{part.name}.weight", (part.rows, linear.columns))

    def has_weight(self, name: str) -> bool:
        """Return whether the checkpoint has a layer's weight as one tensor of that name."""
        return f"{name}.weight".removeprefix(self._strip) in self.weights

    def has_other_head(self) -> bool:
        """Return whether the checkpoint has an output layer that differs from the embedding."""
        names, shape = self.spec.names, (self.spec.vocab_size, self.spec.hidden_size)
        if names.lm_head == names.embedding or not self.has_weight(names.lm_head):
            return False
        if not self.has_weight(names.embedding) or self.has_packed(names.embedding):
            return False
        head, embedding = (
            self.tensor(f"{name}.weight", shape) for name in (names.lm_head, names.embedding)
        )
        return not torch.equal(head, embedding)

    def lacks_head(self) -> bool:
        """Return whether the checkpoint has an embedding but no output layer, packed or not."""
        names = self.spec.names
        has_head = self.has_weight(names.lm_head) or self.has_packed(names.lm_head)
        return not has_head and self.has_weight(names.embedding)

    def has_packed(self, name: str) -> bool:
        """Return whether the checkpoint has a layer's weight in a packed format."""
        return not self._is_dense(name)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of the checkpoint in its dtype, which may be memory-mapped."""
        return self.weights.get(name.removeprefix(self._strip), shape)

    def vector(self, name: str, *shape: int) -> Tensor:
        """Return a copy of a small tensor in float32 on the kernels' device."""
        return self.tensor(name, shape).float().clone().to(self.ops.device)

    def norm(self, norm: NormDescription) -> NormWeights:
        """Load a norm's weights."""
        spec = self.spec
        if not norm.name:
            return NO_NORM
        weight = self._norm_weight(norm.name, norm.size) if spec.norm_weight else None
        if spec.norm == "rms" and weight is not None:
            return NormWeights("rms", weight)
        bias = self.vector(f"{norm.name}.bias", norm.size) if spec.norm_bias else None
        # torch's LayerNorm requires the input's dtype for its weights.
        norm_dtype = self.ops.activation_dtype(self.dtype)
        return NormWeights(
            "layer",
            weight.to(norm_dtype) if weight is not None else None,
            bias.to(norm_dtype) if bias is not None else None,
        )

    def _norm_weight(self, name: str, *shape: int) -> Tensor:
        return self.vector(f"{name}.weight", *shape) + self.spec.norm_offset

    def weight_source(self, name: str, rows: int, columns: int) -> WeightSource:
        """Return a weight as [rows, columns], even if the checkpoint has it transposed."""
        if self.spec.transposed and self._is_dense(name):
            return DenseSource(self.tensor(f"{name}.weight", (columns, rows)).T)
        return self.weights.matrix(f"{name}.weight".removeprefix(self._strip), (rows, columns))

    def _is_dense(self, name: str) -> bool:
        """Return whether the weight isn't packed; packed ones are never transposed."""
        packed = getattr(self.weights, "is_packed", None)
        return packed is None or not packed(name.removeprefix(self._strip))

    def linear(
        self,
        linear: FusedLinear,
        rows: Sequence[range] | None = None,
        inputs: Sequence[int] | None = None,
    ) -> LinearLayer:
        """Load and pack a linear layer.

        If ranks share the model, a split layer has only `rows` of the stack; without `rows` it
        returns all ranks' outputs, and gathers its input by `inputs`, see `RankGroup.shard_linear`.
        """
        spec = self.spec
        order = ungroup_qkv_rows(spec) if linear.order == "grouped" else None
        if linear.order == "interleaved":
            order = torch.arange(linear.rows).view(-1, 2).T.flatten()
        matrices = [
            self.weight_source(part.name, part.rows, linear.columns) for part in linear.parts
        ]
        parts = linear.parts if linear.bias else ()
        biases = [self._bias(part) for part in parts]
        if linear.order == "repeated":
            heads = repeat_kv_rows(spec, linear.parts[1].rows)
            matrices[1:] = [RowSelection(matrix, heads) for matrix in matrices[1:]]
            biases[1:] = [bias[heads] for bias in biases[1:]]
        added = torch.cat(biases) if biases else None
        if order is not None and added is not None:
            added = added[order]
        scheme = self.scheme.layers if linear.quantized else None
        names = [part.name for part in linear.parts]
        if rows is not None:
            return self.pack_rows(matrices, added, rows, scheme, order, names)
        if not linear.split:
            return self.pack_sources(matrices, added, scheme, order, names)
        return self.pack_shared(matrices, added, scheme, order, names, inputs)

    def _bias(self, part: LinearPart) -> Tensor:
        if not part.has_bias:
            return torch.zeros(part.rows, device=self.ops.device)
        return self.vector(f"{part.name}.bias", part.rows)

    def pack_shared(
        self,
        matrices: list[WeightSource],
        bias: Tensor | None,
        quantization: str | None,
        order: Tensor | None,
        names: Sequence[str],
        inputs: Sequence[int] | None = None,
    ) -> LinearLayer:
        """Pack a layer whose outputs the ranks share; without ranks, the whole layer."""
        shard = self.shard
        if shard is None:
            return self.pack_sources(matrices, bias, quantization, order, names)
        outputs = shard.outputs(sum(matrix.shape[0] for matrix in matrices))
        local_rows = shard.local_slice(outputs)
        rows = [range(local_rows.start, local_rows.stop)]
        layer = self.pack_rows(matrices, bias, rows, quantization, order, names)
        shard.ranks.shard_linear(layer, outputs, inputs)
        return layer

    def pack_rows(
        self,
        matrices: list[WeightSource],
        bias: Tensor | None,
        rows: Sequence[range],
        quantization: str | None,
        order: Tensor | None,
        names: Sequence[str],
    ) -> LinearLayer:
        """Pack some rows of the stacked matrices; only these are read."""
        bias = None if bias is None else bias[_numbers(rows)]
        return self.pack_sources(
            _select_rows(matrices, rows, order), bias, quantization, names=names
        )

    def table(self, table: TableDescription) -> LinearLayer:
        """Load the output layer or the embedding."""
        shape = (self.spec.vocab_size, self.spec.hidden_size)
        bias = self.vector(f"{self.spec.names.lm_head}.bias", shape[0]) if table.bias else None
        if table.hidden:
            bias = torch.zeros(shape[0], device=self.ops.device) if bias is None else bias
            bias[list(table.hidden)] = _HIDDEN
        if table.normalized:
            rows = self.tensor(f"{table.name}.weight", shape).float()
            matrix: WeightSource = DenseSource(torch.nn.functional.normalize(rows))
        else:
            matrix = self.weights.matrix(f"{table.name}.weight".removeprefix(self._strip), shape)
        return self.pack_shared([matrix], bias, self.scheme.embeddings, None, [table.name])

    def pack(self, weight: Tensor, bias: Tensor | None) -> LinearLayer:
        """Pack a linear layer [rows, columns]."""
        return self.pack_sources([DenseSource(weight)], bias, self.scheme.layers)

    def pack_sources(
        self,
        matrices: list[WeightSource],
        bias: Tensor | None,
        quantization: str | None,
        order: Tensor | None = None,
        names: Sequence[str] = (),
    ) -> LinearLayer:
        """Pack stacked matrices. With `names` of the checkpoint, the layer is reported."""
        bias = bias.float() if bias is not None else None
        stack = LinearPacker(matrices, order, self.weights.release, self._scratch)
        layer = stack.pack(self.ops, bias, self.dtype, quantization, self.scheme.bf16_inputs)
        if names:
            keeps_format = stack.keeps_format(self.ops, self.dtype, quantization)
            report = layer_report(names, matrices, layer, keeps_format, self.ops.device, order)
            self.reports.append(report)
            self.weights.release()
        return layer

    def layer(self, layer: LayerDescription) -> LayerWeights:
        """Load all weights of a layer."""
        mixer = layer.attention
        attention: TokenMixerWeights | None
        if mixer is None:
            attention = None
        elif isinstance(mixer, StateDescription):
            attention = self._state(mixer)
        elif isinstance(mixer, LatentDescription):
            attention = self._latents(mixer)
        else:
            attention = self._attention(mixer)
        mlp_norm = None if layer.mlp_norm is None else self.norm(layer.mlp_norm)
        described, mlp, experts = layer.mlp, None, None
        if isinstance(described, MoeBlock):
            experts = ExpertLoader(self, described).load()
        elif described is not None:
            mlp = self.mlp(described)
        residual_mlp, residual_norm, cross = layer.residual_mlp, layer.residual_norm, layer.cross
        return LayerWeights(
            wiring=layer.wiring,
            input_norm=self.norm(layer.input_norm),
            attention=attention,
            attention_out_norm=self.norm(layer.attention_out_norm),
            state=None if layer.state is None else self._state(layer.state),
            mlp_norm=mlp_norm,
            mlp=mlp,
            experts=experts,
            mlp_out_norm=self.norm(layer.mlp_out_norm),
            residual_norm=NO_NORM if residual_norm is None else self.norm(residual_norm),
            residual_mlp=None if residual_mlp is None else self.mlp(residual_mlp),
            shared=None if layer.shared is None else self._shared_block(layer.shared),
            altup=None if layer.altup is None else self._altup(layer.altup),
            cross=None if cross is None else CrossWeights(**self._parts(cross)),
        )

    def _parts(self, described: Any) -> dict[str, Any]:
        """Load a description's norms and linear layers, by their fields' names."""
        loaders: dict[type, Any] = {NormDescription: self.norm, FusedLinear: self.linear}
        parts = ((part.name, getattr(described, part.name)) for part in fields(described))
        return {
            name: loaders[type(part)](part) if type(part) in loaders else part
            for name, part in parts
        }

    def _altup(self, altup: AltUpDescription) -> AltUpWeights:
        scale = None
        if altup.output_scale:
            scale = self.vector(altup.output_scale, self.spec.hidden_size)
        return AltUpWeights(**{**self._parts(altup), "output_scale": scale})

    def altup_model(self, altup: AltUpModelDescription) -> AltUpModelWeights:
        """Load what a model with several hidden states has beside its layers."""
        spec = self.spec.altup
        if spec is None:
            raise ValueError("the model has one hidden state a token")
        shape = (spec.per_layer_vocab_size, altup.projection.rows)
        table = self.weights.matrix(f"{altup.table}.weight".removeprefix(self._strip), shape)
        return AltUpModelWeights(
            table=self.pack_sources([table], None, self.scheme.embeddings, names=[altup.table]),
            projection=self.linear(altup.projection),
            projection_norm=self.norm(altup.projection_norm),
            expand=tuple(self.linear(linear) for linear in altup.expand),
            collapse=tuple(self.linear(linear) for linear in altup.collapse),
        )

    def _shared_block(self, block: SharedBlockDescription) -> SharedBlockWeights:
        attention, mlp, rank = block.attention, block.mlp, block.adapter_rank
        qkv, up = self._shared_linear(attention.qkv), self._shared_linear(mlp.up)
        return SharedBlockWeights(
            attention_norm=self.norm(block.attention_norm),
            attention=AttentionWeights(
                qkv=self._with_low_ranks(qkv, attention.qkv, block.qkv_adapters, rank),
                o=self._shared_linear(attention.o),
                cos_sin=self._table(attention.rope),
            ),
            mlp_norm=self.norm(block.mlp_norm),
            mlp=MlpWeights(
                self._with_low_ranks(up, mlp.up, (block.up_adapter,), rank),
                self._shared_linear(mlp.down),
                mlp.activation,
                mlp.gated,
            ),
            output=self.linear(block.output),
            mixer_norm=self.norm(block.mixer_norm),
        )

    def _shared_linear(self, linear: FusedLinear) -> LinearLayer:
        if linear not in self._shared_linears:
            self._shared_linears[linear] = self.linear(linear)
        return self._shared_linears[linear]

    def _with_low_ranks(
        self, layer: LinearLayer, linear: FusedLinear, names: Sequence[str], rank: int
    ) -> LinearLayer:
        """Return a shared layer with one user's low-rank weights for each part, if any."""
        if not names:
            return layer
        a, parts, first = [], [], 0
        for number, (name, part) in enumerate(zip(names, linear.parts, strict=True)):
            a.append(self.tensor(f"{name}0.weight", (rank, linear.columns)).to(self.dtype))
            b = self.tensor(f"{name}1.weight", (part.rows, rank)).to(self.dtype)
            parts.append(LoraSlice(first, b, number * rank))
            first += part.rows
        weights = LoraWeights(
            a=torch.cat(a),
            parts=parts,
            out_features=first,
            round_inputs=self.scheme.bf16_inputs,
        )
        return LowRankLinear(self.ops, layer, self.ops.pack_lora(weights))

    def _attention(self, attention: AttentionDescription) -> AttentionWeights:
        spec, shard = self.spec, self.shard
        slopes = spec.alibi_slopes if shard is None else shard.spec.alibi_slopes
        sinks = self.vector(attention.sinks, spec.num_heads) if attention.sinks else None
        if shard is not None and sinks is not None:
            sinks = sinks[shard.head_range].clone()
        return AttentionWeights(
            qkv=self.linear(attention.qkv, None if shard is None else shard.qkv_rows),
            o=self.linear(attention.o, inputs=self._head_starts(spec.head_dim)),
            **self._qk_norm(attention),
            cos_sin=self._table(attention.rope),
            window=attention.window,
            sparse=attention.sparse,
            alibi=torch.tensor(slopes, dtype=torch.float32, device=self.ops.device)
            if slopes
            else None,
            distance_bias=self._distance_bias,
            sinks=sinks,
        )

    @cached_property
    def _distance_bias(self) -> Tensor | None:
        """float32 [num_heads, max_distance + 1], the bias of all layers' scores by distance."""
        if (relative := self.spec.relative_bias) is None:
            return None
        shape = relative.num_buckets, self.spec.num_heads
        table = self.vector(f"{relative.name}.weight", *shape)
        distances = torch.arange(relative.max_distance + 1)
        exact = relative.num_buckets // 2
        buckets = logarithmic_bucket(distances, exact, relative.num_buckets, relative.max_distance)
        return table[buckets].T.contiguous()

    def _latents(self, described: LatentDescription) -> LatentWeights:
        latents, rank, shard = described.latents, described.query_norm.size, self.shard
        into, out_of = self._absorb_kv_b_proj(described)
        query_rows = None if shard is None else shard.head_rows(latents.query_size)
        rows = None
        if query_rows is not None and not rank:
            total = described.inputs.rows
            rows = [*query_rows, range(total - latents.latent_rows, total)]
        return LatentWeights(
            latents=latents,
            inputs=self.linear(described.inputs, rows),
            queries=None
            if described.queries is None
            else self.linear(described.queries, query_rows),
            query_norm=self._norm_weight(described.query_norm.name, rank) if rank else None,
            latent_norm=self._norm_weight(described.latent_norm.name, latents.kv_lora_rank),
            into=into,
            out_of=out_of,
            o=self.linear(described.o, inputs=self._head_starts(latents.value_size)),
            cos_sin=self._table(described.rope),
            index=None if described.index is None else self._index(described.index),
        )

    def _index(self, index: SparseIndexDescription) -> SparseIndexWeights:
        norm = index.key_norm
        return SparseIndexWeights(
            queries=self.linear(index.queries),
            keys=self.linear(index.keys),
            key_norm=self.vector(f"{norm.name}.weight", norm.size),
            key_norm_bias=self.vector(f"{norm.name}.bias", norm.size),
            weights=self.linear(index.weights),
        )

    def _head_starts(self, head_size: int) -> tuple[int, ...] | None:
        return None if self.shard is None else self.shard.head_starts(head_size)

    def _absorb_kv_b_proj(
        self, described: LatentDescription
    ) -> tuple[PerHeadLinear, PerHeadLinear]:
        """Return each local head's transposed projection to keys, and its projection to values.
        Quantized weights are dequantized to the model's dtype, since transposing turns columns into
        rows.
        """
        latents, heads = described.latents, described.heads
        pair = latents.qk_nope_head_dim + latents.value_size
        matrix = self.weight_source(heads.parts[0].name, heads.rows, heads.columns)
        local = [range(heads.rows)]
        if self.shard is not None:
            local = self.shard.head_rows(pair) or local
        into, out_of = [], []
        for first in local[0][::pair]:
            keys, values = matrix.floats(slice(first, first + pair)).split(
                (latents.qk_nope_head_dim, latents.value_size)
            )
            into.append(self._head(keys.T))
            out_of.append(self._head(values))
            self.weights.release()
        absorbed = self.ops.head_linears(into), self.ops.head_linears(out_of)
        keeps_format = matrix.source == str(self.dtype).removeprefix("torch.")
        last = [DenseSource(values)], out_of[-1]  # represents all heads
        report = layer_report([heads.parts[0].name], *last, keeps_format, self.ops.device)
        nbytes = sum(part.nbytes for part in absorbed)
        self.reports.append(replace(report, format=matrix.source, nbytes=nbytes))
        return absorbed

    def _head(self, weight: Tensor) -> LinearLayer:
        return self.ops.PackedLinear(
            weight.to(self.dtype).contiguous(), round_inputs=self.scheme.bf16_inputs
        )

    def _state(self, described: StateDescription) -> StateWeights:
        full, shard = described.state, self.shard
        state = full if shard is None or shard.spec.states is None else shard.spec.states

        def rows(slot: str) -> list[range] | None:
            return None if shard is None else shard.state_linear_rows(slot)

        def local(values: Tensor, sizes_of: Callable[[MambaSpec], Sequence[int]]) -> Tensor:
            selected = None if shard is None else shard.state_rows(sizes_of)
            return values if selected is None else values[_numbers(selected)]

        def by_head(name: str, *sizes: int) -> Tensor:
            return local(self.vector(name, *sizes), lambda of: (of.num_heads,))

        heads = full.num_heads
        conv = torch.ones((full.channels, 1, full.conv_width), device=self.ops.device)
        if described.conv:
            shape = full.channels // len(described.conv), 1, full.conv_width
            conv = torch.cat([self.vector(f"{name}.weight", *shape) for name in described.conv])
        conv_bias = None
        if full.conv_bias:
            conv_bias = self.vector(f"{described.conv[0]}.bias", full.channels)
            conv_bias = local(conv_bias, lambda of: of.conv_sizes)
        scan, norm, scales = None, None, None
        if state.kind not in ("conv", "rg_lru"):
            sizes: tuple[int, ...] = (heads,)
            if state.kind == "mamba1":
                sizes = (heads, state.key_size)
            if state.kind == "kda":
                sizes = (1, 1, heads, 1)
            rate_bias = torch.zeros(state.num_heads, device=self.ops.device)
            if described.rate_bias and state.kind == "kda":
                by_key = self.vector(described.rate_bias, full.keys).view(heads, state.key_size)
                rate_bias = local(by_key, lambda of: (of.num_heads,))
            elif described.rate_bias:
                rate_bias = by_head(described.rate_bias, heads)
            decay = torch.tensor(described.fixed_decays, device=self.ops.device)
            if described.decay:
                decay = -self.vector(described.decay, *sizes).exp()
            if state.kind == "kda":
                decay = decay.flatten()
            scan = ScanWeights(
                decay=local(decay, lambda of: (of.num_heads,)),
                rate_bias=rate_bias,
                skip=by_head(described.skip, heads) if described.skip else None,
                limits=state.limits,
                delta=state.kind in ("delta", "kda"),
            )
        if described.norm.name:
            # Without the offset of the family's other norms.
            norm = self.vector(f"{described.norm.name}.weight", described.norm.size)
            if described.norm.size == full.values:
                norm = local(norm, lambda of: (of.values,))
        if state.input_scales:
            scales = torch.tensor(state.input_scales, device=self.ops.device)
            counts = torch.tensor(state.input_sizes, device=self.ops.device)
            scales = scales.repeat_interleave(counts)
        selection, starts = described.selection, None
        if shard is not None and shard.splits_states:
            starts = [state.values * rank for rank in range(shard.ranks.size + 1)]
        return StateWeights(
            state=state,
            inputs=self.linear(described.inputs, rows("state_in")),
            selection=None if selection is None else self.linear(selection),
            rates=None
            if described.rates is None
            else self.linear(described.rates, rows("state_rates")),
            gates=None
            if described.gates is None
            else self.linear(described.gates, rows("state_gates")),
            output=self.linear(described.output, inputs=starts),
            conv=local(conv[:, 0], lambda of: of.conv_sizes).T.contiguous(),
            conv_bias=conv_bias,
            scan=scan,
            norm=norm,
            input_scales=scales,
            selection_norms=tuple(self.norm(part) for part in described.selection_norms),
            lru=self._lru(described) if described.head_gates else None,
        )

    def _lru(self, described: StateDescription) -> LruWeights:
        heads, size = described.state.num_heads, described.state.value_size
        # Here a head's gate is x W + b with W [inputs, outputs].
        weights = [
            self.tensor(f"{name}_weight", (heads, size, size)) for name in described.head_gates
        ]
        biases = [self.vector(f"{name}_bias", heads, size) for name in described.head_gates]
        decay = self.vector(described.decay, described.state.values)
        return LruWeights(
            gates=self.ops.head_linears(
                [self._head(torch.cat(pair, dim=-1).T) for pair in zip(*weights, strict=True)]
            ),
            gate_biases=torch.cat(biases, dim=-1),
            decay=-LRU_SHARPNESS * torch.nn.functional.softplus(decay),
        )

    def _qk_norm(self, attention: AttentionDescription) -> dict[str, Any]:
        """Load the norms of queries and keys by their names in `AttentionWeights`."""
        spec, kind, dim = self.spec, attention.qk_norm, self.spec.head_dim
        both = (("q", attention.q_norm, spec.num_heads), ("k", attention.k_norm, spec.num_kv_heads))
        if not kind:
            return {}
        if kind == "rms_head":
            return {f"{of}_norm": self._norm_weight(name, dim) for of, name, _ in both if name}
        if kind == "rms_full":
            columns = None if self.shard is None else self.shard.qkv_columns
            norms = {
                f"{of}_full_norm": self._norm_weight(name, heads * dim) for of, name, heads in both
            }
            return {**norms, "local_columns": None if columns is None else _numbers(columns)}
        head_norms = {of: self._head_norm(name, heads) for of, name, heads in both}
        if self.shard is not None and kind != "layer_shared":
            ranges = {"q": self.shard.head_range, "k": self.shard.kv_head_range}
            head_norms = {
                of: replace(norm, weight=norm.weight[ranges[of]].contiguous())
                for of, norm in head_norms.items()
            }
        return {f"{of}_head_norm": norm for of, norm in head_norms.items()}

    def _head_norm(self, name: str, heads: int) -> HeadNormWeights:
        spec, dim = self.spec, self.spec.head_dim
        if spec.qk_norm == "layer_list":
            rows = [self._norm_weight(f"{name}.norms.{head}", dim) for head in range(heads)]
            weight = torch.stack(rows)
        elif spec.qk_norm == "layer_heads":
            weight = self._norm_weight(name, heads, dim)
        else:
            weight = self._norm_weight(name, dim).unsqueeze(0)
        bias = self.vector(f"{name}.bias", dim) if spec.qk_norm_bias else None
        return HeadNormWeights(weight.contiguous(), bias)

    @property
    def plane_tables(self) -> list[tuple[Tensor, Tensor]]:
        """Rotary tables that end with rows for tokens with three positions, and their planes."""
        return [
            (table, torch.tensor(rope.planes, device=table.device))
            for rope, table in self._tables
            if rope.planes
        ]

    def _table(self, rope: RopeSpec | None) -> Tensor | None:
        """Return the rotary table, which layers with the same rotary embedding share."""
        if rope is None:
            return None
        for cached_rope, table in self._tables:
            if cached_rope == rope:
                return table
        table = cos_sin_table(rope, self._max_model_len)
        if rope.planes:
            table = torch.cat((table, torch.zeros(MAX_PLANE_ROWS, rope.dim)))
        table = table.to(self.ops.device)
        self._tables.append((rope, table))
        return table

    def mlp(self, mlp: MlpDescription) -> MlpWeights:
        """Load a dense MLP's weights."""
        shard, inner = self.shard, mlp.down.columns
        up = self.linear(mlp.up, None if shard is None else shard.up_rows(inner, mlp.gated))
        down = self.linear(mlp.down, inputs=None if shard is None else shard.inner(inner))
        return MlpWeights(up, down, mlp.activation, mlp.gated)


def _numbers(rows: Sequence[range]) -> Tensor:
    return torch.cat([torch.arange(part.start, part.stop) for part in rows])


def _select_rows(
    matrices: Sequence[WeightSource], rows: Sequence[range], order: Tensor | None = None
) -> list[WeightSource]:
    """Select rows of stacked matrices; only these are read.

    `order`: the order of a single matrix's rows, to which `rows` refer; None for no change.
    """
    if order is not None:
        return [RowSelection(matrices[0], order[_numbers(rows)])]
    selected: list[WeightSource] = []
    for part in rows:
        above = 0
        for matrix in matrices:
            low, high = max(part.start, above), min(part.stop, above + matrix.shape[0])
            if low < high:
                selected.append(RowSelection(matrix, slice(low - above, high - above)))
            above += matrix.shape[0]
    return selected


def repeat_kv_rows(spec: DecoderSpec, count: int) -> Tensor:
    """Return indices that repeat `count` rows of KV heads until there are `num_kv_heads`."""
    heads = count // spec.head_dim
    rows = torch.arange(count).view(heads, spec.head_dim)
    return rows.repeat_interleave(spec.num_kv_heads // heads, dim=0).flatten()


def ungroup_qkv_rows(spec: DecoderSpec) -> Tensor:
    """Return indices from rows [KV head][its queries, key, value] to queries, keys, values."""
    group, dim = spec.num_heads // spec.num_kv_heads, spec.head_dim
    rows = torch.arange(spec.q_size + 2 * spec.kv_size).view(spec.num_kv_heads, group + 2, dim)
    return torch.cat((rows[:, :group].flatten(), rows[:, group].flatten(), rows[:, -1].flatten()))
