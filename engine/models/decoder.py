"""The native decoder: one implementation of the mainstream families, described by `DecoderSpec`.

What differs between families is decided at load: a layer holds the functions that it's made of, and
a step runs through them without asking. Activations are float32 on a CPU whatever the weights'
dtype is, and in the weights' dtype on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.kv_cache.layout import KVLayout, uniform
from engine.models.build import Layer, ModelBuilder
from engine.models.cache import KVScales, LayerCache, new_cache
from engine.models.compiled import compile_decoder
from engine.models.context import AttentionContext
from engine.models.experts import Weights
from engine.models.norms import Norm
from engine.models.spec import DecoderSpec
from engine.quantization.scheme import scheme_of
from kernels import KernelSet
from kernels.interface import CompiledDecoder
from kernels.steps import CompiledStep, StepEnds, StepTables


class NativeDecoder:
    """Decoder-only transformer over a paged KV cache.

    Args:
        spec: the architecture.
        ops: kernels of the device.
        weight_dtype: in which linear weights and the embedding are kept.
        max_model_len: length of the rotary tables.
        quantization: "int8", "int4" or "fp8": in few bits; None: as the checkpoint has them.
        compiled: run all layers in one call where the kernels can.
        round_inputs: let bf16 weights meet activations rounded to bf16, where that is faster.
        compiled_experts: run a mixture of experts in one call where the kernels can; off: expert
            by expert, and then layer by layer.
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
        compiled: bool = True,
        round_inputs: bool = False,
        compiled_experts: bool = True,
    ) -> None:
        self.spec = spec
        self.ops = ops
        self.weight_dtype = weight_dtype
        self._activations = ops.activation_dtype(weight_dtype)
        self.max_model_len = max_model_len
        self.quantization = quantization
        self._round_inputs = round_inputs
        self._compile, self._compile_experts = compiled, compiled_experts
        self._compiled: CompiledDecoder | None = None
        self.layers: list[Layer] = []
        self.kv_caches: list[LayerCache] = []
        #: By layer, for fp8 caches; empty or None: 1.
        self.kv_scales: list[KVScales | None] = []
        self._group_of: list[int] = []
        self._positions: Tensor | None = None
        self._embedding_norm: Norm | None = None

    # -- weights ------------------------------------------------------------------------------

    def load(self, weights: Weights, progress: Callable[[int, int], None]) -> None:
        """Read all weights; `progress(done, total)` is called after each layer."""
        spec = self.spec
        scheme = scheme_of(self.quantization, self._round_inputs)
        builder = ModelBuilder(
            spec,
            self.ops,
            self.weight_dtype,
            self.max_model_len,
            weights,
            scheme,
            self._compile_experts,
        )
        total = spec.num_layers + 1
        self._load_tables(builder)
        self._first_norm = builder.first_norm()
        progress(1, total)
        for index in range(spec.num_layers):
            self.layers.append(builder.layer(index))
            progress(index + 2, total)

    def _load_tables(self, builder: ModelBuilder) -> None:
        """The embedding, what is added to it, and the head."""
        spec, names = self.spec, self.spec.names
        bias = f"{names.lm_head}.bias"
        added = builder.vector(bias, spec.vocab_size) if spec.lm_head_bias else None
        self.lm_head = builder.table(
            names.embedding if spec.tie_embeddings else names.lm_head, added, spec.normalized_head
        )
        self.embedding = self.lm_head if spec.tie_embeddings else builder.table(names.embedding)
        if spec.num_positions:
            shape_of_positions = (spec.num_positions, spec.hidden_size)
            self._positions = builder.vector(f"{names.positions}.weight", *shape_of_positions)
        if names.embedding_norm:
            self._embedding_norm = builder.norm(names.embedding_norm)

    @property
    def decode_bytes(self) -> int:
        """Bytes of weights that a decode step of one sequence reads."""
        return self.lm_head.nbytes + sum(layer.nbytes for layer in self.layers)

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
        self._group_of = layout.group_of_layers()
        if self._compile:
            self._compiled = compile_decoder(
                self.spec, self.ops, self._first_norm, self.layers, self.kv_caches, self._group_of
            )

    def release_kv(self) -> None:
        """Let the caches go, until `allocate_kv` makes new ones."""
        self.kv_caches, self._compiled = [], None

    def compile_step(self, tables: StepTables) -> CompiledStep | None:
        """Whole decode steps in one call over the running batch; None: not this model."""
        spec = self.spec
        if self._compiled is None or self._embedding_norm is not None or spec.logit_soft_cap:
            return None
        ends = StepEnds(
            self.embedding,
            self.lm_head,
            self._positions,
            spec.position_offset if self._positions is not None else 0,
            spec.embedding_scale,
            spec.logit_scale,
        )
        return self._compiled.compile_step(ends, tables)

    # -- forward ------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, context: AttentionContext) -> Tensor:
        """Hidden states after the final norm.

        Args:
            token_ids: int64 [num_tokens].
            context: the step's batch.

        Returns:
            [num_rows, hidden] for `context.logits_rows` (all tokens when None).
        """
        residual = self._embed(token_ids, context)
        if self._compiled is not None:
            return self._compiled(
                residual,
                context.positions,
                context.slot_mapping,
                context.block_tables,
                context.seq_lens,
                context.query_start_loc,
                context.logits_rows,
                [(group.slot_mapping, group.block_tables) for group in context.others],
            )
        x = self._first_norm(residual)
        last = len(self.layers) - 1
        groups = context.groups
        for index, layer in enumerate(self.layers):
            # After the last layer's attention tokens don't meet: only those wanted go on.
            rows = context.logits_rows if index == last else None
            batch = groups[self._group_of[index]]
            x, residual = layer(x, residual, batch, self.kv_caches[index], rows)
        return x

    def _embed(self, token_ids: Tensor, context: AttentionContext) -> Tensor:
        """[num_tokens, hidden], a tensor of its own."""
        x, positions = self.embedding.rows(token_ids), context.positions
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
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [num_rows, vocab_size] from [num_rows, hidden]."""
        spec, logits = self.spec, self.lm_head(hidden).float()
        if spec.logit_scale != 1.0:
            logits.mul_(spec.logit_scale)
        if spec.logit_soft_cap:
            logits.div_(spec.logit_soft_cap).tanh_().mul_(spec.logit_soft_cap)
        return logits
