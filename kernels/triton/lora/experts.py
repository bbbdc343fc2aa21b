"""Shrink and expand for experts: a row's matrices go by its adapter and by its expert.

Rows come in the tiles that the experts' own products have, each of one expert. A tile's adapters
take turns: those rows that have it meet its matrices, the others are nothing meanwhile. An entry of
a place leads to a table that has an entry for each expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.lora_slots import LoraRows, RowGroups
from kernels.triton.grouped.align import Groups
from kernels.triton.launch import INTERPRETED, launch
from kernels.triton.lora.kernel import COLUMN_BLOCK, RANKS

_RANKS: int = RANKS.value
_TILE = 16
"""Rows of a tile where they all have one expert."""
_FEW_ROWS = 2048
"""Up to so many rows, the depth of a shrink is split."""


@triton.jit
def owner_kernel(owners, order, slots, count, TILE: tl.constexpr):
    """Grid (tiles,): the slot of each row of a step's tiles."""
    tile = tl.program_id(0)
    if tile < tl.load(count):
        row = tl.load(order + tile * TILE + tl.arange(0, TILE))
        slot = tl.load(slots + tile) + tl.zeros((TILE,), tl.int32)
        tl.store(owners + row, slot, mask=row >= 0)


def owners_of(rows: LoraRows, count: int) -> Tensor:
    """See `LoraSlots.owners`."""
    owners = torch.full((count,), -1, dtype=torch.int32, device=rows.order.device)
    grid = (len(rows.owners),)
    launch(owner_kernel, grid, owners, rows.order, rows.owners, rows.count, TILE=rows.tile)
    return owners


