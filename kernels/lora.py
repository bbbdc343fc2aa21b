"""Low-rank adapters of linear layers (Hu et al. 2021, "LoRA") for groups of rows.

Each group of rows in a batch may have an adapter of its own, with any rank. A row's result doesn't
depend on the other rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LoraSlice:
    """An adapter's addition to consecutive columns of a linear layer's result.

    Attributes:
        first: the first of the columns.
        b: [columns, rank]; with rank 0 nothing is added.
        start: b is multiplied with columns [start, start + rank) of h = x A^T.
        scale: the factor of the product.
    """

    first: int
    b: Tensor
    start: int
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraWeights:
    """An adapter of a linear layer: y = gain * (y + added) + shift.

    Attributes:
        a: [rank, K], the A matrices of all parts stacked; float32, bfloat16 or float16, like b.
        parts: additions to columns that don't overlap. Other columns are unchanged.
        out_features: number of columns of y.
        gain, shift: float32 [N]; None for 1 and 0.
        round_inputs: allow rounding x and h to bfloat16 for bfloat16 weights where it is faster.
    """

    a: Tensor
    parts: Sequence[LoraSlice]
    out_features: int
    gain: Tensor | None = None
    shift: Tensor | None = None
    round_inputs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingWeights:
    """An adapter of an embedding: replaces rows, then adds scale * inner b^T.

    Attributes:
        table: [vocabulary, hidden]; None for the model's own.
        tokens: ids, int64 ascending, and rows [ids, hidden] that replace the table's.
        inner, b: [vocabulary, rank] and [hidden, rank]; None if nothing is added.
    """

    table: Tensor | None = None
    tokens: tuple[Tensor, Tensor] | None = None
    inner: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0


def check_lora(lora: LoraWeights) -> None:
    """Raise ValueError for inconsistent arguments."""
    rank, n = lora.a.shape[0], lora.out_features
    if lora.a.dim() != 2 or lora.a.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError("a must be [rank, K] of float32, bfloat16 or float16")
    for part in lora.parts:
        columns, slice_rank = part.b.shape
        if part.b.dtype != lora.a.dtype or not 0 <= part.start <= part.start + slice_rank <= rank:
            raise ValueError(f"a part's b {list(part.b.shape)} must be of a's dtype and ranks")
        if not 0 <= part.first <= part.first + columns <= n:
            raise ValueError(f"a part's columns must be among the layer's {n}")
    for vector in (lora.gain, lora.shift):
        if vector is not None and (vector.shape != (n,) or vector.dtype != torch.float32):
            raise ValueError(f"gain and shift must be float32 [{n}]")


@dataclass(frozen=True, slots=True)
class LoraSliceLayout:
    """A `LoraSlice` whose b begins at number `offset` of a file.

    Attributes:
        first, columns, start, rank, scale: as in `LoraSlice`; b is [columns, rank].
    """

    offset: int
    first: int
    columns: int
    start: int
    rank: int
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraLayout:
    """The positions in a file of the numbers of `LoraWeights` without gain and shift.

    Attributes:
        a: the positions of the stacked parts of a, and their ranks.
        parts: additions to columns that don't overlap.
        in_features, out_features: K and N.
        round_inputs: see `LoraWeights`.
    """

    a: Sequence[tuple[int, int]]
    parts: Sequence[LoraSliceLayout]
    in_features: int
    out_features: int
    round_inputs: bool = False


class LoraTemplate(ABC):
    """Packs adapters whose files have the same layout."""

    @abstractmethod
    def fill(self, values: Tensor) -> list[PackedLora] | None:
        """Pack a file's numbers as `KernelSet.pack_lora` would, without keeping references to them.
        Returns None if any number is NaN or infinite. May be called from any thread.
        """


class PackedLora(ABC):
    """`LoraWeights` in the layout of a kernel set."""

    in_features: int
    out_features: int
    rank: int
    nbytes: int


class LoraTable:
    """An adapter's `PackedLora` of all layers, for a `CompiledDecoder`."""


#: Rows of a step, int64 and ascending, and their adapter.
LoraSegment = tuple[PackedLora, Tensor]
TableSegment = tuple[LoraTable, Tensor]
#: An adapter's additions to a mixture of experts, by the slots of `ExpertLayers.linears`.
ExpertUse = tuple[Mapping[str, PackedLora], Tensor]
#: An adapter's additions to each layer, by "qkv", "o", "up" and "down" or the slots of its experts.
#: Unchanged layers are absent.
LayerLoras = Sequence[Mapping[str, PackedLora]]


