"""A layer's multi-head latent attention over the paged cache.

DeepSeek-AI 2024, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language
Model", 2.1. A head's keys and values are projections of a token's latent, which are never computed:
the keys' projection is absorbed into the query, the values' into the output, so that all heads
attend to the latents directly. Prefills do the same, so that a token's results are bitwise equal in
prefills and decodes.

With an index (DeepSeek-V3.2, arXiv 2512.02556) the cache also has an index key per token, between
the rotated key and the latent. A query with more than `top_k` visible tokens attends to the best of
them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.models.decoder_spec import MlaSpec, SparseIndexSpec
from engine.models.forward_context import AttentionMetadata, LayerCache
from engine.models.layers.norm import Transform
from engine.models.layers.weights import LatentWeights, SparseIndexWeights
from kernels import KernelSet
from kernels.interface import MlaArgs


@dataclass(slots=True, kw_only=True)
class MlaAttention:
    """The parts of a layer's attention, which are fixed at load.

    Attributes:
        output: the output projection and what follows it: [T, heads * value_size] -> [T, hidden].
        heads: the number of query heads.
        scale: the factor of products of queries and keys.
        neox: whether rotation pairs elements of both halves; otherwise adjacent elements.
        index: selects the tokens that are attended to; None for all.
    """

    ops: KernelSet
    weights: LatentWeights
    output: Transform
    heads: int
    scale: float
    neox: bool
    round_inputs: bool = False
    index: SparseIndex | None = None

    def __call__(self, x: Tensor, context: AttentionMetadata, cache: LayerCache) -> Tensor:
        """Write the step's latents, and return [num_tokens, hidden] for x of that shape."""
        weights, sizes, index = self.weights, self.weights.latents, self.index
        projected, kv_latents = self._project(x, context.positions)
        projected = self._normed_queries(projected)
        queries = self._queries(projected)
        shape = (len(x), self.heads, sizes.width)
        # Queries are 0 in the columns of index keys.
        q = queries.new_empty(shape) if index is None else queries.new_zeros(shape)
        q[..., : sizes.qk_rope_head_dim] = queries[..., sizes.qk_nope_head_dim :]
        weights.into(queries[..., : sizes.qk_nope_head_dim], q[..., -sizes.kv_lora_rank :])
        self._keep(q, kv_latents, context.positions, context.slot_mapping, cache)
        args = MlaArgs(
            q=q,
            cache=cache.keys,
            latent=sizes.kv_lora_rank,
            block_tables=context.block_tables,
            seq_lens=context.seq_lens,
            query_start_loc=context.query_start_loc,
            scale=self.scale,
            scales=cache.key_scales,
            round_inputs=self.round_inputs,
            ranks=cache.ranks,
        )
        attended = self.ops.mla_attention(args)
        if index is not None and int(context.seq_lens.max()) > index.spec.top_k:
            index.attend(args, attended, x, projected, context.positions)
        out = attended.new_empty((len(x), self.heads, sizes.value_size))
        weights.out_of(attended, out)
        return self.output(out.flatten(1))

    def write(self, x: Tensor, positions: Tensor, slots: Tensor, cache: LayerCache) -> None:
        """Write only the latents of x [n, hidden]; positions and slots are int64 [n]."""
        _, kv_latents = self._project(x, positions)
        no_queries = kv_latents.new_empty((len(x), 0, self.weights.latents.width))
        self._keep(no_queries, kv_latents, positions, slots, cache)

    def _keep(
        self, q: Tensor, kv_latents: Tensor, positions: Tensor, slots: Tensor, cache: LayerCache
    ) -> None:
        """Rotate q and kv_latents, and write the latter to the cache."""
        self.ops.rope_and_cache_mla(
            q,
            kv_latents,
            positions,
            self.weights.cos_sin,
            cache.keys,
            cache.local_slots(slots),
            self.neox,
            cache.key_scales,
        )

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries or their latent, and what is cached per token, before rotation: [T, 1,
        width].
        """
        weights, sizes = self.weights, self.weights.latents
        projected = weights.inputs(x)
        first = projected.shape[1] - sizes.latent_rows
        queries, latent, k_rope = projected.split(
            (first, sizes.kv_lora_rank, sizes.qk_rope_head_dim), dim=-1
        )
        normed = self.ops.rms_norm(latent.contiguous(), weights.latent_norm, sizes.norm_eps)
        index_keys = [] if self.index is None else [self.index.keys(x, positions)]
        return queries, torch.cat((k_rope, *index_keys, normed), dim=-1).unsqueeze(1)

    def _normed_queries(self, projected: Tensor) -> Tensor:
        """Return the queries' latent after its norm, or unchanged queries without a latent."""
        weights, eps = self.weights, self.weights.latents.norm_eps
        if weights.query_norm is None:
            return projected
        return self.ops.rms_norm(projected.contiguous(), weights.query_norm, eps)

    def _queries(self, projected: Tensor) -> Tensor:
        """Return queries [T, heads, query_size], whose last elements will be rotated."""
        weights = self.weights
        queries = projected if weights.queries is None else weights.queries(projected)
        return queries.unflatten(-1, (self.heads, -1))


