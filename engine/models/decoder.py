"""The native decoder: one implementation of the mainstream families, described by `DecoderSpec`.

What differs between families is decided at load: weights are read by the model's description, and
both plain layers and the kernels' compiled decoder are made from them; a step asks nothing more.
Activations are float32 on a CPU whatever the weights' dtype is, and in the weights' dtype on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from engine.kv_cache.layout import KVLayout, uniform
from engine.models.adapted_linears import (
    expert_linears,
    linears_of,
    make_slots,
    slot_places,
    stacked_linears,
)
from engine.models.adapters import CurrentStep, DeviceHeads, StepAdapters
from engine.models.cache import KVScales, LayerCache, new_cache
from engine.models.compiled import compile_decoder
from engine.models.context import AttentionContext
from engine.models.decoder_layers import Layer
from engine.models.describe import describe
from engine.models.description import ExpertsDescription, experts_of
from engine.models.experts import Weights
from engine.models.layer_loader import LayerLoader
from engine.models.layer_weights import LayerWeights, named_tensors
from engine.models.norms import Norm, norm_of
from engine.models.plain_layers import adapted, plain_layer
from engine.models.spec import DecoderSpec
from engine.models.taps import Taps
from engine.quantization.report import LayerReport
from engine.quantization.scheme import scheme_of
from kernels import KernelSet, LinearLayer
from kernels.ablations import is_on
from kernels.interface import NO_NORM, CompiledDecoder
from kernels.lora import LayerLoras, LoraTable
from kernels.lora_slots import LoraSlots
from kernels.steps import CompiledStep, StepEnds, StepTables


class NativeDecoder:
    """Decoder-only transformer over a paged KV cache.

    Args:
        spec: the architecture.
        ops: kernels of the device.
        weight_dtype: in which linear weights and the embedding are kept.
        max_model_len: length of the rotary tables.
        quantization: "int8", "int4" or "fp8": in few bits; None: as the checkpoint has them.
        round_inputs: let bf16 weights meet activations rounded to bf16, where that is faster.
    """

    stateful = False
    takes_embeds = True

    def __init__(
        self,
        spec: DecoderSpec,
        ops: KernelSet,
        weight_dtype: torch.dtype,
        max_model_len: int,
        quantization: str | None = None,
        round_inputs: bool = False,
    ) -> None:
        self.spec = spec
        self.ops = ops
        self.weight_dtype = weight_dtype
        self._activations = ops.activation_dtype(weight_dtype)
        self.max_model_len = max_model_len
        self.quantization = quantization
        self._round_inputs = round_inputs
        self._compiled: CompiledDecoder | None = None
        self.description = describe(spec)
        self.weights: list[LayerWeights] = []
        self.layers: list[Layer] = []
        self.kv_caches: list[LayerCache] = []
        #: By layer, for fp8 caches; empty or None: 1.
        self.kv_scales: list[KVScales | None] = []
        #: What became of each layer's weights.
        self.load_report: list[LayerReport] = []
        self.group_of: list[int] = []
        self._step = CurrentStep()
        self._positions: Tensor | None = None
        self._embedding_norm: Norm | None = None
        self._embedding_norm_weights = NO_NORM

    # -- weights ------------------------------------------------------------------------------

    def load(self, weights: Weights, progress: Callable[[int, int], None]) -> None:
        """Read all weights; `progress(done, total)` is called after each layer."""
        spec = self.spec
        scheme = scheme_of(self.quantization, self._round_inputs)
        loader = LayerLoader(spec, self.ops, self.weight_dtype, self.max_model_len, weights, scheme)
        total = spec.num_layers + 1
        loader.check(self.description)
        self._load_tables(loader)
        progress(1, total)
        for index, layer in enumerate(self.description.layers):
            self.weights.append(loader.layer(layer))
            progress(index + 2, total)
        self.final_norm = loader.norm(self.description.final_norm)
        self.load_report = loader.reports
        norms = [*(layer.input_norm for layer in self.weights), self.final_norm]
        self._first_norm = norm_of(self.ops, norms[0], spec.hidden_size, spec.norm_eps)
        self.layers = [
            plain_layer(spec, self.ops, adapted(self.ops, layer, index, self._step), following)
            for index, (layer, following) in enumerate(zip(self.weights, norms[1:], strict=True))
        ]

    def _load_tables(self, loader: LayerLoader) -> None:
        """The embedding, what is added to it, and the head."""
        spec, described = self.spec, self.description
        own = described.embedding
        if own is None and loader.has_packed(spec.names.lm_head):
            # Tied while it was trained; the head alone was quantised.
            own = described.head
            self.lm_head = loader.table(replace(described.head, name=spec.names.lm_head))
        else:
            self.lm_head = loader.table(described.head)
        self.embedding = self.lm_head if own is None else loader.table(own)
        if described.positions:
            shape = (spec.num_positions, spec.hidden_size)
            self._positions = loader.vector(f"{described.positions}.weight", *shape)
        if described.embedding_norm.name:
            norm = self._embedding_norm_weights = loader.norm(described.embedding_norm)
            self._embedding_norm = norm_of(self.ops, norm, spec.hidden_size, spec.norm_eps)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All weights that are tensors, by name; shared ones may come more than once."""
        whole = {
            "lm_head": self.lm_head,
            "embedding": self.embedding,
            "positions": self._positions,
            "embedding_norm": self._embedding_norm_weights,
            "final_norm": self.final_norm,
            **{f"layers.{index}": layer for index, layer in enumerate(self.weights)},
        }
        for name, weights in whole.items():
            yield from named_tensors(weights, name)

    @property
    def decode_bytes(self) -> int:
        """Bytes of weights that a decode step of one sequence reads."""
        return self.lm_head.nbytes + sum(layer.nbytes for layer in self.weights)

    @property
    def compiled(self) -> bool:
        """Whether all layers run in one call."""
        return self._compiled is not None

    # -- KV cache -----------------------------------------------------------------------------

    def allocate_kv(
        self, num_blocks: int, block_size: int, dtype: torch.dtype, layout: KVLayout | None = None
    ) -> None:
        """Make the caches: [num_blocks, num_kv_heads, block_size, head_dim] for each layer slot.

        Layers of different groups may have the same slot: their blocks are never the same.
        """
        layout = layout or uniform(len(self.layers))
        shape = (num_blocks, self.spec.num_kv_heads, block_size, self.spec.head_dim)
        caches = [new_cache(self.ops, shape, dtype) for _ in range(layout.layers_per_block)]
        self.kv_caches = [caches[slot] for slot in layout.slot_of_layers()]
        if dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and self.kv_scales:
            self.kv_caches = [
                cache if scales is None else scales.put_on(cache)
                for cache, scales in zip(self.kv_caches, self.kv_scales, strict=True)
            ]
        self.group_of = layout.group_of_layers()
        if is_on("decoder"):
            self._compiled = compile_decoder(
                self.spec, self.ops, self.weights, self.final_norm, self.kv_caches, self.group_of
            )

    def release_kv(self) -> None:
        """Let the caches go, until `allocate_kv` makes new ones."""
        self.kv_caches, self._compiled = [], None

    def compile_step(self, tables: StepTables) -> CompiledStep | None:
        """Whole decode steps in one call over the running batch; None: not this model."""
        spec = self.spec
        if self._compiled is None or self._embedding_norm is not None or spec.logit_soft_cap:
            return None
        offset = spec.position_offset if self._positions is not None else 0
        ends = StepEnds(
            self.embedding, self.lm_head, self._positions, offset, spec.embedding_scale,
            spec.logit_scale,
        )  # fmt: skip
        return self._compiled.compile_step(ends, tables)

    # -- adapters -----------------------------------------------------------------------------

    def linears(self, layer: int) -> dict[str, LinearLayer]:
        """A layer's linear layers that adapters may change, by their slots."""
        weights = self.weights[layer]
        if self.lora_slots is None:
            return linears_of(weights) | expert_linears(weights)
        # A device whose steps are recorded runs experts all at once.
        mlp = self.description.layers[layer].mlp
        experts = dict(experts_of(mlp)) if isinstance(mlp, ExpertsDescription) else {}
        return linears_of(weights) | stacked_linears(weights, experts)

    @property
    def lora_slots(self) -> LoraSlots | None:
        """Where adapters are on a device whose steps are recorded; None: they have no slots."""
        return self._step.slots

    def make_lora_slots(self, most: int, most_rank: int) -> LoraSlots | None:
        """Slots for so many adapters of up to that rank; None: the kernels have none."""
        places = [slot_places(weights) for weights in self.weights]
        experts = 0 if self.spec.moe is None else self.spec.moe.num_experts
        return make_slots(self.ops, places, most, most_rank, self.weight_dtype, experts)

    def use_lora_slots(self, slots: LoraSlots | None) -> None:
        """Have adapters there, see `make_lora_slots`."""
        self._step.slots = slots

    def lora_table(self, layers: LayerLoras) -> LoraTable | None:
        """An adapter for all layers in one call, or in a slot; None where neither is there."""
        if self.lora_slots is not None:
            return self.lora_slots.put(layers)
        return None if self._compiled is None else self._compiled.lora_table(layers)

    # -- forward ------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, context: AttentionContext, taps: Taps | None = None
    ) -> Tensor:
        """Hidden states after the final norm.

        Args:
            token_ids: int64 [num_tokens].
            context: the step's batch.
            taps: take states between layers; then all tokens are wanted.

        Returns:
            [num_rows, hidden] for `context.logits_rows` (all tokens when None).
        """
        residual, adapters = self._embed(token_ids, context), context.adapters
        if taps is not None and (x := taps.run(residual, context)) is not None:
            return x
        tables = [] if adapters is None else adapters.tables()
        if self._compiled is not None and tables is not None and taps is None:
            return self._compiled(
                residual,
                context.positions,
                context.slot_mapping,
                context.block_tables,
                context.seq_lens,
                context.query_start_loc,
                context.logits_rows,
                [(group.slot_mapping, group.block_tables) for group in context.others],
                tables,
            )
        if adapters is None and context.lora_rows is None:
            return self._run_layers(residual, context, context.logits_rows, taps)
        # Adapters name tokens: all of them go through the last layer.
        self._step.adapters, self._step.rows = adapters, context.lora_rows
        try:
            x = self._run_layers(residual, context, None, taps)
        finally:
            self._step.adapters = self._step.rows = None
        return x if context.logits_rows is None else x[context.logits_rows]

    def _run_layers(
        self,
        residual: Tensor,
        context: AttentionContext,
        wanted: Tensor | None,
        taps: Taps | None,
    ) -> Tensor:
        """Layer by layer; of the last one the tokens `wanted`, None for all."""
        x = self._first_norm(residual)
        last = len(self.layers) - 1
        groups = context.groups
        for index, layer in enumerate(self.layers):
            # After the last layer's attention tokens don't meet: only those wanted go on.
            rows = wanted if index == last else None
            if taps is not None:
                taps.take(index, residual)
            batch = groups[self.group_of[index]]
            x, residual = layer(x, residual, batch, self.kv_caches[index], rows)
        return x

    def _embed(self, token_ids: Tensor, context: AttentionContext) -> Tensor:
        """[num_tokens, hidden], a tensor of its own."""
        known, positions = token_ids, context.positions
        if context.adapters is not None and context.adapters.vocab_size:
            known = token_ids.clamp(max=self.spec.vocab_size - 1)  # the others' rows follow
        x = self.embedding.rows(known)
        if context.adapters is not None:
            for adapter, rows in context.adapters.groups:
                if adapter.embedding is not None:
                    adapter.embedding.change(self.ops, x, token_ids, rows)
        if self.lora_slots is not None and context.lora_rows is not None:
            self.lora_slots.embed(self.spec.num_layers, x, token_ids, context.lora_rows)
        if context.embeds is not None:
            places, values = context.embeds
            x[places.to(x.device)] = values.to(x)
        if self.spec.embedding_scale != 1.0:
            x.mul_(self.spec.embedding_scale)
        if self._positions is not None:
            x.add_(self._positions[positions + self.spec.position_offset])
        x = x.to(self._activations)
        return x if self._embedding_norm is None else self._embedding_norm(x)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, adapters: StepAdapters | DeviceHeads | None = None) -> Tensor:
        """float32 [num_rows, vocab_size] from [num_rows, hidden]; `adapters` name rows of it.

        Rows of adapters that bring tokens come without others, and all of one vocabulary.
        """
        spec = self.spec
        if isinstance(adapters, StepAdapters) and adapters.vocab_size:
            logits = torch.empty(len(hidden), adapters.vocab_size)
        else:
            logits = self.lm_head(hidden).float()
        if isinstance(adapters, StepAdapters):
            for adapter, rows in adapters.groups:
                if adapter.head is not None:
                    adapter.head.change(self.ops, logits, hidden, rows)
        elif adapters is not None and self.lora_slots is not None:
            adapters.change(self.lora_slots, spec.num_layers, logits, hidden)
        if spec.logit_scale != 1.0:
            logits.mul_(spec.logit_scale)
        if spec.logit_soft_cap:
            logits.div_(spec.logit_soft_cap).tanh_().mul_(spec.logit_soft_cap)
        return logits
