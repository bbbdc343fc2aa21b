"""Attention over latents: one vector a token is key and value of all heads at once.

Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2") with its projections of keys and
values taken into the queries and behind the results: a key is a rotated part and a latent behind
it, 64 and 512 values in DeepSeek's models; the latent alone is the value. A block is read once for
all heads of a tile, and for both products.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from kernels.attention.args import LatentArgs
from kernels.checks import check_vector, describe, token_stride
from kernels.triton.attention.kernel import reduce_kernel
from kernels.triton.attention.latent_kernel import (
    latent_attention_kernel,
    split_latent_attention_kernel,
)
from kernels.triton.attention.paged import DECODE_QUERIES, check_cache_scales
from kernels.triton.attention.shares import SPLIT_KEYS
from kernels.triton.attention.tiles import (
    MOST_SPLITS,
    SHARED_8,
    Tile,
    most_splits,
    programs_for,
    prompt_splits,
)
from kernels.triton.fp8 import KINDS
from kernels.triton.launch import INTERPRETED, Target, launch, target_of

MOST_LATENT, MOST_ROTATED = 512, 128
"""Values of a latent and of the part beside it that a tile has registers for."""
MOST_STATES = 2048
"""Of a sequence's queries: parts of it times heads. Each is a latent of float32, and a batch of 256
sequences has some gigabyte of them at most."""


def latent_tile(target: Target, rows: int, itemsize: int = 2) -> Tile:
    """For so many rows of (query, head): with more of them, or of keys, sums of 512 values don't
    fit registers."""
    large = target.shared > SHARED_8
    rows = 16 if rows <= 16 or not large else 32
    if INTERPRETED:
        return Tile(rows, 16, 1, 1)
    if itemsize == 4:
        return Tile(16, 16, 8, 1)
    stages = 5 if rows == 16 else 7
    return Tile(rows, 32, rows // 4, stages, programs=2 if large and rows == 16 else 1)


def latent_attention(
    args: LatentArgs, *, programs: int | None = None, invariant: bool = False
) -> Tensor:
    """See `KernelSet.latent_attention`: [T, Hq, latent], contiguous.

    A latent has at most 512 values, what is rotated beside it 128. Caches may be int8 with a scale
    a token, or float8_e4m3fn or float8_e5m2 with one in all, or none. `programs`, `invariant` and
    what is the same to the bit: as for `paged_attention`. Needs no word from the device.
    """
    q, latent, page = args.q, args.latent, args.cache.shape[2]
    tokens, heads, _ = q.shape
    scales = _check(args)
    shape = (tokens, heads, latent)
    out = args.new_out() if args.out is None else args.out
    if out.shape != shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out {describe(out)} must be contiguous {list(shape)}, of q's dtype")
    target, sequences = target_of(q.device), len(args.block_tables)
    prompts = tokens > sequences * DECODE_QUERIES
    queries = triton.cdiv(tokens, max(1, sequences)) if not invariant else DECODE_QUERIES
    tile = latent_tile(target, heads * queries, q.element_size())
    group = min(heads, tile.rows)
    blocks, each = triton.cdiv(heads, group), tile.rows // group
    tiles = tokens // each + sequences if tokens else 0
    kind = KINDS.get(args.cache.dtype, 0)
    cache = args.cache.view(torch.uint8) if kind else args.cache
    rotated = q.shape[2] - latent
    variation: dict[str, Any] = {
        "HEADS": heads, "GROUP": group, "LATENT": latent, "ROTATED": rotated,
        "PADDED": _padded(latent), "BESIDE": _padded(rotated), "PAGE": page, "ROWS": tile.rows,
        "KEYS": tile.keys, "SCALES": int(scales in ("tensor", "head")),
        "TOKEN_SCALES": scales == "token", "FP8": kind + 2 * (kind > 0 and target.native_fp8),
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
        # The interpreter's product of bfloat16 is wrong.
        "UPCAST": INTERPRETED and q.dtype == torch.bfloat16,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    lengths = (args.seq_lens, args.query_start_loc)
    batch = (q, cache, args.block_tables, *lengths, args.scales)
    settings = (token_stride(q), args.block_tables.stride(0), sequences, args.scale)
    few = tiles * blocks < target.processors if programs is None else programs > 1
    if invariant or (prompts and not few):
        launch(latent_attention_kernel, (tiles, blocks), out, *batch, *settings, **variation)
        return out
    states = heads
    splits = most_splits(target, blocks)
    if prompts:
        splits = prompt_splits(target, blocks, tiles * blocks)
    else:
        states *= queries
    splits = min(splits, max(1, MOST_STATES // triton.next_power_of_2(max(1, states))))
    slots = max(1, min(splits, triton.cdiv(args.block_tables.shape[1] * page, SPLIT_KEYS.value)))
    partial = torch.empty((tokens, heads, slots, latent), dtype=torch.float32, device=q.device)
    sums = torch.empty((tokens, heads, slots), dtype=torch.float32, device=q.device)
    programs = (programs or programs_for(target, tile, blocks)) if tokens else 0
    launch(
        split_latent_attention_kernel, (programs, blocks), partial, sums, *batch, *settings, slots,
        splits, **variation,
    )  # fmt: skip
    launch(
        reduce_kernel, (tokens * heads,), out, None, partial, sums, None, *lengths, sequences, 0,
        slots, splits, HEADS=heads, HEAD_SIZE=latent, PADDED=_padded(latent), MOST=MOST_SPLITS,
        KEYS=tile.keys, WINDOW=False, SINKS=False, WRITE_LSE=False, num_warps=8,
    )  # fmt: skip
    return out


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _check(args: LatentArgs) -> str:
    """Raise ValueError where shapes or dtypes don't fit; returns what kind of scales there are."""
    q, cache, tables, latent = args.q, args.cache, args.block_tables, args.latent
    size = q.shape[2]
    for name, value, most in (
        ("latent", latent, MOST_LATENT), ("rotated part", size - latent, MOST_ROTATED),
    ):  # fmt: skip
        if not 1 <= value <= most:
            raise ValueError(f"a {name} of {value} isn't supported: from 1 to {most}")
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"q {describe(q)} must be float32, float16 or bfloat16")
    if cache.dim() != 4 or cache.shape[1:] != (1, cache.shape[2], size):
        raise ValueError(f"a cache {describe(cache)} doesn't fit heads of {size}")
    if not cache.is_contiguous():
        raise ValueError("a cache of latents must be contiguous")
    if tables.dim() != 2 or tables.dtype != torch.int32 or not tables.is_contiguous():
        raise ValueError("block_tables must be contiguous int32")
    check_vector("seq_lens", args.seq_lens, len(tables), torch.int32)
    check_vector("query_start_loc", args.query_start_loc, len(tables) + 1, torch.int32)
    return check_cache_scales(cache, args.scales, args.scales)
