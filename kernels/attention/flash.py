"""FLASH_ATTN: FlashAttention 3's kernels over pages (Shah et al. 2024), where it is installed."""

from __future__ import annotations

from torch import Tensor


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
    """See `KernelSet.paged_attention`; without ALiBi, sinks and quantised caches."""
    from flash_attn_interface import flash_attn_with_kvcache

    if not (alibi_slopes is sinks is key_scales is value_scales is None):
        raise ValueError("FLASH_ATTN does neither ALiBi, sinks nor quantised caches")
    # Its pages are [page, heads, size]: ours are that with the first two swapped, by their strides.
    result = flash_attn_with_kvcache(
        q=q,
        k_cache=key_cache.transpose(1, 2),
        v_cache=value_cache.transpose(1, 2),
        cache_seqlens=seq_lens,
        page_table=block_tables,
        cu_seqlens_q=query_start_loc,
        max_seqlen_q=len(q),
        softmax_scale=scale,
        causal=True,
        window_size=(sliding_window - 1, 0) if sliding_window > 0 else (-1, -1),
        softcap=soft_cap,
    )
    return result if out is None else out.copy_(result)
