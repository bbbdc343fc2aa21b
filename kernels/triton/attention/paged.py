"""Paged attention: prompts, chunks of prompts, decode and speculative decode by one kernel."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from kernels.attention_args import AttentionArgs
from kernels.tensors import check_caches, check_vector, describe, token_stride
from kernels.triton.attention.kernels import (
    attention_kernel,
    reduce_kernel,
    split_attention_kernel,
)
from kernels.triton.attention.tile import SPLIT_KEYS
from kernels.triton.attention.tile_sizes import (
    MAX_SPLITS,
    max_splits,
    programs_for,
    prompt_splits,
    tile_for,
)
from kernels.triton.fp8 import KINDS
from kernels.triton.launch import INTERPRETED, Target, launch, target_of

DECODE_QUERIES = 16
"""Maximum average number of queries per sequence for which a batch uses the decode tiles. A tile
then holds all queries of a sequence if DECODE_ROWS suffice, so that keys are read once.
"""
DECODE_ROWS = 64


def check_cache_scales(
    key_cache: Tensor, key_scales: Tensor | None, value_scales: Tensor | None
) -> str:
    """Return the kind of scales: "none", "tensor" (one per cache), "head" (one per KV head) or
    "token".
    """
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
    key_cache: Tensor, value_cache: Tensor, target: Target, phase: str
) -> tuple[Tensor, Tensor, int]:
    """Return the caches as kernels read them, and their FP8 code; see `to_operand`.

    fp8 is read as bytes; decodes read all eight-bit caches as pairs of bytes. (Prompts don't: their
    products read shared memory, so values are written there again in any case.)
    """
    kind = KINDS.get(key_cache.dtype, 0)
    size = key_cache.shape[3]
    paired = phase == "decode" and key_cache.dtype.itemsize == 1 and size % 2 == 0 and size > 16
    if kind == 0 and not paired:
        return key_cache, value_cache, 0
    seen_as = torch.uint16 if paired else torch.uint8
    fp8 = kind + 2 if kind and target.native_fp8 else kind
    return key_cache.view(seen_as), value_cache.view(seen_as), fp8


def goes_ahead(args: AttentionArgs) -> bool:
    """Return whether a prompt's softmax can overlap its products; see `kv_loop_pipelined`."""
    if args.sliding_window or args.soft_cap or args.alibi_slopes is not None:
        return False
    if args.visible_ends is not None:
        return False
    return args.key_cache.dtype.itemsize > 1 and args.key_scales is None


