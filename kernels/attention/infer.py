"""FLASHINFER: its wrapper for prompts over pages (Ye et al. 2025), where it is installed."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

WORKSPACE_BYTES = 128 << 20


@functools.cache
def _wrapper(device: torch.device) -> Any:
    """One workspace and planner a device."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    space = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return BatchPrefillWithPagedKVCacheWrapper(space, kv_layout="HND")


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """See `KernelSet.paged_attention`; without ALiBi, sinks and quantised caches.

    Plans each call anew, which waits for the lengths.
    """
    if not (alibi_slopes is sinks is key_scales is value_scales is None):
        raise ValueError("FLASHINFER does neither ALiBi, sinks nor quantised caches")
    page = key_cache.shape[2]
    lengths = seq_lens.cpu()
    blocks = (lengths + page - 1) // page
    starts = torch.cat((torch.zeros(1, dtype=torch.int32), blocks.cumsum(0).int()))
    ids = [table[:n] for table, n in zip(block_tables, blocks.tolist(), strict=True)]
    wrapper = _wrapper(q.device)
    wrapper.plan(
        query_start_loc.cpu(),
        starts,
        torch.cat(ids) if ids else block_tables.new_empty(0),
        ((lengths - 1) % page + 1).int(),
        q.shape[1],
        key_cache.shape[1],
        q.shape[2],
        page,
        causal=True,
        sm_scale=scale,
        window_left=sliding_window - 1 if sliding_window > 0 else -1,
        logits_soft_cap=soft_cap or None,
        q_data_type=q.dtype,
        kv_data_type=key_cache.dtype,
    )
    result = wrapper.run(q, (key_cache, value_cache))
    return result if out is None else out.copy_(result)
