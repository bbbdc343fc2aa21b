"""A layer's attention over the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.forward_context import AlignmentRange, AttentionMetadata, LayerCache
from engine.models.layers.norm import Transform
from kernels import KernelSet
from kernels.attention_args import AttentionArgs, BlockSparse


@dataclass(slots=True, kw_only=True)
class SelfAttention:
    """The parts of a layer's attention, which are fixed at load.

    Attributes:
        project: hidden states to concatenated queries, keys and values: [T, q + 2 kv].
        output: the output projection and what follows it: [T, q] -> [T, hidden].
        sizes: the numbers of columns of queries, keys and values.
        gated: whether each head's query is followed by a gate, whose sigmoid multiplies the head's
            output.
        cos_sin: the rotary table; None without rotation.
        q_norm, k_norm: float32 [head_dim] for an RMSNorm of each head; or None.
        keeps_keys: whether the layer has keys and values; otherwise it uses those of another layer,
            which has already written the step's.
        distance_bias: see `AttentionArgs`.
    """

    ops: KernelSet
    project: Transform
    output: Transform
    sizes: tuple[int, int, int]
    head_dim: int
    scale: float
    eps: float
    cos_sin: Tensor | None
    gated: bool = False
    neox: bool = True
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    keeps_keys: bool = True
    window: int = 0
    sparse: BlockSparse | None = None
    soft_cap: float = 0.0
    alibi_slopes: Tensor | None = None
    distance_bias: Tensor | None = None
    sinks: Tensor | None = None
    round_inputs: bool = False

    def __call__(self, x: Tensor, context: AttentionMetadata, cache: LayerCache) -> Tensor:
        """Write the step's keys and values, and return [num_tokens, hidden] for x of that shape."""
        ops, heads = self.ops, (-1, self.head_dim)
        key_cache, value_cache, key_scales, value_scales, ranks = cache
        slots = cache.local_slots(context.slot_mapping)
        if self.keeps_keys:
            q, k, v = self.project(x).split(self.sizes, dim=-1)
        else:
            q = self.project(x)
            k = v = q.new_zeros((len(q), key_cache.shape[1] * self.head_dim))
            slots = torch.full_like(slots, -1)  # nothing is written
        q, k, v = q.unflatten(-1, heads), k.unflatten(-1, heads), v.unflatten(-1, heads)
        gate = None
        if self.gated:
            both = q.unflatten(1, (-1, 2))
            q, gate = both[:, :, 0].contiguous(), both[:, :, 1]
        ops.rope_and_cache(
            q,
            k,
            v,
            context.positions,
            self.cos_sin,
            key_cache,
            value_cache,
            slots,
            q_norm_weight=self.q_norm,
            k_norm_weight=self.k_norm,
            eps=self.eps,
            neox=self.neox,
            key_scales=key_scales,
            value_scales=value_scales,
        )
        out = ops.paged_attention(
            AttentionArgs(
                q,
                key_cache,
                value_cache,
                context.block_tables,
                context.seq_lens,
                context.query_start_loc,
                self.scale,
                sliding_window=self.window,
                soft_cap=self.soft_cap,
                alibi_slopes=self.alibi_slopes,
                distance_bias=self.distance_bias,
                sinks=self.sinks,
                key_scales=key_scales,
                value_scales=value_scales,
                sparse=self.sparse,
                visible_ends=context.visible_ends,
                round_inputs=self.round_inputs,
                ranks=ranks,
            )
        )
        if gate is not None:
            return self.output(ops.sigmoid_and_mul(gate.flatten(1), out.flatten(1)))
        return self.output(out.flatten(1))


class ValueRMSNorm:
    """RMSNorm of each head without a weight, in place, in the columns from `start` on."""

    __slots__ = ("_eps", "_ones", "_ops", "_start")

    def __init__(self, ops: KernelSet, start: int, head_dim: int, eps: float) -> None:
        self._ops, self._start, self._eps = ops, start, eps
        self._ones = torch.ones(head_dim, device=ops.device)

    def __call__(self, qkv: Tensor) -> Tensor:
        """Return qkv itself."""
        values = qkv[:, self._start :]
        rows = values.reshape(-1, len(self._ones))
        qkv[:, self._start :] = self._ops.rms_norm(rows, self._ones, self._eps).view_as(values)
        return qkv