@triton.jit(do_not_specialize=("rows",))
def expert_shrink_kernel(
    h, x, table, owners, order, group_of, rows, x_stride, width,
    DEPTH: tl.constexpr, SHARED: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid (programs of ranks, tiles, SPLITS): h[split, row] = factors * x[row // SHARED] A^T."""
    tile = tl.program_id(1)
    group = tl.load(group_of + tile).to(tl.int64)
    if group < 0:
        return
    share: tl.constexpr = (DEPTH + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    first = tl.program_id(2) * share
    last = tl.minimum(first + share, DEPTH)
    depth = tl.arange(0, BLOCK_K)
    each = tl.arange(0, RANKS)
    place = tl.load(order + tile * TILE + tl.arange(0, TILE))
    there = place < rows
    source = (place // SHARED).to(tl.int64)
    owner = tl.load(owners + source, mask=there, other=-1)
    left = x + source[:, None] * x_stride + depth[None, :]
    current = tl.max(owner, 0)
    while current >= 0:
        mine = owner == current
        leads = tl.load(table + current.to(tl.int64) * 8)
        if leads != 0:
            entry = leads.to(tl.pointer_type(tl.int64)) + group * 8
            matrix = tl.load(entry).to(tl.pointer_type(x.dtype.element_ty))
            factors = tl.load(entry + 3).to(tl.pointer_type(tl.float32))
            ranks = tl.load(entry + 4).to(tl.int32)
            for rank in tl.range(tl.program_id(0) * RANKS, ranks, tl.num_programs(0) * RANKS):
                right = matrix + (rank + each)[None, :].to(tl.int64) * DEPTH + depth[:, None]
                if DEPTH % 16 == 0:
                    # Of an address from a table the compiler knows nothing: torch aligns all.
                    right = tl.multiple_of(right, (16, 16))
                total = tl.zeros((TILE, RANKS), tl.float32)
                for start in tl.range(first, last, BLOCK_K):
                    inside = start + depth < DEPTH
                    a = tl.load(left + start, mask=mine[:, None] & inside[None, :], other=0.0)
                    b = tl.load(right + start, mask=inside[:, None], other=0.0)
                    if UPCAST:
                        a = a.to(tl.float32)
                        b = b.to(tl.float32)
                    total = tl.dot(a, b, total, input_precision=PRECISION)
                total *= tl.load(factors + rank + each)[None, :]
                to = (tl.program_id(2).to(tl.int64) * rows + place) * width
                tl.store(h + to[:, None] + (rank + each)[None, :], total, mask=mine[:, None])
        current = tl.max(tl.where(owner < current, owner, -1), 0)


@triton.jit(do_not_specialize=("rows",))
def expert_expand_kernel(
    y, h, table, owners, order, group_of, rows, y_stride, width, dtype,
    COLUMNS: tl.constexpr, SHARED: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of columns, tiles): y[row] += h[row] B^T. `dtype`: a pointer to B's kind."""
    block = tl.program_id(0)
    tile = tl.program_id(1)
    group = tl.load(group_of + tile).to(tl.int64)
    if group < 0:
        return
    own = tl.arange(0, BLOCK_N)
    column = block * BLOCK_N + own
    each = tl.arange(0, RANKS)
    place = tl.load(order + tile * TILE + tl.arange(0, TILE))
    there = place < rows
    owner = tl.load(owners + (place // SHARED).to(tl.int64), mask=there, other=-1)
    at = place.to(tl.int64)
    current = tl.max(owner, 0)
    while current >= 0:
        mine = owner == current
        leads = tl.load(table + current.to(tl.int64) * 8)
        if leads != 0:
            entry = leads.to(tl.pointer_type(tl.int64)) + group * 8
            if tl.load(entry + 7) != 0:
                inside = mine[:, None] & (column < COLUMNS)[None, :]
                to = y + at[:, None] * y_stride + column[None, :]
                total = tl.load(to, mask=inside, other=0.0).to(tl.float32)
                where = tl.load(entry + 2).to(tl.pointer_type(tl.int32)) + block * 3
                offset = tl.multiple_of(tl.load(where), 16)
                start = tl.multiple_of(tl.load(where + 1), 16)
                ranks = tl.multiple_of(tl.load(where + 2), 16)
                matrix = tl.load(entry + 1).to(tl.pointer_type(dtype.dtype.element_ty))
                right = matrix + offset + own[None, :] * ranks + each[:, None]
                right = tl.multiple_of(right, (16, 16))
                left = h + at[:, None] * width + start + each[None, :]
                for rank in tl.range(0, ranks, RANKS):
                    low = tl.zeros((TILE, RANKS), tl.float32)
                    for split in range(SPLITS):
                        part = left + split * rows.to(tl.int64) * width + rank
                        low += tl.load(part, mask=mine[:, None], other=0.0)
                    b = tl.load(right + rank)
                    a = low.to(b.dtype)
                    if UPCAST:
                        a = a.to(tl.float32)
                        b = b.to(tl.float32)
                    total = tl.dot(a, b, total, input_precision=PRECISION)
                tl.store(to, total.to(y.dtype.element_ty), mask=inside)
        current = tl.max(tl.where(owner < current, owner, -1), 0)


def add_experts(
    table: Tensor, width: int, y: Tensor, x: Tensor, owners: Tensor, groups: RowGroups,
    shared: int, *, alike: bool,
) -> None:  # fmt: skip
    """See `LoraSlots.add_experts`; `table` is of the place, `width` its largest rank."""
    (rows, columns), depth = y.shape, x.shape[1]
    splits = max(1, min(depth // 512, 16)) if rows <= _FEW_ROWS and not alike else 1
    h = torch.empty((splits, rows, width), dtype=torch.float32, device=x.device)
    wide, tiles = x.dtype == torch.float32, len(groups.group)
    common = {
        "SHARED": shared, "TILE": groups.tile, "SPLITS": splits,
        "PRECISION": "tf32x3" if wide else "tf32",
        "UPCAST": INTERPRETED and x.dtype == torch.bfloat16,
        "num_warps": 4, "num_stages": 2,
    }  # fmt: skip
    deepest = 32 if wide or INTERPRETED else 128 if groups.tile <= 16 else 64
    block_k = min(deepest, max(16, triton.next_power_of_2(depth)))
    launch(
        expert_shrink_kernel, (min(width // _RANKS, 4), tiles, splits), h, x, table, owners,
        groups.order, groups.group, rows, x.stride(0), width, DEPTH=depth, BLOCK_K=block_k,
        **common,
    )  # fmt: skip
    launch(
        expert_expand_kernel, (triton.cdiv(columns, COLUMN_BLOCK), tiles), y, h, table, owners,
        groups.order, groups.group, rows, y.stride(0), width, x, COLUMNS=columns,
        BLOCK_N=COLUMN_BLOCK, **common,
    )  # fmt: skip


def one_group(rows: int, group: int, device: torch.device) -> Groups:
    """Rows that all meet the same matrix."""
    tiles = triton.cdiv(rows, _TILE)
    order = torch.arange(tiles * _TILE, dtype=torch.int32, device=device).clamp_(max=rows)
    return Groups(order, torch.full_like(order[:tiles], group), rows, _TILE)
