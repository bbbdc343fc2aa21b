"""The native decoder: one implementation of the mainstream families, described by `DecoderSpec`.

Differences between families are resolved at load: weights are read by the model's description, and
both plain layers and the kernels' compiled decoder are built from them. Activations are float32 on
a CPU whatever the weights' dtype is, and have the weights' dtype on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.contract.replica_state import LayerReport
from engine.distributed.parallel_state import stage_layers
from engine.distributed.pipeline import PipelineStage
from engine.kv_cache.kv_cache_config import (
    KVCacheConfig,
    single_group_config,
    with_cross_attention,
)
from engine.models.aux_hidden_states import AuxHiddenStates
from engine.models.compiled_decoder import compile_decoder
from engine.models.decoder_spec import DecoderSpec
from engine.models.expert_loader import ExpertLoader
from engine.models.forward_context import AttentionMetadata, KVScales, LayerCache, allocate_kv_cache
from engine.models.layers.altup import AltUpEnds
from engine.models.layers.build_layer import adapted, build_layer
from engine.models.layers.decoder_layer import Layer
from engine.models.layers.describe import describe
from engine.models.layers.linear import MoeBlock, TableDescription, experts_of
from engine.models.layers.mamba import StateTable
from engine.models.layers.moe import Weights
from engine.models.layers.norm import Norm, make_norm
from engine.models.layers.weights import AltUpModelWeights, LayerWeights, named_tensors
from engine.models.lora import NO_ADAPTERS, DeviceHeads, StepAdapters
from engine.models.rotary_embedding import rotate_in_planes
from engine.models.sharding import ExpertShard, ModelShard, check_stages
from engine.models.supports_lora import (
    AdaptableLinear,
    SupportsLoRA,
    expert_linears,
    latent_heads,
    linears_of,
    slot_names,
    stacked_linears,
)
from engine.models.weight_loader import WeightLoader
from engine.quantization.packing import make_quant_scheme
from kernels import KernelSet, LinearLayer
from kernels.compiled_decoder import BatchTables, CompiledStep, EmbeddingAndHead
from kernels.interface import NO_NORM, CompiledDecoder, RankGroup
from kernels.layers import AbsentLinear
from kernels.lora import LayerLoras, LoraTable

log = logging.getLogger(__name__)


class NativeDecoder(SupportsLoRA):
    """Decoder-only transformer over a paged KV cache.

    Args:
        spec: the architecture.
        ops: kernels of the device.
        weight_dtype: the dtype of linear weights and the embedding.
        max_model_len: the length of the rotary tables.
        quantization: "int8", "int4" or "fp8" to quantize weights; None for the checkpoint's format.
        round_inputs: allow rounding activations to bf16 for bf16 weights where it is faster.
        ranks: processes that share each layer's tensors; None if this one has all of them.
        stage: this process's stage of the pipeline; None if it has all layers.
        expert_shard: this rank's experts in each layer; None if it has all of them, or columns of
            all.
        deals_tokens: whether each of `ranks` has some tokens of a KV block, for all heads.
        reopen_weights: opens the checkpoint again, for experts that are moved to this rank.

    Attributes:
        full_spec: the spec of the whole model.
        spec: the spec of this rank's layers.
        description: the description of the whole model, but only with this rank's layers.
        first_layer: the index of the first of these in the model.

    Raises `ConfigError` for a model that these ranks can't share.
    """

    takes_embeds = True

    def __init__(
        self,
        spec: DecoderSpec,
        ops: KernelSet,
        weight_dtype: torch.dtype,
        max_model_len: int,
        quantization: str | None = None,
        round_inputs: bool = False,
        ranks: RankGroup | None = None,
        stage: PipelineStage | None = None,
        *,
        expert_shard: ExpertShard | None = None,
        deals_tokens: bool = False,
        reopen_weights: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__()
        self.full_spec, self.stage = spec, stage
        self._reopen_weights = reopen_weights
        self.shard = None if ranks is None else ModelShard(spec, ranks, deals_tokens=deals_tokens)
        self.expert_shard = expert_shard
        self.spec = spec if self.shard is None else self.shard.spec
        self.description, self.first_layer = describe(spec), 0
        if stage is not None:
            check_stages(spec, stage.size)
            layers = stage_layers(spec.num_layers, stage.size, stage.partition)[stage.index]
            self.spec, self.first_layer = self.spec.slice_layers(layers), layers.start
            self.description = replace(
                self.description, layers=self.description.layers[layers.start : layers.stop]
            )
        self._is_first = stage is None or stage.is_first
        self._is_last = stage is None or stage.is_last
        self.stateful = spec.states is not None
        self.ops = ops
        self.weight_dtype = weight_dtype
        self._activations = ops.activation_dtype(weight_dtype)
        self.max_model_len = max_model_len
        self.quantization = quantization
        self.round_inputs = round_inputs
        self._compiled: CompiledDecoder | None = None
        self.weights: list[LayerWeights] = []
        self.layers: list[Layer] = []
        #: KV caches of the layers with attention, in order, and their KV cache groups.
        self.kv_caches: list[LayerCache] = []
        self.group_of: list[int] = []
        #: By layer, KV caches of the encoder's states; [] without an encoder.
        self.cross_caches: list[LayerCache] = []
        #: By layer of this stage, the scales of fp8 caches; empty or None for 1.
        self.kv_scales: list[KVScales | None] = []
        #: How each layer's weights were converted.
        self.load_report: list[LayerReport] = []
        #: The layers' states; None without any.
        self._states: StateTable | None = None
        #: Each layer's KV cache group, and its caches and states.
        self._layer_caches: list[tuple[int, Any]] = []
        #: For a model with several hidden states per token; None for one.
        self._altup: AltUpEnds | None = None
        self._altup_weights: AltUpModelWeights | None = None
        self._positions: Tensor | None = None
        self._plane_tables: list[tuple[Tensor, Tensor]] = []
        self._embedding_norm: Norm | None = None
        self._embedding_norm_weights = NO_NORM

    def encoder_loader(self, weights: Weights) -> WeightLoader:
        """Return a loader for an encoder before this decoder, with weights in `weight_dtype`."""
        scheme = make_quant_scheme(None, self.round_inputs)
        return WeightLoader(
            self.full_spec, self.ops, self.weight_dtype, self.max_model_len, weights, scheme
        )

    def load(self, weights: Weights, progress: Callable[[int, int], None]) -> None:
        """Read all weights; `progress(done, total)` is called after each layer."""
        spec, loader = self.spec, self._loader(weights)
        total = spec.num_layers + 1
        loader.check(self.description)
        self._load_tables(loader)
        progress(1, total)
        for index, layer in enumerate(self.description.layers):
            self.weights.append(loader.layer(layer))
            progress(index + 2, total)
        if spec.altup is not None and self.description.altup is not None:
            self._altup_weights = loader.altup_model(self.description.altup)
            norm, size = self._altup_weights.projection_norm, spec.altup.per_layer_size
            norm_by_layer = make_norm(self.ops, norm, size, spec.norm_eps)
            self._altup = AltUpEnds(
                spec=spec.altup, weights=self._altup_weights, norm=norm_by_layer
            )
        self._plane_tables = loader.plane_tables
        self.final_norm = loader.norm(self.description.final_norm) if self._is_last else NO_NORM
        self.load_report = loader.reports
        norms = [*(layer.input_norm for layer in self.weights), self.final_norm]
        self._first_norm, *self._next_norms = (
            make_norm(self.ops, norm, spec.hidden_size, spec.norm_eps) for norm in norms
        )
        self.layers = [
            build_layer(
                spec, self.ops, adapted(self.ops, layer, index, self._step), following, index
            )
            for index, (layer, following) in enumerate(zip(self.weights, norms[1:], strict=True))
        ]

    def _loader(self, weights: Weights) -> WeightLoader:
        scheme = make_quant_scheme(self.quantization, self.round_inputs)
        return WeightLoader(
            self.full_spec,
            self.ops,
            self.weight_dtype,
            self.max_model_len,
            weights,
            scheme,
            self.shard,
            self.expert_shard,
        )

    def load_experts(
        self, layer: int, requested: Collection[int]
    ) -> dict[int, tuple[LinearLayer, LinearLayer]]:
        """Load some experts of a layer, gate over up and down. Raises `ModelLoadError`."""
        block = self.description.layers[layer].mlp
        if self._reopen_weights is None or not isinstance(block, MoeBlock):
            raise RuntimeError(f"Layer {layer} has no experts that can be moved.")
        if not requested:
            return {}
        weights = self._reopen_weights()
        try:
            experts = ExpertLoader(self._loader(weights), block, requested).experts()
        finally:
            weights.close()
        return {expert: experts[expert] for expert in requested}

    def join_experts(self) -> None:
        """Take part in a forward pass of other ranks, which have their own tokens."""
        for weights in self.weights:
            if weights.experts is not None:
                weights.experts(torch.empty((0, self.spec.hidden_size)))

    def _load_tables(self, loader: WeightLoader) -> None:
        """Load the embedding, learned positions, the embedding's norm and the output layer."""
        spec, described = self.spec, self.description
        embedding, head = self._resolve_tables(loader)
        self.lm_head = loader.table(head) if self._is_last else AbsentLinear()
        self.embedding: LinearLayer = AbsentLinear()
        if not self._is_first:
            return
        if embedding is None and self._is_last:
            self.embedding = self.lm_head
        else:
            self.embedding = loader.table(embedding or head)
        if described.positions:
            shape = (spec.num_positions, spec.hidden_size)
            self._positions = loader.vector(f"{described.positions}.weight", *shape)
        if described.embedding_norm.name:
            norm = self._embedding_norm_weights = loader.norm(described.embedding_norm)
            self._embedding_norm = make_norm(self.ops, norm, spec.hidden_size, spec.norm_eps)

    def use_positions(self, table: Tensor) -> None:
        """Add rows of a table [length, hidden] to embeddings by position."""
        self._positions = table

    def _resolve_tables(
        self, loader: WeightLoader
    ) -> tuple[TableDescription | None, TableDescription]:
        """Return the checkpoint's embedding (None if the head is used) and output layer."""
        spec, described = self.spec, self.description
        embedding, head = described.embedding, described.head
        if embedding is None and loader.has_packed(spec.names.lm_head):
            # Tied in training, but only the output layer was quantized.
            return head, replace(head, name=spec.names.lm_head)
        if embedding is None and loader.has_other_head():
            log.warning(
                "config.json ties the output layer to the embedding, but the checkpoint has "
                "another one, %s, which is used.",
                spec.names.lm_head,
            )
            embedding = TableDescription(spec.names.embedding)
            return embedding, replace(head, name=spec.names.lm_head)
        if embedding is not None and loader.lacks_head():
            log.warning(
                "The checkpoint has no output layer, %s: the embedding is used.",
                head.name,
            )
            return None, replace(head, name=spec.names.embedding)
        return embedding, head

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors of weights by name; shared ones may be repeated."""
        modules = {
            "lm_head": self.lm_head,
            "embedding": self.embedding,
            "altup": self._altup_weights,
            "positions": self._positions,
            "embedding_norm": self._embedding_norm_weights,
            "final_norm": self.final_norm,
            **{f"layers.{index}": layer for index, layer in enumerate(self.weights)},
        }
        for name, weights in modules.items():
            yield from named_tensors(weights, name)

    @property
    def decode_bytes(self) -> int:
        """Bytes of weights that a decode step of one sequence reads."""
        return self.lm_head.nbytes + sum(layer.nbytes for layer in self.weights)

    @property
    def compiled(self) -> bool:
        """Whether all layers run in one call."""
        return self._compiled is not None

    def set_kv_scales(self, scales: Sequence[KVScales | None]) -> None:
        """Set the scales of this rank's layers and KV heads from those of the whole model."""
        local_scales = scales[self.first_layer : self.first_layer + self.spec.num_layers]
        heads = slice(None) if self.shard is None else self.shard.kv_head_range
        self.kv_scales = [scale and scale.select_heads(heads) for scale in local_scales]

    def allocate_kv(
        self,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        layout: KVCacheConfig | None = None,
    ) -> None:
        """Allocate caches: [num_blocks, num_kv_heads, block_size, head_dim] for each layer slot.

        Layers of different groups may share a slot, since they never use the same block.
        """
        attending = self.spec.attention_layers
        if layout is None:
            layout = single_group_config(len(self.full_spec.attention_layers))
            if self.spec.cross is not None:
                layout = with_cross_attention(layout, self.spec.cross.length)
        ranks = self.shard.kv_ranks if self.shard is not None else None
        size = block_size if ranks is None else block_size // ranks.size
        shape = (num_blocks, self.spec.num_kv_heads, size, self.spec.head_dim)
        slots, groups = layout.slot_by_layer(), layout.group_by_layer()
        first = sum(layer < self.first_layer for layer in self.full_spec.attention_layers)
        if self.stage is not None:
            slots = slots[first : first + len(attending)]
        caches = {
            slot: allocate_kv_cache(
                self.ops, shape, dtype, latents=self.spec.latents is not None
            )._replace(ranks=ranks)
            for slot in sorted(set(slots))
        }
        by_layer = [caches[slot] for slot in slots]
        self.kv_caches, self.cross_caches = by_layer[: len(attending)], by_layer[len(attending) :]
        if dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and self.kv_scales:
            of_attending = [self.kv_scales[layer] for layer in attending]
            self.kv_caches = [
                cache if scales is None else scales.attach_to(cache)
                for cache, scales in zip(self.kv_caches, of_attending, strict=True)
            ]
        self.group_of = groups[first : first + len(attending)]
        states = layout.state_group
        self._keep_by_layer(1 if states is None else states.num_blocks)
        self._compiled = compile_decoder(
            self.spec,
            self.ops,
            self.weights,
            self.final_norm,
            self.kv_caches,
            self.group_of,
            {} if self._states is None else self._states.layers,
        )

    def slots_by_stage(self, layout: KVCacheConfig) -> list[set[int]]:
        """Return each stage's layer slots of a block."""
        if self.stage is None:
            return [set(layout.slot_by_layer())]
        stages = stage_layers(self.full_spec.num_layers, self.stage.size, self.stage.partition)
        slots = layout.slot_by_layer()
        return [
            {
                slot
                for slot, layer in zip(slots, self.full_spec.attention_layers, strict=True)
                if layer in layers
            }
            for layers in stages
        ]

    def _keep_by_layer(self, num_state_blocks: int) -> None:
        """Collect each layer's caches: keys and values, states, or both."""
        caches: dict[int, tuple[int, Any]] = {
            layer: (group, cache)
            for layer, group, cache in zip(
                self.spec.attention_layers, self.group_of, self.kv_caches, strict=True
            )
        }
        if self.spec.states is not None:
            self._states = StateTable(self.spec.states, self.ops, num_state_blocks)
            for layer, state in self._states.layers.items():
                group, cache = caches.get(layer, (0, None))
                caches[layer] = group, state if cache is None else (cache, state)
        for layer, source in enumerate(self.spec.kv_sources):
            caches[layer] = caches[source]
        for layer, states in enumerate(self.cross_caches):
            group, cache = caches[layer]
            caches[layer] = group, (cache, states)
        # A layer with only an MLP has no cache.
        self._layer_caches = [caches.get(layer, (0, None)) for layer in range(self.spec.num_layers)]

    @property
    def states(self) -> StateTable | None:
        """The layers' states; None without any."""
        return self._states

    def state_tensors(self) -> tuple[Tensor, ...]:
        """Tensors of all layers' states, whose first dimension is the block; () without states."""
        return () if self._states is None else self._states.tensors()

    def kv_cache_tensors(self) -> list[tuple[Tensor, ...]]:
        """Tensors by layer, then those of cross-attention, whose first dimension is the block.
        Layers may share them.
        """
        return [
            # The scales of an fp8 cache belong to the layer, those of an int8 cache to its tokens.
            tuple(
                tensor
                for tensor in (cache[:4] if cache.keys.dtype == torch.int8 else cache[:2])
                if tensor is not None
            )
            for cache in (*self.kv_caches, *self.cross_caches)
        ]

    def release_kv(self) -> None:
        """Release the caches and states; `allocate_kv` allocates new ones."""
        self.kv_caches, self.cross_caches, self._compiled = [], [], None
        self._layer_caches, self._states = [], None

    def compile_step(self, tables: BatchTables, taps: tuple[int, ...] = ()) -> CompiledStep | None:
        """Return steps over the running batch that run in one call each, and that return the inputs
        of the layers `taps`; None if the model isn't supported.
        """
        spec = self.spec
        if self._compiled is None or self._embedding_norm is not None or spec.logit_soft_cap:
            return None
        if self.stage is not None:
            return None
        offset = spec.position_offset if self._positions is not None else 0
        ends = EmbeddingAndHead(
            self.embedding, self.lm_head, self._positions, offset, spec.embedding_scale,
            spec.logit_scale,
        )  # fmt: skip
        if self._states is not None:
            tables = replace(tables, state_tokens=self._states.num_tokens)
        return self._compiled.compile_step(ends, tables, taps)

    def lora_linears(self, layer: int) -> Mapping[str, AdaptableLinear]:
        weights = self.weights[layer]
        if self.lora_slots is None:
            return linears_of(weights) | latent_heads(weights) | expert_linears(weights)
        # Devices with CUDA graphs run all experts at once.
        mlp = self.description.layers[layer].mlp
        experts = dict(experts_of(mlp)) if isinstance(mlp, MoeBlock) else {}
        return linears_of(weights) | stacked_linears(weights, experts)

    @property
    def _depth(self) -> int:
        return self.spec.num_layers

    def _slot_names(self) -> list[list[str]]:
        return [slot_names(weights) for weights in self.weights]

    @property
    def _num_experts(self) -> int:
        return 0 if self.spec.moe is None else self.spec.moe.num_experts

    def lora_table(self, layers: LayerLoras) -> LoraTable | None:
        if self.lora_slots is not None or self._compiled is None:
            return super().lora_table(layers)
        return self._compiled.lora_table(layers)

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, context: AttentionMetadata, taps: AuxHiddenStates | None = None
    ) -> Tensor:
        """Return hidden states after the final norm.

        Args:
            token_ids: int64 [num_tokens].
            context: the step's batch.
            taps: receives the inputs of some layers, for all tokens.

        Returns:
            [num_rows, hidden] for `context.logits_rows` (all tokens if it is None); [num_rows, 0]
            in all stages except the last.
        """
        if context.plane_positions is not None:
            for table, planes in self._plane_tables:
                rotate_in_planes(table, planes, context.plane_positions.to(table.device))
        if self.stage is None or self.stage.is_first:
            residual = self._embed(token_ids, context)
            if self._altup is not None:
                unnamed = None if context.embeds is None else context.embeds[0]
                layer_inputs = self._altup.layer_inputs(token_ids, residual, unnamed)
                for group_context in context.groups:
                    group_context.layer_inputs = layer_inputs
        else:
            residual = self.stage.receive_hidden(len(token_ids), self.spec.hidden_size)
        if self.stage is None or self.stage.is_last:
            return self._forward_layers(residual, context, taps)
        rows = context.logits_rows
        residual = self._forward_layers(residual, replace(context, logits_rows=None), taps)
        self.stage.send_hidden(residual)
        return residual.new_empty((len(token_ids) if rows is None else len(rows), 0))

    def _forward_layers(
        self, residual: Tensor, context: AttentionMetadata, taps: AuxHiddenStates | None
    ) -> Tensor:
        """Like `forward`, from the residual before the first layer; returns the residual after the
        last layer in stages without the final norm.
        """
        adapters = context.adapters
        tables = adapters.tables()
        embeds = context.encoder_embeds
        deep = embeds is not None and embeds[1].shape[1] > self.spec.hidden_size
        by_layer = deep or context.visible_ends is not None
        states = self._states
        if self._compiled is not None and tables is not None and not by_layer:
            x = self._compiled(
                residual,
                context.positions,
                context.slot_mapping,
                context.block_tables,
                context.seq_lens,
                context.query_start_loc,
                context.logits_rows,
                [(group.slot_mapping, group.block_tables) for group in context.other_groups],
                tables,
                None if taps is None else taps.buffer(residual),
                None if states is None else states.begin_step(context),
            )
            if states is not None:
                states.finish_step()
            return x
        if not adapters and context.lora_rows is None:
            return self._run_layers(residual, context, context.logits_rows, taps)
        # Adapters refer to tokens, so all of these go through the last layer.
        with self._lora_context(adapters, context.lora_rows):
            x = self._run_layers(residual, context, None, taps)
        return x if context.logits_rows is None else x[context.logits_rows]

    def _run_layers(
        self,
        residual: Tensor,
        context: AttentionMetadata,
        logits_rows: Tensor | None,
        taps: AuxHiddenStates | None,
    ) -> Tensor:
        """Run layer by layer; the last one returns the tokens `logits_rows`, None for all."""
        if self._altup is not None:
            residual = self._altup.expand(residual)
        x = self._first_norm(residual)
        last = len(self.layers) - 1
        groups, states = context.groups, self._states
        indices, deep = self._deep_embeds(context.encoder_embeds, residual)
        if states is not None:
            states.begin_step(context)
        if self.spec.shared is not None:
            embeddings = residual.clone()  # layers add to the residual in place
            for group_context in groups:
                group_context.embeddings = embeddings
        for index, layer in enumerate(self.layers):
            # After the last layer's attention tokens are independent: only selected ones continue.
            rows = logits_rows if index == last else None
            if taps is not None:
                taps.capture(index, residual)
            group, cache = self._layer_caches[index]
            x, residual = layer(x, residual, groups[group], cache, rows)
            if index < len(deep):
                residual[indices] += deep[index]
                x[indices] = self._next_norms[index](residual[indices])
        if states is not None:
            states.finish_step()
        if self._altup is not None:
            return self._next_norms[-1](self._altup.collapse(residual))
        return x

    def _deep_embeds(
        self, embeds: tuple[Tensor, Tensor] | None, residual: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return indices of tokens, and for each of the model's first layers that are here what is
        added to its results there.
        """
        if embeds is None or embeds[1].shape[1] == self.spec.hidden_size:
            return torch.empty(0), ()
        indices, vectors = embeds
        parts = vectors.to(residual).split(self.spec.hidden_size, dim=1)
        return indices.to(residual.device), parts[1 + self.first_layer :]

    def _embed(self, token_ids: Tensor, context: AttentionMetadata) -> Tensor:
        """Return [num_tokens, hidden], a new tensor."""
        base_ids, positions = token_ids, context.positions
        # With slots it isn't known here whether an adapter adds tokens.
        if context.lora_rows is not None or context.adapters.vocab_size:
            base_ids = token_ids.clamp(max=self.spec.vocab_size - 1)  # adapters set other rows
        x = self.embedding.rows(base_ids)
        self._adapt_embedding(x, token_ids, context.adapters, context.lora_rows)
        if context.embeds is not None:
            indices, values = context.embeds
            x[indices.to(x.device)] = values.to(x)
        if self.spec.embedding_scale != 1.0:
            x.mul_(self.spec.embedding_scale)
        if context.encoder_embeds is not None:
            indices, vectors = context.encoder_embeds
            x[indices.to(x.device)] = vectors[:, : self.spec.hidden_size].to(x)
        if self._positions is not None:
            x.add_(self._positions[positions + self.spec.position_offset])
        x = x.to(self._activations)
        return x if self._embedding_norm is None else self._embedding_norm(x)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, adapters: StepAdapters | DeviceHeads = NO_ADAPTERS) -> Tensor:
        """Return float32 [num_rows, vocab_size] for [num_rows, hidden]; `adapters` refer to rows.

        Rows of adapters that add tokens must not be mixed with others, and must all have the same
        vocabulary.
        """
        spec, stage = self.spec, self.stage
        if stage is not None and not stage.is_last:
            return stage.receive_logits(len(hidden), spec.vocab_size)
        if vocab_size := adapters.vocab_size:
            shape = len(hidden), vocab_size
            logits = torch.empty(shape, dtype=torch.float32, device=hidden.device)
        else:
            logits = self.lm_head(hidden).float()
        self._adapt_logits(logits, hidden, adapters)
        if spec.logit_scale != 1.0:
            logits.mul_(spec.logit_scale)
        if spec.logit_soft_cap:
            logits.div_(spec.logit_soft_cap).tanh_().mul_(spec.logit_soft_cap)
        if stage is not None:
            stage.send_logits(logits)
        return logits
