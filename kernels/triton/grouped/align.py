"""Sorting rows by the matrix that they meet, each group padded to whole tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import check_vector
from kernels.triton.launch import INTERPRETED, launch

BLOCK = 64 if INTERPRETED else 1024


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows sorted by group, in tiles of `tile` rows that each have one group.

    Attributes:
        order: int32 [most tiles * tile]: places in the list of ids, `rows` where there is none.
        group: int32 [most tiles]: each tile's group; -1 for tiles that aren't needed.
        rows: length of the list of ids.
        tile: rows of a tile.
    """

    order: Tensor
    group: Tensor
    rows: int
    tile: int


@triton.jit(do_not_specialize=("rows",))
def count_kernel(counts, ids, rows, BLOCK: tl.constexpr):
    """Grid (groups,): how many ids are of each group."""
    group = tl.program_id(0)
    found = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, rows, BLOCK):
        at = start + tl.arange(0, BLOCK)
        found += (tl.load(ids + at, mask=at < rows, other=-1) == group).to(tl.int32)
    tl.store(counts + group, tl.sum(found, 0))


@triton.jit(do_not_specialize=("rows",))
def place_kernel(
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
    """Grid (groups,): the places of a group's ids, in their order, from its first tile on."""
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
        at = start + tl.arange(0, BLOCK)
        hit = tl.load(ids + at, mask=at < rows, other=-1) == group
        place = to + tl.cumsum(hit.to(tl.int32), 0) - 1
        tl.store(order + place, at, mask=hit)
        to += tl.sum(hit.to(tl.int32), 0)


def align(ids: Tensor, groups: int, tile: int) -> Groups:
    """Sort rows by group, stably; needs no word from the device.

    ids int32 [rows], each in [0, groups), or -1 for a row that belongs to none and is left out. As
    many tiles are made as any ids could need.
    """
    check_vector("ids", ids, len(ids), torch.int32)
    if groups < 1 or tile < 1:
        raise ValueError(f"{groups} groups in tiles of {tile}: both must be at least 1")
    rows = len(ids)
    most = min(rows, -(-rows // tile) + groups - 1) if rows else 0
    order = torch.full((most * tile,), rows, dtype=torch.int32, device=ids.device)
    group = torch.full((most,), -1, dtype=torch.int32, device=ids.device)
    counts = torch.empty(groups, dtype=torch.int32, device=ids.device)
    grid = (groups if rows else 0,)
    launch(count_kernel, grid, counts, ids, rows, BLOCK=BLOCK, num_warps=4)
    launch(
        place_kernel, grid, order, group, counts, ids, rows, GROUPS=groups,
        PADDED=triton.next_power_of_2(groups), TILE=tile, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return Groups(order, group, rows, tile)
