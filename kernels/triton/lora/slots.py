"""`TritonLoraSlots`: the adapters of a model in a table that recorded kernels read."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from dataclasses import replace

import torch
import triton
from torch import Tensor

from kernels.checks import describe
from kernels.lora import LayerLoras, LoraPart, LoraWeights, PackedLora, check_lora
from kernels.lora_slots import LoraRows, LoraSlots, Place, SlotTable
from kernels.triton.launch import INTERPRETED, launch
from kernels.triton.lora.kernel import COLUMN_BLOCK, FIELDS, RANKS, expand_kernel, shrink_kernel

_RANKS: int = RANKS.value
FEW_ROWS = 512
"""Up to so many rows, tiles are small and the depth of a shrink is split."""
PROGRAMS = 2 if INTERPRETED else 64
"""Programs, at most, that share the tiles of rows of a block of columns."""


def padded_rank(rank: int) -> int:
    """A part's rank as it is kept."""
    return triton.cdiv(rank, _RANKS) * _RANKS


class TritonLora(PackedLora):
    """`LoraWeights` for `shrink_kernel` and `expand_kernel`."""

    def __init__(self, lora: LoraWeights, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ValueError for what doesn't fit together."""
        check_lora(lora)
        self.in_features, self.out_features = lora.a.shape[1], lora.out_features
        a, factors, parts = _over_each_other(lora)
        b, blocks = _blocks(parts, lora.out_features)
        self.rank = len(a)
        self.a, self.b = a.to(dtype).to(device), b.to(dtype).to(device)
        self.blocks, self.factors = blocks.to(device), factors.to(device)
        self.gain, self.shift = (
            None if vector is None else vector.contiguous().to(device)
            for vector in (lora.gain, lora.shift)
        )
        self.nbytes = sum(tensor.nbytes for tensor in self._tensors() if tensor is not None)

    def _tensors(self) -> tuple[Tensor | None, ...]:
        return self.a, self.b, self.blocks, self.factors, self.gain, self.shift

    def entry(self) -> list[int]:
        """The numbers by which kernels find it."""
        a, b, blocks, factors, gain, shift = (
            0 if tensor is None else tensor.data_ptr() for tensor in self._tensors()
        )
        return [a, b, blocks, factors, self.rank, gain, shift, 1]


def _over_each_other(lora: LoraWeights) -> tuple[Tensor, Tensor, list[LoraPart]]:
    """A with each part's ranks padded, the factors of what comes of it, and where parts meet it.

    Parts that share ranks and a factor go on sharing them.
    """
    kept: list[Tensor] = []
    factors: list[Tensor] = []
    starts: dict[tuple[int, int, float], int] = {}
    parts, rank = [], 0
    for part in lora.parts:
        own = part.b.shape[1]
        key = part.start, own, part.scale
        if key not in starts:
            starts[key] = rank
            size = padded_rank(own)
            some = lora.a.new_zeros(size, lora.a.shape[1])
            some[:own] = lora.a[part.start : part.start + own]
            kept.append(some)
            factors.append(torch.full((size,), part.scale, dtype=torch.float32))
            rank += size
        parts.append(replace(part, start=starts[key]))
    if not kept:
        return lora.a.new_zeros(0, lora.a.shape[1]), torch.zeros(0), parts
    return torch.cat(kept), torch.cat(factors), parts


def _blocks(parts: list[LoraPart], columns: int) -> tuple[Tensor, Tensor]:
    """B in blocks of columns, each with the ranks that its columns meet, one behind the other; and
    of each block where it begins, and the first rank and the number of them, int32 [blocks, 3].
    """
    found: list[Tensor] = []
    places: list[tuple[int, int, int]] = []
    total = 0
    for first in range(0, columns, COLUMN_BLOCK):
        last = min(first + COLUMN_BLOCK, columns)
        here = [part for part in parts if part.b.shape[1] and _meets(part, first, last)]
        start = min((part.start for part in here), default=0)
        end = max((part.start + padded_rank(part.b.shape[1]) for part in here), default=0)
        block = torch.zeros(COLUMN_BLOCK, end - start, dtype=parts[0].b.dtype if parts else None)
        for part in here:
            above, below = max(first, part.first), min(last, part.first + len(part.b))
            own = part.b[above - part.first : below - part.first]
            at = part.start - start
            block[above - first : below - first, at : at + own.shape[1]] = own
        found.append(block.flatten())
        places.append((total, start, end - start))
        total += block.numel()
    if total >= 1 << 31:
        raise ValueError(f"an adapter of {columns} columns has {total} numbers in its B: too many")
    return torch.cat(found), torch.tensor(places, dtype=torch.int32)


def _meets(part: LoraPart, first: int, last: int) -> bool:
    return part.first < last and first < part.first + len(part.b)


class TritonLoraSlots(LoraSlots):
    """`LoraSlots` by a table of addresses.

    Args:
        places: the linear layers that adapters may change, and how many parts each has at most.
        most: adapters at once.
        most_rank: of a part.
        dtype: of the rows, and of adapters' matrices.
        alike: give a row the same bits in a step of any size.
    """

    def __init__(
        self, places: Mapping[Place, int], most: int, most_rank: int, dtype: torch.dtype,
        device: torch.device, *, alike: bool = False,
    ) -> None:  # fmt: skip
        self.most, self._most_rank, self._dtype, self._device = most, most_rank, dtype, device
        self._alike = alike
        self._index = {place: index for index, place in enumerate(places)}
        self._widths = [parts * padded_rank(most_rank) for parts in places.values()]
        shape = (len(places), most, FIELDS)
        self.table = torch.zeros(shape, dtype=torch.int64, device=device)
        self._free = list(range(most))
        self._lock = threading.Lock()

    def tile(self, rows: int) -> int:
        """See `LoraSlots.tile`."""
        return 16 if INTERPRETED or self._alike or rows <= FEW_ROWS else 64

    def pack(self, lora: LoraWeights) -> TritonLora:
        """See `LoraSlots.pack`."""
        if any(part.b.shape[1] > self._most_rank for part in lora.parts):
            raise ValueError(f"ranks above {self._most_rank} don't fit")
        return TritonLora(lora, self._dtype, self._device)

    def put(self, layers: LayerLoras) -> SlotTable:
        """See `LoraSlots.put`."""
        entries = torch.zeros(len(self._index), FIELDS, dtype=torch.int64)
        for number, layer in enumerate(layers):
            for slot, lora in layer.items():
                at = self._index.get((number, slot))
                if at is None or not isinstance(lora, TritonLora) or lora.rank > self._widths[at]:
                    raise ValueError(f"layer {number} has no adapters of {slot} like this")
                entries[at] = torch.tensor(lora.entry())
        with self._lock:
            if not self._free:
                raise ValueError(f"all {self.most} slots of adapters are taken")
            free = self._free.pop()
        # Behind the steps that were launched before, which may read what the slot had.
        self.table[:, free].copy_(entries.to(self._device))
        table = SlotTable(free, layers)
        weakref.finalize(table, self._free.append, free)
        return table

    def add(self, place: Place, y: Tensor, x: Tensor, rows: LoraRows) -> None:
        """See `LoraSlots.add`."""
        at = self._index[place]
        if x.dtype != self._dtype or len(x) != len(y) or y.stride(1) != 1:
            raise ValueError(f"y {describe(y)} and x {describe(x)} don't go with these adapters")
        x = x if x.stride(1) == 1 else x.contiguous()
        (tokens, depth), columns, width = x.shape, y.shape[1], self._widths[at]
        few = tokens <= FEW_ROWS and not self._alike
        splits = max(1, min(depth // 512, 16)) if few else 1
        h = torch.empty((splits, tokens, width), dtype=torch.float32, device=x.device)
        wide, tile = x.dtype == torch.float32, rows.tile
        programs = min(len(rows.owners), PROGRAMS)
        shared = {
            "TILE": tile, "SPLITS": splits, "PRECISION": "tf32x3" if wide else "tf32",
            "UPCAST": INTERPRETED and x.dtype == torch.bfloat16,
            "num_warps": 4, "num_stages": 2 if wide else 4,
        }  # fmt: skip
        block_k = min(32 if wide or INTERPRETED else 128, max(16, triton.next_power_of_2(depth)))
        launch(
            shrink_kernel, (min(width // _RANKS, 4), programs, splits), h, x, self.table[at],
            rows.order, rows.owners, rows.count, tokens, x.stride(0), width, DEPTH=depth,
            BLOCK_K=block_k, **shared,
        )  # fmt: skip
        launch(
            expand_kernel, (triton.cdiv(columns, COLUMN_BLOCK), programs), y, h, self.table[at],
            rows.order, rows.owners, rows.count, tokens, y.stride(0), width, x,
            COLUMNS=columns, BLOCK_N=COLUMN_BLOCK, **shared,
        )  # fmt: skip
