"""Attention of one layer over paged latents (multi-head latent attention).

DeepSeek-AI 2024, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language
Model", 2.1. A head's keys and values are products of a token's latent, and are never made: the
first is taken into the query, the second behind the result, so that all heads meet the latents
themselves. Prompts go the same way, so that a token's bits are the same in both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.forward_context import AttentionMetadata, LayerCache
from engine.models.layers.linear import LatentWeights
from engine.models.layers.norm import Transform
from kernels import KernelSet
from kernels.interface import MlaArgs


@dataclass(slots=True, kw_only=True)
class MlaAttention:
    """What one layer's attention is made of, fixed at load.

    Attributes:
        output: what follows attention: [T, heads * value_size] -> [T, hidden].
        heads: of queries.
        scale: of the products of queries and keys.
        neox: rotate halves; otherwise neighbours.
    """

    ops: KernelSet
    weights: LatentWeights
    output: Transform
    heads: int
    scale: float
    neox: bool
    round_inputs: bool = False

    def __call__(self, x: Tensor, context: AttentionMetadata, cache: LayerCache) -> Tensor:
        """[num_tokens, hidden] of the same. First writes the step's latents."""
        weights, sizes = self.weights, self.weights.latents
        projected, kv_latents = self._project(x)
        queries = self._queries(projected)
        q = queries.new_empty((len(x), self.heads, sizes.width))
        q[..., : sizes.qk_rope_head_dim] = queries[..., sizes.qk_nope_head_dim :]
        weights.into(queries[..., : sizes.qk_nope_head_dim], q[..., sizes.qk_rope_head_dim :])
        self._keep(q, kv_latents, context.positions, context.slot_mapping, cache)
        attended = self.ops.mla_attention(
            MlaArgs(
                q=q,
                cache=cache.keys,
                latent=sizes.kv_lora_rank,
                block_tables=context.block_tables,
                seq_lens=context.seq_lens,
                query_start_loc=context.query_start_loc,
                scale=self.scale,
                scales=cache.key_scales,
                round_inputs=self.round_inputs,
            )
        )
        out = attended.new_empty((len(x), self.heads, sizes.value_size))
        weights.out_of(attended, out)
        return self.output(out.flatten(1))

    def write(self, x: Tensor, positions: Tensor, slots: Tensor, cache: LayerCache) -> None:
        """The latents alone, of x [n, hidden]; positions and slots int64 [n]."""
        _, kv_latents = self._project(x)
        no_queries = kv_latents.new_empty((len(x), 0, self.weights.latents.width))
        self._keep(no_queries, kv_latents, positions, slots, cache)

    def _keep(
        self, q: Tensor, kv_latents: Tensor, positions: Tensor, slots: Tensor, cache: LayerCache
    ) -> None:
        """Rotate both and write what is kept."""
        self.ops.rope_and_cache_mla(
            q,
            kv_latents,
            positions,
            self.weights.cos_sin,
            cache.keys,
            slots,
            self.neox,
            cache.key_scales,
        )

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries or their latent, and what is kept of each token, to be rotated: [T, 1, width]."""
        weights, sizes = self.weights, self.weights.latents
        projected = weights.inputs(x)
        first = projected.shape[1] - sizes.width
        queries, latent, k_rope = projected.split(
            (first, sizes.kv_lora_rank, sizes.qk_rope_head_dim), dim=-1
        )
        normed = self.ops.rms_norm(latent.contiguous(), weights.latent_norm, sizes.norm_eps)
        return queries, torch.cat((k_rope, normed), dim=-1).unsqueeze(1)

    def _queries(self, projected: Tensor) -> Tensor:
        """[T, heads, query_size], what is rotated last."""
        weights, eps = self.weights, self.weights.latents.norm_eps
        if weights.queries is not None and weights.query_norm is not None:
            normed = self.ops.rms_norm(projected.contiguous(), weights.query_norm, eps)
            projected = weights.queries(normed)
        return projected.unflatten(-1, (self.heads, -1))
