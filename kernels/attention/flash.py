"""FLASH_ATTN: FlashAttention 3's paged kernels (Shah et al. 2024), if installed."""

from __future__ import annotations

from torch import Tensor

from kernels.attention_args import AttentionArgs


def paged_attention(args: AttentionArgs) -> Tensor:
    """See `KernelSet.paged_attention`; without ALiBi, sinks and quantized caches."""
    args.check_causal("FLASH_ATTN")
    from flash_attn_interface import flash_attn_with_kvcache

    if not (args.alibi_slopes is args.sinks is args.key_scales is args.value_scales is None):
        raise ValueError("FLASH_ATTN does neither ALiBi, sinks nor quantized caches")
    window = args.sliding_window
    # Its pages are [page, heads, size]: ours with the first two dimensions transposed.
    result = flash_attn_with_kvcache(
        q=args.q,
        k_cache=args.key_cache.transpose(1, 2),
        v_cache=args.value_cache.transpose(1, 2),
        cache_seqlens=args.seq_lens,
        page_table=args.block_tables,
        cu_seqlens_q=args.query_start_loc,
        max_seqlen_q=len(args.q),
        softmax_scale=args.scale,
        causal=True,
        window_size=(window - 1, 0) if window > 0 else (-1, -1),
        softcap=args.soft_cap,
    )
    return result if args.out is None else args.out.copy_(result)
