"""Paged attention: prompts, chunks of prompts, decode and speculative decode by one kernel."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kernels.checks import check_caches, check_vector, describe, token_stride
from kernels.triton.attention.kernel import attention_kernel, reduce_kernel
from kernels.triton.attention.tiles import MOST_SPLITS, most_splits, programs_for, tile_for
from kernels.triton.attention.walk import SPLIT_KEYS
from kernels.triton.fp8 import KINDS
from kernels.triton.launch import INTERPRETED, Target, launch, target_of

DECODE_QUERIES = 4
"""Up to so many queries a sequence on average, a batch is cut up as one of decodes."""


def check_cache_scales(
    key_cache: Tensor, key_scales: Tensor | None, value_scales: Tensor | None
) -> str:
    """What scales there are: "none", "tensor" (one a cache), "head" (a KV head) or "token"."""
    if key_scales is None or value_scales is None:
        if key_scales is not value_scales:
            raise ValueError("scales of a cache come in pairs")
        if key_cache.dtype == torch.int8:
            raise ValueError(f"an int8 cache needs float32 scales {list(key_cache.shape[:3])}")
        return "none"
    kinds = {(1,): "tensor", (key_cache.shape[1],): "head", tuple(key_cache.shape[:3]): "token"}
    for scales in (key_scales, value_scales):
        if scales.dtype != torch.float32 or not scales.is_contiguous():
            raise ValueError("scales of a cache must be contiguous and float32")
        if tuple(scales.shape) not in kinds:
            raise ValueError(f"scales {describe(scales)} don't fit a cache {describe(key_cache)}")
    if key_scales.shape != value_scales.shape:
        raise ValueError("the scales of keys and of values differ in shape")
    return kinds[tuple(key_scales.shape)]


def as_operands(
    key_cache: Tensor, value_cache: Tensor, target: Target
) -> tuple[Tensor, Tensor, int]:
    """The caches, and how the kernel reads fp8 ones, which it gets as bytes; see `to_operand`."""
    kind = KINDS.get(key_cache.dtype, 0)
    if kind == 0:
        return key_cache, value_cache, 0
    return (
        key_cache.view(torch.uint8),
        value_cache.view(torch.uint8),
        kind + 2 if target.native_fp8 else kind,
    )


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
    *,
    lse: Tensor | None = None,
    programs: int | None = None,
) -> Tensor:
    """See `KernelSet.paged_attention`; values of tables and lengths can't be checked on a GPU.

    Caches may be float8_e4m3fn or float8_e5m2, with scales float32 [1] (one for the cache), [Hk],
    [num_blocks, Hk, block_size] or none (1). `lse` float32 [T, Hq] receives the logarithm of each
    softmax's sum to base 2, for `merge_attention_states`. `programs` share the splits of a tile's
    keys; None: by the device's size. Needs no word from the device: it can be captured in a CUDA
    graph. A decoding row's result is the same to the bit whatever else is in a batch of decodes.
    """
    tokens, heads, size = q.shape
    kv_heads, page = key_cache.shape[1], key_cache.shape[2]
    scales = _check(
        q, key_cache, value_cache, block_tables, seq_lens, query_start_loc, key_scales, value_scales
    )
    for name, given in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if given is not None:
            check_vector(name, given, heads, torch.float32)
    if out is None:
        out = torch.empty((tokens, heads, size), dtype=q.dtype, device=q.device)
    elif out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out {describe(out)} must be contiguous and like q {describe(q)}")
    if lse is not None and (
        lse.shape != (tokens, heads) or lse.dtype != torch.float32 or not lse.is_contiguous()
    ):
        raise ValueError(f"lse {describe(lse)} must be contiguous float32 {[tokens, heads]}")

    target = target_of(q.device)
    group, padded = heads // kv_heads, max(16, triton.next_power_of_2(size))
    sequences = block_tables.shape[0]
    phase = "decode" if tokens <= sequences * DECODE_QUERIES else "prefill"
    tile = tile_for(target, phase, padded, group, q.element_size())
    tiles = tokens // (tile.rows // group) + sequences if tokens else 0
    programs = programs or programs_for(target, tiles, kv_heads)
    splits = most_splits(target, kv_heads)
    slots = 1
    if phase == "decode" or programs > 1:
        # A sink is added with the splits: with one slot it would be added before them.
        least = 1 if sinks is None else 2
        longest = block_tables.shape[1] * page
        slots = max(least, min(splits, triton.cdiv(longest, SPLIT_KEYS.value)))
    result, sums = out, lse
    held = tile.registers if q.element_size() == key_cache.element_size() == 2 else None
    if slots > 1:
        result = torch.empty((tokens, heads, slots, size), dtype=torch.float32, device=q.device)
        sums = torch.empty((tokens, heads, slots), dtype=torch.float32, device=q.device)
    keys, values, fp8 = as_operands(key_cache, value_cache, target)
    launch(
        attention_kernel, (tiles, kv_heads, min(programs, slots)), result, sums, q, keys, values,
        block_tables, seq_lens, query_start_loc, alibi_slopes, sinks, key_scales, value_scales,
        token_stride(q), block_tables.stride(0), sequences, scale, soft_cap, sliding_window, splits,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_SIZE=size, PADDED=padded, PAGE=page, ROWS=tile.rows,
        KEYS=tile.keys, SLOTS=slots, WINDOW=sliding_window > 0, CAPPED=soft_cap > 0,
        ALIBI=alibi_slopes is not None, SINKS=sinks is not None,
        SCALES={"tensor": 1, "head": 2}.get(scales, 0), TOKEN_SCALES=scales == "token", FP8=fp8,
        PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
        # The interpreter's product of bfloat16 is wrong.
        UPCAST=INTERPRETED and q.dtype == torch.bfloat16, WRITE_LSE=sums is not None,
        num_warps=tile.warps, num_stages=tile.stages, maxnreg=held,
    )  # fmt: skip
    if slots > 1:
        launch(
            reduce_kernel, (tokens * heads,), out, lse, result, sums, sinks, slots, HEADS=heads,
            HEAD_SIZE=size, PADDED=padded, ROUND=MOST_SPLITS, SINKS=sinks is not None,
            WRITE_LSE=lse is not None, num_warps=4,
        )  # fmt: skip
    return out


def _check(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> str:
    """Raise ValueError where shapes or dtypes don't fit; returns what kind of scales there are."""
    _, heads, size = q.shape
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"q {describe(q)} must be float32, float16 or bfloat16")
    _, kv_heads, _, _ = check_caches(key_cache, value_cache, size)
    if not 1 <= size <= 256:
        raise ValueError(f"heads of {size} aren't supported: at most 256")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads don't share {kv_heads} key/value heads")
    sequences = block_tables.shape[0]
    check_vector("seq_lens", seq_lens, sequences, torch.int32)
    check_vector("query_start_loc", query_start_loc, sequences + 1, torch.int32)
    if block_tables.dtype != torch.int32 or not block_tables.is_contiguous():
        raise ValueError("block_tables must be contiguous int32")
    return check_cache_scales(key_cache, key_scales, value_scales)
