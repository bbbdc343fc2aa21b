"""ROCM_AITER_UNIFIED_ATTN: AITER's paged Triton kernel, if installed."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention_args import AttentionArgs


def paged_attention(args: AttentionArgs) -> Tensor:
    """See `KernelSet.paged_attention`; without ALiBi and quantized caches."""
    args.check_causal("ROCM_AITER_UNIFIED_ATTN")
    from aiter.ops.triton.unified_attention import unified_attention

    if not (args.alibi_slopes is args.key_scales is args.value_scales is None):
        raise ValueError("ROCM_AITER_UNIFIED_ATTN does neither ALiBi nor quantized caches")
    window = args.sliding_window
    out = torch.empty_like(args.q) if args.out is None else args.out
    # Its pages are [page, token, head, size]: ours with the middle two dimensions transposed.
    unified_attention(
        q=args.q,
        k=args.key_cache.transpose(1, 2),
        v=args.value_cache.transpose(1, 2),
        out=out,
        cu_seqlens_q=args.query_start_loc,
        max_seqlen_q=len(args.q),
        seqused_k=args.seq_lens,
        max_seqlen_k=args.block_tables.shape[1] * args.key_cache.shape[2],
        softmax_scale=args.scale,
        causal=True,
        window_size=(window - 1, 0) if window > 0 else (-1, -1),
        block_table=args.block_tables,
        softcap=args.soft_cap,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        sinks=args.sinks,
    )
    return out
