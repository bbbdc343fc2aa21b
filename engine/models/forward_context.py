"""Metadata of a step's batch for attention and adapters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from engine.contract.errors import ConfigError
from engine.models.lora import NO_ADAPTERS, StepAdapters
from kernels import KernelSet
from kernels.interface import RankGroup
from kernels.lora import LoraMapping


class LayerCache(NamedTuple):
    """A layer's part of the KV pool; layers of different groups may share it.

    Attributes:
        keys, values: [num_blocks, num_kv_heads, block_size, head_dim]; the same tensor for latents.
        key_scales, value_scales: for int8 caches float32 [num_blocks, num_kv_heads, block_size],
            a scale for each token's head; for fp8 caches float32 [1] or [num_kv_heads], the
            layer's scales, or None for 1; otherwise None.
        ranks: the ranks that have `block_size` of a block's tokens each; None if all are here.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    ranks: RankGroup | None = None

    def local_slots(self, slots: Tensor) -> Tensor:
        """Return where this cache has the tokens of slots int64 [n]: -1 for another rank's."""
        if self.ranks is None:
            return slots
        size = self.keys.shape[2]
        block_size = size * self.ranks.size
        block, offset = slots // block_size, slots % block_size
        is_local = (slots >= 0) & (offset // size == self.ranks.rank)
        return torch.where(is_local, block * size + offset % size, -1)


@dataclass(frozen=True, slots=True)
class KVScales:
    """One layer's scales of fp8 caches, float32 [1] or [num_kv_heads] each."""

    keys: Tensor
    values: Tensor

    def select_heads(self, heads: slice) -> KVScales:
        """Return the scales of some KV heads."""
        return KVScales(
            *(part if len(part) == 1 else part[heads] for part in (self.keys, self.values))
        )

    def attach_to(self, cache: LayerCache) -> LayerCache:
        """Return the cache with these scales."""
        device, heads = cache.keys.device, cache.keys.shape[1]
        keys, values = self.keys.to(device), self.values.to(device)
        if len(keys) != len(values) or device.type == "cpu":
            keys, values = keys.expand(heads).contiguous(), values.expand(heads).contiguous()
        return cache._replace(key_scales=keys, value_scales=values)


def allocate_kv_cache(
    ops: KernelSet, shape: tuple[int, int, int, int], dtype: torch.dtype, *, latents: bool = False
) -> LayerCache:
    """Allocate an empty cache, whose pages are mapped when they are first written. With `latents`,
    keys and values are the same tensor.

    Raises `ConfigError` if the system lacks memory.
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
    """A step's blocks of states, on the host.

    Attributes:
        blocks: int64 [num_seqs], each sequence's block.
        copies: (source, target) of blocks that are copied first, in this order.
        saves: int64 [n, 2] of (end, block), `end` ascending: the state after the step's token
            end - 1 is also written to this block.
    """

    blocks: Tensor
    copies: list[tuple[int, int]]
    saves: Tensor


@dataclass(slots=True)
class AlignmentRange:
    """Tokens [start, end) of a step whose attention to the first `num_states` encoder states is
    recorded.

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
        positions: int64 [num_tokens], rows of the rotary tables.
        plane_positions: int64 [n, 3], positions of tokens with three of them (M-RoPE), whose
            `positions` count up from max_model_len; None if no token has three.
        slot_mapping: int64 [num_tokens], block * block_size + offset of each token's KV.
        block_tables: int32 [num_seqs, max_blocks].
        seq_lens: int32 [num_seqs], KV tokens of each sequence, including this step's.
        query_start_loc: int32 [num_seqs + 1], where each sequence's tokens begin.
        logits_rows: int64 [num_rows], the tokens whose logits are needed; None for all.
        sequence_rows: int64 [num_seqs], each sequence's row in the running batch, for models of
            the bridge with states.
        states: for models with states in blocks.
        state_rows: int64 [num_seqs], the sequences' blocks of states on the device, for recorded
            steps.
        embeds: (tokens of the step, int64 [n]; float32 [n, hidden] instead of their rows of the
            embedding table), or None. Only for models with `takes_embeds`.
        encoder_embeds: the same for an encoder's vectors, which aren't scaled like embeddings; or
            None. They are [n, hidden * (1 + k)] if further parts are added to the results of the
            first k layers.
        embeddings: [num_tokens, hidden], for layers with embeddings as an additional input.
        layer_inputs: [num_tokens, num_layers, n], for layers with their own embeddings.
        num_decodes: the number of decodes, if they precede prefills in a batch with both; else 0.
        prefill_start_loc: int32 [num_seqs - num_decodes + 1], where the prefills' tokens begin,
            counted from the first; None if `num_decodes` is 0.
        other_groups: the same for the KV cache groups 1, 2, ...; they differ in slot_mapping and
            block_tables.
        visible_ends: see `AttentionArgs`.
        adapters: the tokens' adapters.
        alignments: tokens whose attention to an encoder's states is recorded; such a step has no
            `logits_rows`.
        lora_rows: the tokens' adapters if these have slots, on the model's device.
        host: the same on the host for a batch on a device; None if this one is on the host.
    """

    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    logits_rows: Tensor | None = None
    sequence_rows: Tensor | None = None
    states: StateStep | None = None
    state_rows: Tensor | None = None
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
    def has_media(self) -> bool:
        """Whether tokens have more than an id and a position."""
        parts = (self.embeds, self.encoder_embeds, self.plane_positions, self.visible_ends)
        return any(part is not None for part in parts)

    @property
    def groups(self) -> tuple[AttentionMetadata, ...]:
        """The contexts of all KV cache groups."""
        return (self, *self.other_groups)