def paged_attention(
    args: AttentionArgs,
    *,
    lse: Tensor | None = None,
    programs: int | None = None,
    invariant: bool = False,
) -> Tensor:
    """See `KernelSet.paged_attention`; the contents of tables and lengths aren't checked on a GPU.

    Caches may be float8_e4m3fn or float8_e5m2, with scales float32 [1] (one for the cache), [Hk],
    [num_blocks, Hk, block_size] or none (1). `lse` float32 [T, Hq] receives the logarithm to base 2
    of each softmax's sum, for `merge_attention_states`. `programs` is the number of programs per KV
    head that share split keys; None chooses it by the device's size. Doesn't wait for the device
    and can be captured in a CUDA graph. In a batch of decodes a row's result has the same bits
    whatever the other rows are. With `invariant` this holds for every row, also in prompts: they
    use decode tiles, and keys aren't split.
    """
    q, out, window, page = args.q, args.out, args.sliding_window, args.key_cache.shape[2]
    tokens, heads, size = q.shape
    kv_heads = args.key_cache.shape[1]
    args.check_causal("TRITON_ATTN", takes_spans=args.alibi_slopes is None)
    scales = _check(args)
    if out is None:
        out = torch.empty((tokens, heads, size), dtype=q.dtype, device=q.device)
    elif out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out {describe(out)} must be contiguous and like q {describe(q)}")
    if lse is not None and (
        lse.shape != (tokens, heads) or lse.dtype != torch.float32 or not lse.is_contiguous()
    ):
        raise ValueError(f"lse {describe(lse)} must be contiguous float32 {[tokens, heads]}")

    target = target_of(q.device)
    padded, sequences = max(16, triton.next_power_of_2(size)), args.block_tables.shape[0]
    phase = "decode" if invariant or tokens <= sequences * DECODE_QUERIES else "prefill"
    group, widths = heads // kv_heads, (q.element_size(), args.key_cache.element_size())
    single_query = invariant or phase == "prefill"
    queries = 1 if single_query else triton.cdiv(tokens, max(1, sequences))
    min_rows = max(group, min(DECODE_ROWS, group * queries))
    tile = tile_for(target, phase, padded, min_rows, *widths)
    tiles = tokens // (tile.rows // group) + sequences if tokens else 0
    keys, values, fp8 = as_operands(args.key_cache, args.value_cache, target, phase)
    shape: dict[str, Any] = {"HEADS": heads, "HEAD_SIZE": size, "PADDED": padded}
    # float16 can't hold weights multiplied by a token's scale, which may be too small.
    halves = q.dtype == torch.bfloat16 and fp8 > 0 and scales != "token"
    # The interpreter's bfloat16 products are wrong, and only PTX converts pairs of int8 to
    # bfloat16.
    widens = INTERPRETED or (args.key_cache.dtype == torch.int8 and not target.runs_ptx)
    # With splits, `reduce_kernel` adds the sinks.
    variation: dict[str, Any] = {
        **shape, "KV_HEADS": kv_heads, "PAGE": page, "ROWS": tile.rows, "KEYS": tile.keys,
        "WINDOW": window > 0, "CAPPED": args.soft_cap > 0, "ALIBI": args.alibi_slopes is not None,
        "SCALES": {"tensor": 1, "head": 2}.get(scales, 0), "TOKEN_SCALES": scales == "token",
        "FP8": fp8, "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
        "UPCAST": q.dtype == torch.bfloat16 and not halves and widens, "HALVES": halves,
        "num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers,
    }  # fmt: skip
    ends = {"SINKS": args.sinks is not None, "WRITE_LSE": lse is not None}
    lengths = (args.seq_lens, args.query_start_loc)
    batch = (q, keys, values, args.block_tables, *lengths, args.alibi_slopes)
    scaling = (args.key_scales, args.value_scales)
    settings = (token_stride(q), args.block_tables.stride(0), sequences, args.scale, args.soft_cap)
    few = tiles * kv_heads < target.processors if programs is None else programs > 1
    spans = args.visible_ends is not None
    if invariant or spans or (phase == "prefill" and not few):
        ahead = tile.ahead if goes_ahead(args) and not invariant else 0
        variation["num_stages"] = ahead or tile.stages
        launch(
            attention_kernel, (tiles, kv_heads), out, lse, *batch, args.sinks, *scaling,
            args.visible_ends, *settings, window, AHEAD=ahead > 0, INVARIANT=invariant,
            SPANS=spans, **ends, **variation,
        )  # fmt: skip
        return out
    if phase == "prefill":
        splits = prompt_splits(target, kv_heads, tiles * kv_heads)
    else:
        splits = max_splits(target, kv_heads)
    slots = max(1, min(splits, triton.cdiv(args.block_tables.shape[1] * page, SPLIT_KEYS.value)))
    partial = torch.empty((tokens, heads, slots, size), dtype=torch.float32, device=q.device)
    sums = torch.empty((tokens, heads, slots), dtype=torch.float32, device=q.device)
    programs = (programs or programs_for(target, tile, kv_heads)) if tokens else 0
    launch(
        split_attention_kernel, (programs, kv_heads), partial, sums, *batch, *scaling, *settings,
        window, slots, splits, **variation,
    )  # fmt: skip
    launch(
        reduce_kernel, (tokens * heads,), out, lse, partial, sums, args.sinks, *lengths, sequences,
        window, slots, splits, **shape, MAX_SPLITS=MAX_SPLITS, KEYS=tile.keys, WINDOW=window > 0,
        **ends, num_warps=4,
    )  # fmt: skip
    return out


def _check(args: AttentionArgs) -> str:
    """Raise ValueError for wrong shapes or dtypes; returns the kind of scales."""
    q, tables = args.q, args.block_tables
    _, heads, size = q.shape
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"q {describe(q)} must be float32, float16 or bfloat16")
    _, kv_heads, _, _ = check_caches(args.key_cache, args.value_cache, size)
    if not 1 <= size <= 256:
        raise ValueError(f"heads of {size} aren't supported: at most 256")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads don't share {kv_heads} key/value heads")
    sequences = tables.shape[0]
    check_vector("seq_lens", args.seq_lens, sequences, torch.int32)
    check_vector("query_start_loc", args.query_start_loc, sequences + 1, torch.int32)
    if tables.dtype != torch.int32 or not tables.is_contiguous():
        raise ValueError("block_tables must be contiguous int32")
    if args.visible_ends is not None:
        check_vector("visible_ends", args.visible_ends, len(q), torch.int32)
    for name, values in (("alibi_slopes", args.alibi_slopes), ("sinks", args.sinks)):
        if values is not None:
            check_vector(name, values, heads, torch.float32)
    return check_cache_scales(args.key_cache, args.key_scales, args.value_scales)
