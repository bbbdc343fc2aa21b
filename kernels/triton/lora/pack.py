"""An adapter's matrices as kernels read them: ranks padded, B in blocks of columns."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from kernels.lora import LoraPart, LoraWeights, PackedLora, check_lora
from kernels.triton.lora.entry import COLUMN_BLOCK, RANKS

_RANKS: int = RANKS.value


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
        b, blocks = blocks_of(parts, lora.out_features)
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


def blocks_of(parts: list[LoraPart], columns: int) -> tuple[Tensor, Tensor]:
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
