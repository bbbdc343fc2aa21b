"""Shrink and expand for experts: a row's matrices depend on its adapter and its expert.

Rows are grouped in the tiles of the experts' own products, of one expert each. The adapters of a
tile take turns: their matrices are multiplied by their own rows, with the other rows masked. A
slot's entry points to a table with an entry for each expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.lora import ExpertRowGroups, LoraMapping
from kernels.triton.launch import INTERPRETED, launch
from kernels.triton.lora.kernels import (
    CHANGES,
    COLUMN_BLOCK,
    RANKS,
    entry_of,
    expand_rows,
    shrink_rows,
)
from kernels.triton.moe.grouped_gemm import Groups

_RANKS: int = RANKS.value
_TILE = 16
"""Rows per tile if all rows have the same expert."""
_FEW_ROWS = 2048
"""Maximum rows for which the depth of a shrink is split."""


@triton.jit
def slot_kernel(owners, order, slots, count, TILE: tl.constexpr):
    """Write the slot of each row of a step's tiles. Grid (tiles,)."""
    tile = tl.program_id(0)
    if tile < tl.load(count):
        row = tl.load(order + tile * TILE + tl.arange(0, TILE))
        slot = tl.load(slots + tile) + tl.zeros((TILE,), tl.int32)
        tl.store(owners + row, slot, mask=row >= 0)


def slots_of_rows(rows: LoraMapping, count: int) -> Tensor:
    """See `LoraSlots.slot_by_row`."""
    owners = torch.full((count,), -1, dtype=torch.int32, device=rows.order.device)
    grid = (len(rows.owners),)
    launch(slot_kernel, grid, owners, rows.order, rows.owners, rows.count, TILE=rows.tile)
    return owners


@triton.jit
def owners_of_tile(owners, order, tile, rows, SHARED: tl.constexpr, TILE: tl.constexpr):
    """Return (the rows of a tile, their tokens, their adapters' slots, -1 for none)."""
    index = tl.load(order + tile * TILE + tl.arange(0, TILE))
    source = (index // SHARED).to(tl.int64)
    return index.to(tl.int64), source, tl.load(owners + source, mask=index < rows, other=-1)


@triton.jit
def next_slot(owner, current):
    """Return the next smaller slot after `current`; -1 after the last."""
    return tl.max(tl.where(owner < current, owner, -1), 0)


@triton.jit(do_not_specialize=("rows",))
def expert_shrink_kernel(
    h, x, table, owners, order, group_of, rows, x_stride, width,
    DEPTH: tl.constexpr, SHARED: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """h[split, row] = factors * x[row // SHARED] A^T. Grid (programs of ranks, tiles, SPLITS)."""
    tile = tl.program_id(1)
    group = tl.load(group_of + tile)
    if group < 0:
        return
    index, source, owner = owners_of_tile(owners, order, tile, rows, SHARED, TILE)
    current = tl.max(owner, 0)
    while current >= 0:
        leads = tl.load(entry_of(table, current))
        if leads != 0:
            entry = entry_of(leads.to(tl.pointer_type(tl.int64)), group)
            shrink_rows(
                h, x, entry, source, index, owner == current, rows, x_stride, width,
                DEPTH, TILE, BLOCK_K, SPLITS, PRECISION, UPCAST,
            )  # fmt: skip
        current = next_slot(owner, current)


@triton.jit(do_not_specialize=("rows",))
def expert_expand_kernel(
    y, h, table, owners, order, group_of, rows, y_stride, width, dtype,
    COLUMNS: tl.constexpr, SHARED: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """y[row] += h[row] B^T. Grid (blocks of columns, tiles). `dtype`: any pointer to B's dtype."""
    block = tl.program_id(0)
    tile = tl.program_id(1)
    group = tl.load(group_of + tile)
    if group < 0:
        return
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    index, _, owner = owners_of_tile(owners, order, tile, rows, SHARED, TILE)
    to = y + index[:, None] * y_stride + column[None, :]
    current = tl.max(owner, 0)
    while current >= 0:
        leads = tl.load(entry_of(table, current))
        if leads != 0:
            entry = entry_of(leads.to(tl.pointer_type(tl.int64)), group)
            if tl.load(entry + CHANGES) != 0:
                mine = owner == current
                inside = mine[:, None] & (column < COLUMNS)[None, :]
                total = tl.load(to, mask=inside, other=0.0).to(tl.float32)
                total = expand_rows(
                    total, h, entry, index, mine, block, rows, width, dtype,
                    TILE, BLOCK_N, SPLITS, PRECISION, UPCAST,
                )  # fmt: skip
                tl.store(to, total.to(y.dtype.element_ty), mask=inside)
        current = next_slot(owner, current)


def add_experts(
    table: Tensor, width: int, y: Tensor, x: Tensor, owners: Tensor, groups: ExpertRowGroups,
    shared: int, *, alike: bool,
) -> None:  # fmt: skip
    """See `LoraSlots.add_experts`; `table` is that of the target, `width` its largest rank."""
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
    """Return the groups for rows that are all multiplied by the same matrix."""
    tiles = triton.cdiv(rows, _TILE)
    order = torch.arange(tiles * _TILE, dtype=torch.int32, device=device).clamp_(max=rows)
    return Groups(order, torch.full_like(order[:tiles], group), rows, _TILE)