class TorchLora(PackedLora):
    """The unpacked weights, for torch."""

    def __init__(self, lora: LoraWeights, device: torch.device) -> None:
        """Raises ValueError for inconsistent arguments."""
        check_lora(lora)
        self.a, self.gain, self.shift = lora.a.to(device), lora.gain, lora.shift
        self.parts = [replace(part, b=part.b.to(device)) for part in lora.parts]
        self.rank, self.in_features = lora.a.shape
        self.out_features = lora.out_features
        self.nbytes = self.a.nbytes + sum(part.b.nbytes for part in self.parts)

    def add(self, y: Tensor, x: Tensor, rows: Tensor) -> None:
        rows = rows.to(y.device)
        h = x[rows].float() @ self.a.float().T
        for part in self.parts:
            columns, rank = part.b.shape
            columns_slice = slice(part.first, part.first + columns)
            scaled = h[:, part.start : part.start + rank] * part.scale
            sums = y[rows, columns_slice].float() + scaled @ part.b.float().T
            if self.gain is not None:
                sums *= self.gain[columns_slice].to(y.device)
            if self.shift is not None:
                sums += self.shift[columns_slice].to(y.device)
            y[rows, columns_slice] = sums.to(y.dtype)


def add_lora_torch(y: Tensor, x: Tensor, uses: Sequence[LoraSegment]) -> None:
    """Implement `KernelSet.add_lora` in torch. Raises ValueError for adapters of other kernels."""
    for lora, rows in uses:
        if not isinstance(lora, TorchLora):
            raise ValueError("an adapter must be packed by these kernels")
        lora.add(y, x, rows)


# Three vectors, sorted by slot on the host, describe a step's adapters. Their padded length depends
# only on the number of rows, so that a CUDA graph can replay any mixture of adapters.

#: The index of a layer, and one of its linear layers. The index after the last layer stands for the
#: embedding's low-rank addition, its replaced rows, and the output layer.
LoraTarget = tuple[int, str]
EMBEDDING, EMBEDDING_ROWS, HEAD = "embedding", "embedding_rows", "head"


@dataclass(frozen=True, slots=True)
class LoraMapping:
    """A step's rows sorted by adapter slot, in tiles with one slot each.

    Attributes:
        order: int32 [max_tiles * tile], the rows, padded with -1.
        owners: int32 [max_tiles], each tile's slot.
        count: int32 [1], the number of tiles.
    """

    order: Tensor
    owners: Tensor
    count: Tensor

    @property
    def tile(self) -> int:
        """Number of rows in a tile."""
        return len(self.order) // len(self.owners)

    def moved(self, positions: Tensor) -> LoraMapping:
        """Return the mapping with row i at positions[i], int64."""
        rows = self.order.clamp(min=0).long()
        moved = torch.where(self.order < 0, -1, positions[rows].to(torch.int32))
        return replace(self, order=moved)


# Adapters of experts, where each row has an expert.
EXPERTS = {"up": "experts.up", "down": "experts.down"}


class ExpertRowGroups(Protocol):
    """Rows sorted by expert, in tiles with one expert each.

    Attributes:
        order: int32 [tiles * tile], the rows, padded with `rows`.
        group: int32 [tiles], each tile's expert, -1 for unused tiles.
        rows: the number of rows.
        tile: the number of rows in a tile.
    """

    @property
    def order(self) -> Tensor: ...
    @property
    def group(self) -> Tensor: ...
    @property
    def rows(self) -> int: ...
    @property
    def tile(self) -> int: ...


class SlotTable(LoraTable):
    """An adapter's slot, which is freed when this object is released."""

    def __init__(self, slot: int, references: object) -> None:
        """`references` are objects that the slot points to."""
        self.slot, self.references = slot, references


