"""FLASHINFER: its wrapper for paged prefill (Ye et al. 2025), if installed."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from kernels.attention_args import AttentionArgs

WORKSPACE_BYTES = 128 << 20


@functools.cache
def _wrapper(device: torch.device) -> Any:
    """Return the device's workspace and planner."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    space = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return BatchPrefillWithPagedKVCacheWrapper(space, kv_layout="HND")


def paged_attention(args: AttentionArgs) -> Tensor:
    """See `KernelSet.paged_attention`; without ALiBi, sinks and quantized caches.

    Each call is planned separately, which waits for the lengths.
    """
    args.check_causal("FLASHINFER")
    if not (args.alibi_slopes is args.sinks is args.key_scales is args.value_scales is None):
        raise ValueError("FLASHINFER does neither ALiBi, sinks nor quantized caches")
    q, tables, window = args.q, args.block_tables, args.sliding_window
    _, kv_heads, page, _ = args.key_cache.shape
    lengths = args.seq_lens.cpu()
    blocks = (lengths + page - 1) // page
    starts = torch.cat((torch.zeros(1, dtype=torch.int32), blocks.cumsum(0).int()))
    ids = [table[:n] for table, n in zip(tables, blocks.tolist(), strict=True)]
    wrapper = _wrapper(q.device)
    wrapper.plan(
        args.query_start_loc.cpu(),
        starts,
        torch.cat(ids) if ids else tables.new_empty(0),
        ((lengths - 1) % page + 1).int(),
        q.shape[1],
        kv_heads,
        q.shape[2],
        page,
        causal=True,
        sm_scale=args.scale,
        window_left=window - 1 if window > 0 else -1,
        logits_soft_cap=args.soft_cap or None,
        q_data_type=q.dtype,
        kv_data_type=args.key_cache.dtype,
    )
    result = wrapper.run(q, (args.key_cache, args.value_cache))
    return result if args.out is None else args.out.copy_(result)
