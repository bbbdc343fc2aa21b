"""An adapter's matrices in the kernels' layout: ranks padded, B in blocks of columns."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.lora import EmbeddingWeights, LoraSlice, LoraWeights, PackedLora, check_lora
from kernels.triton.lora.kernels import COLUMN_BLOCK, FACTORS, INNER, RANK, RANKS, entry_of

_RANKS: int = RANKS.value


def padded_rank(rank: int) -> int:
    """Return a slice's rank after padding."""
    return triton.cdiv(rank, _RANKS) * _RANKS


class TritonLora(PackedLora):
    """`LoraWeights` for `shrink_kernel` and `expand_kernel`."""

    def __init__(self, lora: LoraWeights, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ValueError for inconsistent weights."""
        check_lora(lora)
        self.in_features, self.out_features = lora.a.shape[1], lora.out_features
        a, factors, parts = _concatenate_slices(lora)
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
        """Return the table entry by which kernels find this adapter."""
        a, b, blocks, factors, gain, shift = (
            0 if tensor is None else tensor.data_ptr() for tensor in self._tensors()
        )
        return [a, b, blocks, factors, self.rank, gain, shift, 1]


def _concatenate_slices(lora: LoraWeights) -> tuple[Tensor, Tensor, list[LoraSlice]]:
    """Return A with each slice's ranks padded, the factors of its outputs, and the slices with new
    starts.

    Slices that share ranks and a factor still share them.
    """
    matrices: list[Tensor] = []
    factors: list[Tensor] = []
    starts: dict[tuple[int, int, float], int] = {}
    parts, rank = [], 0
    for part in lora.parts:
        slice_rank = part.b.shape[1]
        key = part.start, slice_rank, part.scale
        if key not in starts:
            starts[key] = rank
            size = padded_rank(slice_rank)
            some = lora.a.new_zeros(size, lora.a.shape[1])
            some[:slice_rank] = lora.a[part.start : part.start + slice_rank]
            matrices.append(some)
            factors.append(torch.full((size,), part.scale, dtype=torch.float32))
            rank += size
        parts.append(replace(part, start=starts[key]))
    if not matrices:
        return lora.a.new_zeros(0, lora.a.shape[1]), torch.zeros(0), parts
    return torch.cat(matrices), torch.cat(factors), parts


def blocks_of(parts: list[LoraSlice], columns: int) -> tuple[Tensor, Tensor]:
    """Return B as concatenated blocks of columns, each with the ranks that its columns use, and for
    each block its offset, first rank and number of ranks, int32 [blocks, 3].
    """
    blocks: list[Tensor] = []
    offsets: list[tuple[int, int, int]] = []
    total = 0
    for first in range(0, columns, COLUMN_BLOCK):
        last = min(first + COLUMN_BLOCK, columns)
        block_slices = [
            part
            for part in parts
            if part.b.shape[1] and part.first < last and first < part.first + len(part.b)
        ]
        start = min((part.start for part in block_slices), default=0)
        end = max((part.start + padded_rank(part.b.shape[1]) for part in block_slices), default=0)
        block = torch.zeros(COLUMN_BLOCK, end - start, dtype=parts[0].b.dtype if parts else None)
        for part in block_slices:
            above, below = max(first, part.first), min(last, part.first + len(part.b))
            rows = part.b[above - part.first : below - part.first]
            first_rank = part.start - start
            block[above - first : below - first, first_rank : first_rank + rows.shape[1]] = rows
        blocks.append(block.flatten())
        offsets.append((total, start, end - start))
        total += block.numel()
    if total >= 1 << 31:
        raise ValueError(f"an adapter of {columns} columns has {total} numbers in its B: too many")
    return torch.cat(blocks), torch.tensor(offsets, dtype=torch.int32)


# An embedding needs no shrink: each token has its own row of A. The expand is a linear layer's.

#: Indices of the numbers of a rows entry: addresses of a whole table, of single tokens' ids and of
#: their values, 0 for none; the number of such tokens, and the largest power of two up to that.
TABLE = tl.constexpr(0)
NAMES = tl.constexpr(1)
VALUES = tl.constexpr(2)
COUNT = tl.constexpr(3)
POWER = tl.constexpr(4)


@triton.jit
def embed_kernel(
    x, h, ids, ranks_table, rows_table, order, owners, count, x_stride, width, dtype,
    COLUMNS: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Replace rows of x [T, COLUMNS], and write h float32 [T, width] for `expand_kernel`.

    Grid (blocks of columns, programs of tiles). `dtype`: any pointer to the adapters' dtype.
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = (column < COLUMNS)[None, :]
    lanes = tl.arange(0, RANKS)
    for tile in tl.range(tl.program_id(1), tl.load(count), tl.num_programs(1)):
        owner = tl.load(owners + tile)
        row = tl.load(order + tile * TILE + tl.arange(0, TILE)).to(tl.int64)
        row_mask = row >= 0
        token = tl.load(ids + row, mask=row_mask, other=0)
        entry = entry_of(rows_table, owner)
        to = x + row[:, None] * x_stride + column[None, :]
        if tl.load(entry + TABLE) != 0:
            table = tl.load(entry + TABLE).to(tl.pointer_type(dtype.dtype.element_ty))
            inside = row_mask[:, None] & column_mask
            loaded = tl.load(table + token[:, None] * COLUMNS + column[None, :], mask=inside)
            tl.store(to, loaded.to(x.dtype.element_ty), mask=inside)
        some = tl.load(entry + COUNT)
        if some != 0:
            names = tl.load(entry + NAMES).to(tl.pointer_type(tl.int64))
            # Binary search: how many of the ascending ids are below the token.
            below = tl.zeros((TILE,), tl.int64)
            power = tl.load(entry + POWER)
            while power > 0:
                middle = below + power - 1
                less = (
                    tl.load(names + middle, mask=middle < some, other=9223372036854775807) < token
                )
                below = tl.where(less, below + power, below)
                power = power >> 1
            named = tl.load(names + below, mask=below < some, other=-1) == token
            inside = (row_mask & named)[:, None] & column_mask
            values = tl.load(entry + VALUES).to(tl.pointer_type(dtype.dtype.element_ty))
            loaded = tl.load(values + below[:, None] * COLUMNS + column[None, :], mask=inside)
            tl.store(to, loaded.to(x.dtype.element_ty), mask=inside)
        entry = entry_of(ranks_table, owner)
        ranks = tl.load(entry + RANK).to(tl.int32)
        if tl.program_id(0) == 0:
            inner = tl.load(entry + INNER).to(tl.pointer_type(dtype.dtype.element_ty))
            factors = tl.load(entry + FACTORS).to(tl.pointer_type(tl.float32))
            for rank in tl.range(0, ranks, RANKS):
                offsets = token[:, None] * ranks + rank + lanes[None, :]
                loaded = tl.load(inner + offsets, mask=row_mask[:, None], other=0.0).to(tl.float32)
                loaded *= tl.load(factors + rank + lanes)[None, :]
                to_h = h + row[:, None] * width + rank + lanes[None, :]
                tl.store(to_h, loaded, mask=row_mask[:, None])


class TritonEmbeddingRanks(PackedLora):
    """The low-rank addition to each token's embedding."""

    def __init__(
        self, inner: Tensor, b: Tensor, scale: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`inner` [vocabulary, rank], `b` [hidden, rank]."""
        vocab, rank = inner.shape
        if b.dim() != 2 or b.shape[1] != rank:
            raise ValueError(f"an embedding's b {list(b.shape)} must be of rank {rank}")
        self.in_features, self.out_features, self.rank = vocab, len(b), padded_rank(rank)
        padded = torch.zeros(vocab, self.rank, dtype=dtype, device=device)
        padded[:, :rank] = inner
        outer, blocks = blocks_of([LoraSlice(0, b, 0, scale)], self.out_features)
        factors = torch.full((self.rank,), scale, dtype=torch.float32, device=device)
        self._tensors = (padded, outer.to(dtype).to(device), blocks.to(device), factors)
        self.nbytes = sum(tensor.nbytes for tensor in self._tensors)

    def entry(self) -> list[int]:
        """Return the table entry by which kernels find this adapter."""
        return [*(tensor.data_ptr() for tensor in self._tensors), self.rank, 0, 0, 1]


class TritonEmbeddingRows(PackedLora):
    """Replacements of embedding rows: a whole table, single tokens, or both."""

    rank = 0

    def __init__(self, weights: EmbeddingWeights, dtype: torch.dtype, device: torch.device) -> None:
        rows = [weights.table] if weights.table is not None else []
        rows += [weights.tokens[1]] if weights.tokens is not None else []
        self.in_features, self.out_features = len(rows[0]), rows[0].shape[1]
        self._table = (
            None if weights.table is None else _copy_to_device(weights.table, dtype, device)
        )
        self._names = self._values = None
        if weights.tokens is not None:
            self._names = _copy_to_device(weights.tokens[0], torch.int64, device)
            self._values = _copy_to_device(weights.tokens[1], dtype, device)
        tensors = (self._table, self._names, self._values)
        self._addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        self.nbytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def entry(self) -> list[int]:
        """Return the table entry by which kernels find this adapter."""
        count = 0 if self._names is None else len(self._names)
        power = 1 << (count.bit_length() - 1) if count else 0
        return [*self._addresses, count, power, 0, 0, 1]


def _copy_to_device(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a separate copy, so that the mapping of the adapter's file can be released."""
    return tensor.to(device=device, dtype=dtype, copy=True).contiguous()
