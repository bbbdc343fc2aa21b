"""`TritonLoraSlots`: a model's adapters in a table that recorded kernels read."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping

import torch
import triton
from torch import Tensor

from kernels.lora import (
    EMBEDDING,
    EMBEDDING_ROWS,
    EXPERTS,
    EmbeddingWeights,
    ExpertRowGroups,
    LayerLoras,
    LoraMapping,
    LoraSlots,
    LoraTarget,
    LoraWeights,
    PackedLora,
    SlotTable,
)
from kernels.tensors import describe
from kernels.triton.launch import INTERPRETED, launch
from kernels.triton.lora.experts import add_experts, one_group, slots_of_rows
from kernels.triton.lora.kernels import (
    CHANGES,
    COLUMN_BLOCK,
    FIELDS,
    GAIN,
    INNER,
    RANKS,
    SHIFT,
    expand_kernel,
    shrink_kernel,
)
from kernels.triton.lora.packing import (
    TritonEmbeddingRanks,
    TritonEmbeddingRows,
    TritonLora,
    embed_kernel,
    padded_rank,
)

_RANKS: int = RANKS.value
_FIELDS: int = FIELDS.value
FEW_ROWS = 512
"""Maximum rows for which tiles are small and the depth of a shrink is split."""
_KINDS = (TritonLora, TritonEmbeddingRanks, TritonEmbeddingRows)
PROGRAMS = 2 if INTERPRETED else 64
"""Maximum programs that share the tiles of a block of columns."""


class TritonLoraSlots(LoraSlots):
    """`LoraSlots` by a table of addresses.

    Args:
        targets: the linear layers that adapters may change, with their maximum number of slices.
        max_adapters: maximum number of adapters at a time.
        max_rank: maximum rank of a slice.
        dtype: dtype of the rows and of the adapters' matrices.
        alike: whether a row gets the same bits in steps of any size.
        experts: number of experts of each mixture, 0 for none.
    """

    def __init__(
        self, targets: Mapping[LoraTarget, int], max_adapters: int, max_rank: int,
        dtype: torch.dtype, device: torch.device, *, alike: bool = False, experts: int = 0,
    ) -> None:  # fmt: skip
        self.max_adapters, self._max_rank, self._dtype, self._device = (
            max_adapters,
            max_rank,
            dtype,
            device,
        )
        self._alike, self._experts = alike, experts
        self._index = {target: index for index, target in enumerate(targets)}
        self._widths = [parts * padded_rank(max_rank) for parts in targets.values()]
        shape = (len(targets), max_adapters, _FIELDS)
        self.table = torch.zeros(shape, dtype=torch.int64, device=device)
        #: Tells kernels the dtype; they don't read its value.
        self._kind = torch.empty(1, dtype=dtype, device=device)
        self._free = list(range(max_adapters))
        self._lock = threading.Lock()

    def tile(self, rows: int) -> int:
        return 16 if INTERPRETED or self._alike or rows <= FEW_ROWS else 64

    def pack(self, lora: LoraWeights) -> TritonLora:
        if any(part.b.shape[1] > self._max_rank for part in lora.parts):
            raise ValueError(f"ranks above {self._max_rank} don't fit")
        return TritonLora(lora, self._dtype, self._device)

    def pack_embedding(self, weights: EmbeddingWeights) -> dict[str, PackedLora]:
        packed: dict[str, PackedLora] = {}
        if weights.table is not None or weights.tokens is not None:
            packed[EMBEDDING_ROWS] = TritonEmbeddingRows(weights, self._dtype, self._device)
        if weights.inner is not None and weights.b is not None:
            if weights.inner.shape[1] > self._max_rank:
                raise ValueError(f"ranks above {self._max_rank} don't fit")
            packed[EMBEDDING] = TritonEmbeddingRanks(
                weights.inner, weights.b, weights.scale, self._dtype, self._device
            )
        return packed

    def put(self, layers: LayerLoras) -> SlotTable:
        entries = torch.zeros(len(self._index), _FIELDS, dtype=torch.int64)
        #: Target index of a mixture -> its experts' entries, to which `entries` points.
        mixtures: dict[int, Tensor] = {}
        for number, layer in enumerate(layers):
            for slot, lora in layer.items():
                kind, _, expert = slot.partition(".")
                index = self._index.get((number, EXPERTS[kind] if expert else slot))
                if index is None or not isinstance(lora, _KINDS) or lora.rank > self._widths[index]:
                    raise ValueError(f"layer {number} has no adapters of {slot} like this")
                if not expert:
                    entries[index] = torch.tensor(lora.entry())
                    continue
                if index not in mixtures:
                    shape = (self._experts, _FIELDS)
                    mixtures[index] = torch.zeros(shape, dtype=torch.int64)
                mixtures[index][int(expert)] = torch.tensor(lora.entry())
        references = [
            layers,
            *(self._point(entries[index], experts) for index, experts in mixtures.items()),
        ]
        with self._lock:
            if not self._free:
                raise ValueError(f"all {self.max_adapters} slots of adapters are taken")
            free = self._free.pop()
        # The copy is ordered after steps launched before, which may read the slot's old entries.
        self.table[:, free].copy_(entries.to(self._device))
        table = SlotTable(free, references)
        weakref.finalize(table, self._free.append, free)
        return table

    def _point(self, entry: Tensor, experts: Tensor) -> Tensor:
        """Point a mixture's entry to its experts' entries; returns these, which must outlive it."""
        if experts[:, GAIN.value : SHIFT.value + 1].any():
            raise ValueError("experts have adapters of matrices alone")
        device_entries = experts.to(self._device)
        # A mixture's entry begins with the address of its experts' entries.
        entry[INNER.value], entry[CHANGES.value] = device_entries.data_ptr(), 1
        return device_entries

    def add(self, target: LoraTarget, y: Tensor, x: Tensor, rows: LoraMapping) -> None:
        index = self._index[target]
        if x.dtype != self._dtype or len(x) != len(y) or y.stride(1) != 1:
            raise ValueError(f"y {describe(y)} and x {describe(x)} don't go with these adapters")
        x = x if x.stride(1) == 1 else x.contiguous()
        (tokens, depth), columns, width = x.shape, y.shape[1], self._widths[index]
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
            shrink_kernel, (min(width // _RANKS, 4), programs, splits), h, x, self.table[index],
            rows.order, rows.owners, rows.count, tokens, x.stride(0), width, DEPTH=depth,
            BLOCK_K=block_k, **shared,
        )  # fmt: skip
        launch(
            expand_kernel, (triton.cdiv(columns, COLUMN_BLOCK), programs), y, h, self.table[index],
            rows.order, rows.owners, rows.count, tokens, y.stride(0), width, x,
            COLUMNS=columns, BLOCK_N=COLUMN_BLOCK, **shared,
        )  # fmt: skip

    def embed(self, layer: int, x: Tensor, token_ids: Tensor, rows: LoraMapping) -> None:
        ranks_index, rows_index = self._index[layer, EMBEDDING], self._index[layer, EMBEDDING_ROWS]
        if x.stride(1) != 1 or token_ids.dtype != torch.int64 or len(token_ids) != len(x):
            raise ValueError(f"x {describe(x)} and token ids {describe(token_ids)} don't fit")
        (tokens, columns), width = x.shape, self._widths[ranks_index]
        h = torch.empty((tokens, width), dtype=torch.float32, device=x.device)
        cut = {"COLUMNS": columns, "TILE": rows.tile, "BLOCK_N": COLUMN_BLOCK, "num_warps": 4}
        grid = triton.cdiv(columns, COLUMN_BLOCK), min(len(rows.owners), PROGRAMS)
        launch(
            embed_kernel, grid, x, h, token_ids, self.table[ranks_index], self.table[rows_index],
            rows.order, rows.owners, rows.count, x.stride(0), width, self._kind, **cut,
        )  # fmt: skip
        wide = self._dtype == torch.float32
        launch(
            expand_kernel, grid, x, h, self.table[ranks_index], rows.order, rows.owners, rows.count,
            tokens, x.stride(0), width, self._kind, **cut, SPLITS=1,
            PRECISION="tf32x3" if wide else "tf32",
            UPCAST=INTERPRETED and self._dtype == torch.bfloat16, num_stages=2 if wide else 4,
        )  # fmt: skip

    def slot_by_row(self, rows: LoraMapping, count: int) -> Tensor:
        return slots_of_rows(rows, count)

    def add_experts(
        self,
        target: LoraTarget,
        y: Tensor,
        x: Tensor,
        owners: Tensor,
        groups: ExpertRowGroups,
        shared: int = 1,
    ) -> None:
        index = self._index[target]
        if x.dtype != self._dtype or y.stride(1) != 1 or len(y) != groups.rows:
            raise ValueError(f"y {describe(y)} and x {describe(x)} don't go with these adapters")
        if len(x) * shared != len(y) or owners.shape != (len(x),):
            raise ValueError(f"{len(x)} rows of x, {len(owners)} owners for {len(y)} rows of y")
        add_experts(
            self.table[index], self._widths[index], y, x if x.stride(1) == 1 else x.contiguous(),
            owners, groups, shared, alike=self._alike,
        )  # fmt: skip

    def add_expert(
        self, target: LoraTarget, expert: int, y: Tensor, x: Tensor, owners: Tensor
    ) -> None:
        self.add_experts(target, y, x, owners, one_group(len(x), expert, x.device))
