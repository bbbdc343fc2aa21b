"""Metadata of a step's batch for attention and adapters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from engine.contract.errors import ConfigError
from engine.models.lora import NO_ADAPTERS, StepAdapters
from kernels import KernelSet
from kernels.lora import LoraMapping


class LayerCache(NamedTuple):
    """A layer's part of the KV pool; layers of different groups may share it.

    Attributes:
        keys, values: [num_blocks, num_kv_heads, block_size, head_dim]; latents are both at once.
        key_scales, value_scales: float32 [num_blocks, num_kv_heads, block_size] of int8 caches,
            where each token's head is rounded with a scale of its own; of fp8 caches float32 [1] or
            [num_kv_heads], the layer's own, or None for 1; else None.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


@dataclass(frozen=True, slots=True)
class KVScales:
    """One layer's scales of fp8 caches, float32 [1] or [num_kv_heads] each."""

    keys: Tensor
    values: Tensor

    def select_heads(self, heads: slice) -> KVScales:
        """Those of some KV heads."""
        return KVScales(
            *(part if len(part) == 1 else part[heads] for part in (self.keys, self.values))
        )

    def attach_to(self, cache: LayerCache) -> LayerCache:
        """The cache with these scales."""
        device, heads = cache.keys.device, cache.keys.shape[1]
        keys, values = self.keys.to(device), self.values.to(device)
        if len(keys) != len(values) or device.type == "cpu":
            keys, values = keys.expand(heads).contiguous(), values.expand(heads).contiguous()
        return cache._replace(key_scales=keys, value_scales=values)


def allocate_kv_cache(
    ops: KernelSet, shape: tuple[int, int, int, int], dtype: torch.dtype, *, latents: bool = False
) -> LayerCache:
    """An empty cache; its pages are mapped when they are first written. `latents`: keys are values.

    Raises `ConfigError` where the system hasn't got so much memory.
    """

    def pair(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        keys = ops.new_kv_cache(shape, dtype)
        return keys, keys if latents else ops.new_kv_cache(shape, dtype)

    try:
        both = pair(*shape, dtype=dtype)
        if dtype != torch.int8:
            return LayerCache(*both)
        return LayerCache(*both, *pair(*shape[:3], dtype=torch.float32))
    except MemoryError as error:
        raise ConfigError(
            f"No room for a KV cache of {shape[0]} blocks of {shape[2]} tokens: {error}.",
            param="num_gpu_blocks_override",
        ) from error


@dataclass(frozen=True, slots=True)
class StateStep:
    """Blocks of states of a step, on the host.

    Attributes:
        blocks: int64 [num_seqs], each sequence's block.
        copies: (source, target) of blocks that are copied, in this order, before anything else.
        saves: int64 [n, 2] of (end, block), `end` ascending: the state after the step's token
            end - 1 goes to this block too.
    """

    blocks: Tensor
    copies: list[tuple[int, int]]
    saves: Tensor


@dataclass(slots=True)
class AlignmentRange:
    """Tokens [start, end) of a step whose attention to the first encoder states is recorded.

    Attributes:
        weights: by layer with alignment heads, float32 [heads, end - start, num_states].
    """

    start: int
    end: int
    num_states: int
    weights: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class AttentionMetadata:
    """The batch of one step, flattened over its tokens, for the layers of one KV cache group.

    Attributes:
        positions: int64 [num_tokens]; rows of the rotary tables.
        plane_positions: int64 [n, 3]: the positions of tokens that have three (M-RoPE), whose
            `positions` are max_model_len and the numbers after it; None: no token has.
        slot_mapping: int64 [num_tokens], where each token's KV goes: block * block_size + offset.
        block_tables: int32 [num_seqs, max_blocks].
        seq_lens: int32 [num_seqs], KV tokens of each sequence, this step's included.
        query_start_loc: int32 [num_seqs + 1], where each sequence's tokens begin.
        logits_rows: int64 [num_rows], the tokens whose logits are wanted, or None for all.
        sequence_rows: int64 [num_seqs], which row of the running batch each sequence has while it
            runs: for models of the bridge that carry a state.
        states: for models that keep states in blocks.
        embeds: (tokens of the step, int64 [n]; float32 [n, hidden] in the place of their rows of
            the embedding table), or None. Only a model with `takes_embeds` gets any.
        encoder_embeds: the same for an encoder's vectors, which no family scales, or None. They are
            [n, hidden * (1 + k)] where further parts are added to the first k layers' results.
        embeddings: [num_tokens, hidden], for layers that take them beside the hidden state.
        layer_inputs: [num_tokens, num_layers, n], for layers that have an embedding of their own.
        num_decodes: so many of the first sequences have one token each, and none after them has;
            0 where nobody put them first.
        prefill_start_loc: int32 [num_seqs - num_decodes + 1], where the other sequences' tokens
            begin among theirs; None where there are no decodes, or nothing else.
        other_groups: the same for groups 1, 2, ... of a model whose layers attend in different
        ways; they
            differ in slot_mapping and block_tables.
        visible_ends: see `AttentionArgs`.
        adapters: which of the tokens go through adapters.
        alignments: tokens whose attention to an encoder's states is recorded; such a step has no
            `logits_rows`.
        lora_rows: the same for a model whose adapters have slots, on its device.
        host: of a batch on a device, the same where the host can look at it; None: it can.
    """

    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    logits_rows: Tensor | None = None
    sequence_rows: Tensor | None = None
    states: StateStep | None = None
    num_decodes: int = 0
    prefill_start_loc: Tensor | None = None
    other_groups: tuple[AttentionMetadata, ...] = ()
    embeds: tuple[Tensor, Tensor] | None = None
    encoder_embeds: tuple[Tensor, Tensor] | None = None
    embeddings: Tensor | None = None
    layer_inputs: Tensor | None = None
    plane_positions: Tensor | None = None
    visible_ends: Tensor | None = None
    adapters: StepAdapters = NO_ADAPTERS
    alignments: tuple[AlignmentRange, ...] = ()
    lora_rows: LoraMapping | None = None
    host: AttentionMetadata | None = None

    @property
    def groups(self) -> tuple[AttentionMetadata, ...]:
        """The contexts of all KV cache groups."""
        return (self, *self.other_groups)