@dataclass(slots=True, kw_only=True)
class CrossAttention:
    """A layer's attention to an encoder's states, whose keys and values are in the cache.

    Attributes:
        queries: hidden states to queries, [T, q].
        output: the output projection and what follows it: [T, q] -> [T, hidden].
        alignment_heads: heads whose weights align a token with the encoder's input, if any.
    """

    ops: KernelSet
    queries: Transform
    output: Transform
    head_dim: int
    scale: float
    round_inputs: bool = False
    alignment_heads: tuple[int, ...] = ()

    def __call__(
        self, x: Tensor, context: AttentionMetadata, cache: LayerCache, rows: Tensor | None
    ) -> Tensor:
        """Return [n, hidden] for x of that shape.

        Args:
            x: hidden states of the step's tokens, or of those in `rows`.
            context: has each token as a sequence with one query, which attends to all of the
                encoder's states.
            cache: keys and values of these.
            rows: int64 [n]; None for all tokens.
        """
        tables, lengths = context.block_tables, context.seq_lens
        if rows is not None:
            tables, lengths = tables[rows], lengths[rows]
        queries = self.queries(x).unflatten(-1, (-1, self.head_dim))
        if self.alignment_heads:
            for tokens in context.alignments:
                self._record_weights(tokens, queries, context, cache)
        out = self.ops.paged_attention(
            AttentionArgs(
                queries,
                cache.keys,
                cache.values,
                tables,
                lengths,
                context.query_start_loc[: len(x) + 1],
                self.scale,
                key_scales=cache.key_scales,
                value_scales=cache.value_scales,
                round_inputs=self.round_inputs,
            )
        )
        return self.output(out.flatten(1))

    def _record_weights(
        self,
        tokens: AlignmentRange,
        queries: Tensor,
        context: AttentionMetadata,
        cache: LayerCache,
    ) -> None:
        """Append the alignment heads' weights of the tokens, which belong to one sequence."""
        heads = list(self.alignment_heads)
        blocks = context.block_tables[tokens.start].long()
        keys = cache.keys[blocks][:, heads].float()
        if cache.key_scales is not None:
            scales = cache.key_scales
            keys = keys * (scales[blocks][:, heads, :, None] if scales.dim() > 1 else scales)
        keys = keys.transpose(0, 1).flatten(1, 2)[:, : int(context.seq_lens[tokens.start])]
        rows = queries[tokens.start : tokens.end, heads].float().transpose(0, 1)
        weights = torch.softmax(rows @ keys.transpose(1, 2) * self.scale, dim=-1)
        tokens.weights.append(weights[..., : tokens.num_states])


@dataclass(frozen=True, slots=True)
class ClampQKV:
    """Clamps values to +- limit in place."""

    limit: float

    def __call__(self, qkv: Tensor) -> Tensor:
        """Return qkv itself."""
        return qkv.clamp_(-self.limit, self.limit)


@dataclass(frozen=True, slots=True)
class QKRMSNorm:
    """RMSNorm over all of a token's queries, and over all of its keys.

    Attributes:
        q_weight, k_weight: float32 [q_size] and [k_size], the sizes of a token's queries and keys.
        local_columns: int64, the columns that are returned; None for all.
    """

    ops: KernelSet
    q_weight: Tensor
    k_weight: Tensor
    eps: float
    local_columns: Tensor | None = None

    def __call__(self, qkv: Tensor) -> Tensor:
        """Return concatenated queries, keys and values."""
        q_size, k_size = len(self.q_weight), len(self.k_weight)
        q, k, v = qkv.split((q_size, k_size, qkv.shape[-1] - q_size - k_size), dim=-1)
        q = self.ops.rms_norm(q.contiguous(), self.q_weight, self.eps)
        k = self.ops.rms_norm(k.contiguous(), self.k_weight, self.eps)
        qkv = torch.cat((q, k, v), dim=-1)
        return qkv if self.local_columns is None else qkv[:, self.local_columns]


@dataclass(slots=True)
class PerHeadLayerNorm:
    """LayerNorm of each head, in place, in some columns of concatenated queries, keys and values.

    Attributes:
        start, heads, head_dim: the first column, and the number and size of heads from there.
        weight: float32 [heads or 1, head_dim].
        bias: float32 [head_dim] or None.
    """

    start: int
    heads: int
    head_dim: int
    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, qkv: Tensor) -> Tensor:
        """Return qkv itself."""
        part = qkv[:, self.start : self.start + self.heads * self.head_dim]
        part = part.unflatten(-1, (self.heads, self.head_dim))
        normed = torch.nn.functional.layer_norm(part, (self.head_dim,), eps=self.eps) * self.weight
        part.copy_(normed if self.bias is None else normed + self.bias)
        return qkv