class LoraSlots(ABC):
    """A model's adapters on its device.

    Attributes:
        max_adapters: the number of slots.
    """

    max_adapters: int

    @abstractmethod
    def tile(self, rows: int) -> int:
        """Return the number of rows in a tile, for a step with this many rows."""

    @abstractmethod
    def pack(self, lora: LoraWeights) -> PackedLora:
        """Copy an adapter of a linear layer to the device.

        Raises ValueError for inconsistent arguments.
        """

    @abstractmethod
    def pack_embedding(self, weights: EmbeddingWeights) -> dict[str, PackedLora]:
        """Copy an adapter of the embedding to the device; returns its parts by target.

        Raises ValueError for inconsistent arguments.
        """

    @abstractmethod
    def put(self, layers: LayerLoras) -> SlotTable:
        """Assign a slot to an adapter packed by `pack`. May be called from any thread.

        Raises ValueError if no slot is free.
        """

    @abstractmethod
    def add(self, target: LoraTarget, y: Tensor, x: Tensor, rows: LoraMapping) -> None:
        """Change y [T, N], the result of the linear layer `target` for x [T, K], like
        `KernelSet.add_lora`, without synchronizing.
        """

    @abstractmethod
    def embed(self, layer: int, x: Tensor, token_ids: Tensor, rows: LoraMapping) -> None:
        """Change x [T, hidden], the embeddings of token_ids int64 [T], without synchronizing.

        `layer` is the index after the last layer.
        """

    @abstractmethod
    def slot_by_row(self, rows: LoraMapping, count: int) -> Tensor:
        """Return each row's slot, int32 [count], -1 for none, without synchronizing."""

    @abstractmethod
    def add_experts(
        self,
        target: LoraTarget,
        y: Tensor,
        x: Tensor,
        owners: Tensor,
        groups: ExpertRowGroups,
        shared: int = 1,
    ) -> None:
        """Change y [R, N], the experts' results for the R rows of `groups`, without synchronizing.

        Row i belongs to row i // shared of x [R / shared, K], whose slots are `owners`. `target` is
        a layer and one of `EXPERTS`.
        """

    @abstractmethod
    def add_expert(
        self, target: LoraTarget, expert: int, y: Tensor, x: Tensor, owners: Tensor
    ) -> None:
        """Do the same for rows of a single expert."""

    def max_tiles(self, rows: int) -> int:
        """Return the maximum number of tiles for this many rows, whatever their adapters are."""
        return min(rows, -(-rows // self.tile(rows)) + self.max_adapters - 1)

    def mapping_lengths(self, rows: int) -> tuple[int, int]:
        """Return lengths of `order` and `owners` that suffice for steps of up to this many rows."""
        tiles = [(self.max_tiles(size), self.tile(size)) for size in range(1, rows + 1)]
        return max(num_tiles * tile for num_tiles, tile in tiles), max(
            num_tiles for num_tiles, _ in tiles
        )

    def sort(
        self, groups: Sequence[tuple[int, np.ndarray]], rows: int, *, padded: bool
    ) -> list[np.ndarray]:
        """Return the three vectors of `LoraMapping` for slots and their rows in a step of `rows`.

        With `padded` they have the maximum length, for a CUDA graph.
        """
        tile = self.tile(rows)
        counts = [-(-len(slot_rows) // tile) for _, slot_rows in groups]
        tiles = self.max_tiles(rows) if padded else sum(counts)
        order = np.full(tiles * tile, -1, dtype=np.int32)
        owners = np.full(tiles, -1, dtype=np.int32)
        first = 0
        for (slot, slot_rows), count in zip(groups, counts, strict=True):
            order[first * tile : first * tile + len(slot_rows)] = slot_rows
            owners[first : first + count] = slot
            first += count
        return [order, owners, np.array([first], dtype=np.int32)]


@dataclass(frozen=True, slots=True)
class MoeLoraMapping:
    """The adapters of a step's rows in a mixture of experts.

    Attributes:
        slots: the model's adapters.
        layer: the index of the mixture's layer.
        rows: the step's mapping of rows to slots.
    """

    slots: LoraSlots
    layer: int
    rows: LoraMapping

    def add(self, slot: str, y: Tensor, x: Tensor) -> None:
        """Change y, the result for x of a layer that processes every row."""
        self.slots.add((self.layer, slot), y, x, self.rows)

    def slot_by_row(self, count: int) -> Tensor:
        return self.slots.slot_by_row(self.rows, count)

    def target(self, kind: str) -> LoraTarget:
        """Return the target of the experts' "up" or "down" layers."""
        return self.layer, EXPERTS[kind]


class SharedExpertLora:
    """A mixture's layers that process every row."""

    def __init__(self, lora: MoeLoraMapping | None) -> None:
        """`lora` is None if no row has an adapter."""
        self._lora = lora

    def __call__(self, slot: str, layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return a layer's result for x with the adapters' additions."""
        y = layer(x)
        if self._lora is not None:
            self._lora.add(slot, y, x)
        return y