#: Number of queries whose latents are gathered at once: 92 MB for V3.2's 2048 of 704 values each.
_QUERIES_AT_ONCE = 16
#: Epsilon of the index keys' LayerNorm, independent of the model's other norms.
_INDEX_NORM_EPS = 1e-6


@dataclass(slots=True, kw_only=True)
class SparseIndex:
    """Selects the tokens that a query attends to.

    Attributes:
        latents: the sizes of a token's part of the cache.
        cos_sin: the rotary table. Index queries and keys are always rotated as halves.
    """

    ops: KernelSet
    spec: SparseIndexSpec
    latents: MlaSpec
    weights: SparseIndexWeights
    cos_sin: Tensor | None

    def keys(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return index keys [T, head_dim] for x [T, hidden]."""
        weights = self.weights
        keys = torch.nn.functional.layer_norm(
            weights.keys(x), (self.spec.head_dim,), weights.key_norm, weights.key_norm_bias,
            _INDEX_NORM_EPS,
        )  # fmt: skip
        return self._rotated(keys.unsqueeze(1), positions)[:, 0]

    def attend(
        self, args: MlaArgs, attended: Tensor, x: Tensor, latent: Tensor, positions: Tensor
    ) -> None:
        """Overwrite `attended` [T, Hq, latent], attention to all tokens, with attention to the
        chosen tokens for queries with more than `top_k` visible tokens.

        Args:
            args: the arguments of attention to all tokens, which are in the cache.
            x: [T, hidden].
            latent: the queries' latents after their norm, [T, query_rank].
        """
        spec, weights = self.spec, self.weights
        queries = weights.queries(latent).unflatten(-1, (spec.num_heads, spec.head_dim))
        queries = self._rotated(queries, positions)
        factors = weights.weights(x) * spec.num_heads**-0.5
        starts = args.query_start_loc.tolist()
        for sequence, length in enumerate(args.seq_lens.tolist()):
            start, end = starts[sequence : sequence + 2]
            if length <= spec.top_k or start == end:
                continue
            sequence_slots = self._slots(args, sequence, length)
            visible = torch.arange(length - (end - start), length) + 1
            sparse = visible > spec.top_k
            chosen = self.ops.select_tokens(
                queries[start:end][sparse],
                factors[start:end][sparse],
                self._cached(args, sequence_slots)[:, self._columns],
                visible[sparse],
                spec.top_k,
            )
            rows = torch.arange(start, end)[sparse]
            for part in zip(rows.split(_QUERIES_AT_ONCE), chosen.split(_QUERIES_AT_ONCE)):
                self._attend_to(args, attended, part[0], sequence_slots[part[1]])

    @property
    def _columns(self) -> slice:
        """The index key's columns of the cache."""
        first = self.latents.qk_rope_head_dim
        return slice(first, first + self.spec.head_dim)

    def _attend_to(self, args: MlaArgs, attended: Tensor, rows: Tensor, slots: Tensor) -> None:
        """Compute attention of queries `rows`, each to the tokens in its `slots` [n, top_k], as
        sequences of one token over a small cache.
        """
        count, block_size = len(rows), args.cache.shape[2]
        blocks = -(-self.spec.top_k // block_size)
        shape = (count, blocks * block_size)
        padded = torch.nn.functional.pad(slots, (0, shape[1] - slots.shape[1]))
        by_block = (count * blocks, 1, block_size)
        scales = args.scales
        if args.cache.dtype == torch.int8 and scales is not None:
            scales = scales.view(-1)[padded].view(by_block)
        attended[rows] = self.ops.mla_attention(
            replace(
                args,
                q=args.q[rows],
                cache=self._cached_rows(args.cache)[padded].view(*by_block, -1),
                block_tables=torch.arange(count * blocks, dtype=torch.int32).view(count, blocks),
                seq_lens=torch.full((count,), self.spec.top_k, dtype=torch.int32),
                query_start_loc=torch.arange(count + 1, dtype=torch.int32),
                scales=scales,
            )
        )

    @staticmethod
    def _cached_rows(cache: Tensor) -> Tensor:
        """Return a cache of one head as [slots, width]."""
        return cache.view(-1, cache.shape[-1])

    def _slots(self, args: MlaArgs, sequence: int, length: int) -> Tensor:
        """Return the slots of a sequence's tokens, int64 [length]."""
        size, positions = args.cache.shape[2], torch.arange(length)
        return args.block_tables[sequence].long()[positions // size] * size + positions % size

    def _cached(self, args: MlaArgs, slots: Tensor) -> Tensor:
        """Return what is cached in slots, float32 [n, width]."""
        rows = self._cached_rows(args.cache)[slots].float()
        if args.scales is None:
            return rows
        by_token = args.scales.numel() > 1
        return rows * (args.scales.view(-1)[slots].unsqueeze(1) if by_token else args.scales)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return x [T, heads, head_dim] with its first elements rotated as halves."""
        if self.cos_sin is None:
            return x
        half = self.latents.qk_rope_head_dim // 2
        cos, sin = self.cos_sin[positions].unsqueeze(1).split(half, dim=-1)
        first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
