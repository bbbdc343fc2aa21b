"""Grouped products: rows are sorted by their matrix, and each group is padded to whole tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.tensors import check_vector, describe
from kernels.triton.attention.tile_sizes import SHARED_8
from kernels.triton.launch import INTERPRETED, launch, target_of

BLOCK = 64 if INTERPRETED else 1024


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows sorted by group, in tiles of `tile` rows of one group.

    Attributes:
        order: int32 [max_tiles * tile], indices into the list of ids; `rows` for padding.
        group: int32 [max_tiles], each tile's group; -1 for unused tiles.
        rows: length of the list of ids.
        tile: rows per tile.
    """

    order: Tensor
    group: Tensor
    rows: int
    tile: int


@triton.jit(do_not_specialize=("rows",))
def count_kernel(counts, ids, rows, BLOCK: tl.constexpr):
    """Count the ids of each group. Grid (groups,)."""
    group = tl.program_id(0)
    hits = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, rows, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        hits += (tl.load(ids + offsets, mask=offsets < rows, other=-1) == group).to(tl.int32)
    tl.store(counts + group, tl.sum(hits, 0))


@triton.jit(do_not_specialize=("rows",))
def order_kernel(
    order,
    group_of,
    counts,
    ids,
    rows,
    GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the indices of a group's ids in ascending order, from its first tile on. Grid
    (groups,).
    """
    group = tl.program_id(0)
    every = tl.arange(0, PADDED)
    sizes = tl.load(counts + every, mask=every < GROUPS, other=0)
    tiles = (sizes + TILE - 1) // TILE
    first = tl.sum(tl.where(every < group, tiles, 0), 0)
    mine = tl.sum(tl.where(every == group, tiles, 0), 0)
    for tile in tl.range(first, first + mine):
        tl.store(group_of + tile, group)
    to = first * TILE
    for start in tl.range(0, rows, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        hit = tl.load(ids + offsets, mask=offsets < rows, other=-1) == group
        positions = to + tl.cumsum(hit.to(tl.int32), 0) - 1
        tl.store(order + positions, offsets, mask=hit)
        to += tl.sum(hit.to(tl.int32), 0)


def align(ids: Tensor, groups: int, tile: int) -> Groups:
    """Sort rows by group, stably, without waiting for the device.

    ids int32 [rows], each in [0, groups), or -1 for a row without a group, which is left out. The
    number of tiles suffices for any ids.
    """
    check_vector("ids", ids, len(ids), torch.int32)
    if groups < 1 or tile < 1:
        raise ValueError(f"{groups} groups in tiles of {tile}: both must be at least 1")
    rows = len(ids)
    max_tiles = min(rows, -(-rows // tile) + groups - 1) if rows else 0
    order = torch.full((max_tiles * tile,), rows, dtype=torch.int32, device=ids.device)
    group = torch.full((max_tiles,), -1, dtype=torch.int32, device=ids.device)
    counts = torch.empty(groups, dtype=torch.int32, device=ids.device)
    grid = (groups if rows else 0,)
    launch(count_kernel, grid, counts, ids, rows, BLOCK=BLOCK, num_warps=4)
    launch(
        order_kernel, grid, order, group, counts, ids, rows, GROUPS=groups,
        PADDED=triton.next_power_of_2(groups), TILE=tile, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return Groups(order, group, rows, tile)


@dataclass(frozen=True, slots=True)
class GemmTile:
    """The columns and depth of a program's tile, and its schedule."""

    columns: int
    depth: int
    warps: int
    stages: int


#: Rows of a tile -> the rest, for 16-bit operands.
TILES = {
    16: GemmTile(128, 128, 4, 4),
    64: GemmTile(128, 64, 4, 4),
    128: GemmTile(128, 64, 8, 3),
}


def tile_rows(rows: int, groups: int) -> int:
    """Return the rows per tile: few for small groups, so that little of a tile is padding."""
    if INTERPRETED:
        return 16
    rows_per_group = rows / max(1, groups)
    return 16 if rows_per_group <= 24 else 64 if rows_per_group <= 96 else 128


@triton.jit(do_not_specialize=("rows",))
def gemm_kernel(
    out,
    x,
    matrices,
    bias,
    scales,
    order,
    group_of,
    rows,
    x_stride,
    out_stride,
    factor,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SHARED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """out[i] = x[i // SHARED] W[group of i]^T. Grid (blocks of columns, tiles, SPLITS).

    With SPLITS each program sums a part of the depth into out [SPLITS, rows, COLUMNS].
    """
    tile = tl.program_id(1)
    group = tl.load(group_of + tile).to(tl.int64)
    if group < 0:
        return
    index = tl.load(order + tile * TILE + tl.arange(0, TILE))
    row_mask = index < rows
    source = (index // SHARED).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = column < COLUMNS
    depth = tl.arange(0, BLOCK_K)
    share: tl.constexpr = (DEPTH + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    first = tl.program_id(2) * share
    last = tl.minimum(first + share, DEPTH)
    lhs = x + source[:, None] * x_stride + depth[None, :]
    rhs = matrices + group * COLUMNS * DEPTH + column[None, :].to(tl.int64) * DEPTH + depth[:, None]
    total = tl.zeros((TILE, BLOCK_N), tl.float32)
    for start in tl.range(first, last, BLOCK_K):
        if DEPTH % BLOCK_K == 0:
            a = tl.load(lhs + start, mask=row_mask[:, None], other=0.0)
            b = tl.load(rhs + start, mask=column_mask[None, :], other=0.0)
        else:
            inside = start + depth < DEPTH
            a = tl.load(lhs + start, mask=row_mask[:, None] & inside[None, :], other=0.0)
            b = tl.load(rhs + start, mask=inside[:, None] & column_mask[None, :], other=0.0)
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        else:
            b = b.to(a.dtype)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    total *= factor
    if BIAS:
        added = tl.load(bias + group * COLUMNS + column, mask=column_mask, other=0.0)
        total += added[None, :].to(tl.float32)
    if SCALED:
        total *= tl.load(scales + index, mask=row_mask, other=0.0)[:, None]
    row = tl.program_id(2).to(tl.int64) * rows + index
    to = out + row[:, None] * out_stride + column[None, :]
    inside = row_mask[:, None] & column_mask[None, :]
    if ADD:
        total += tl.load(to, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)


def grouped_gemm(
    x: Tensor,
    matrices: Tensor,
    groups: Groups,
    *,
    shared: int = 1,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    factor: float = 1.0,
    out: Tensor | None = None,
    add: bool = False,
    splits: int = 1,
    dtype: torch.dtype | None = None,
    fill: bool = True,
) -> Tensor:
    """Return (factor * x[i // shared] W[group of i]^T + bias of the group) * scales[i], [rows, N].

    x [rows / shared, K], rows may be strided; matrices [G, N, K] and bias [G, N] contiguous; scales
    float32 [rows]. `add` adds to `out`, whose rows may be strided. Rows without a group aren't
    written: without `out` they are zeros, or undefined with `fill=False`. With splits > 1, the
    parts of the sum over K are added in float32. The result has x's dtype unless `dtype` or `out`
    specify another.
    """
    count, columns, depth = matrices.shape
    if x.dim() != 2 or x.shape[1] != depth or x.stride(1) != 1 or len(x) * shared != groups.rows:
        raise ValueError(f"x {describe(x)} doesn't go with matrices {describe(matrices)}")
    if not matrices.is_contiguous():
        raise ValueError("matrices must be contiguous")
    if bias is not None and (bias.shape != (count, columns) or not bias.is_contiguous()):
        raise ValueError(f"bias {describe(bias)} doesn't go with matrices {describe(matrices)}")
    if out is not None and (out.shape != (groups.rows, columns) or out.stride(1) != 1):
        raise ValueError(f"out {describe(out)} must be {[groups.rows, columns]}")
    if splits > 1 and (out is not None or bias is not None):
        raise ValueError("split sums go to a result of their own, without a bias")
    if out is None:
        shape = (splits * groups.rows, columns)
        out_dtype = torch.float32 if splits > 1 else dtype or x.dtype
        create = torch.zeros if fill else torch.empty
        out = create(shape, dtype=out_dtype, device=x.device)
    tile = TILES.get(groups.tile, TILES[16])
    # The small shared memory of 8.6, 8.9 and 12.0 has room for 3 stages, that of AMD for 2.
    target = target_of(x.device)
    max_stages = 2 if target.gfx else tile.stages if target.shared >= SHARED_8 else 3
    stages = min(max_stages, tile.stages)
    wide = x.dtype == torch.float32
    block_n = min(
        32 if wide or INTERPRETED else tile.columns, max(16, triton.next_power_of_2(columns))
    )
    block_k = min(32 if wide or INTERPRETED else tile.depth, max(16, triton.next_power_of_2(depth)))
    launch(
        gemm_kernel, (triton.cdiv(columns, block_n), len(groups.group), splits), out, x, matrices,
        bias, scales, groups.order, groups.group, groups.rows, x.stride(0), out.stride(0), factor,
        COLUMNS=columns, DEPTH=depth, SHARED=shared, TILE=groups.tile, BLOCK_N=block_n,
        BLOCK_K=block_k, SPLITS=splits, BIAS=bias is not None, SCALED=scales is not None, ADD=add,
        PRECISION="tf32x3" if wide else "tf32",
        UPCAST=INTERPRETED and torch.bfloat16 in (x.dtype, matrices.dtype),
        num_warps=tile.warps, num_stages=2 if wide else stages,
    )  # fmt: skip
    return out.view(splits, groups.rows, columns).sum(0) if splits > 1 else out
