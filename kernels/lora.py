"""Low-rank adapters of linear layers (Hu et al. 2021, "LoRA"), by groups of rows.

Rows of one batch may go through different adapters, or none: each group of rows has its own, with
its own rank. A row's result doesn't depend on the other rows.
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
    """What an adapter adds to neighbouring columns of a linear layer's result.

    Attributes:
        first: the first of the columns.
        b: [columns, rank]; of rank 0 where nothing is added.
        start: of h = x A^T, with the layer's A, columns [start, start + rank) meet b.
        scale: of what comes of it.
    """

    first: int
    b: Tensor
    start: int
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraWeights:
    """What an adapter does to a linear layer: y = gain * (y + added) + shift.

    Attributes:
        a: [rank, K], of all parts over each other; float32, bfloat16 or float16, as each b.
        parts: of columns that don't overlap. Columns that no part names stay as they are.
        out_features: columns of y.
        gain, shift: float32 [N]; None: 1 and 0.
        round_inputs: let bfloat16 weights meet x and h rounded to bfloat16, where that is faster.
    """

    a: Tensor
    parts: Sequence[LoraSlice]
    out_features: int
    gain: Tensor | None = None
    shift: Tensor | None = None
    round_inputs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingWeights:
    """What an adapter does to an embedding's rows: replaces them, then adds scale * inner b^T.

    Attributes:
        table: [vocabulary, hidden]; None: the model's own.
        tokens: ids, int64 ascending, and their rows [ids, hidden], which replace the table's.
        inner, b: [vocabulary, rank] and [hidden, rank]; None: nothing is added.
    """

    table: Tensor | None = None
    tokens: tuple[Tensor, Tensor] | None = None
    inner: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0


def check_lora(lora: LoraWeights) -> None:
    """Raise ValueError for what doesn't fit together."""
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
    """Where a file has the numbers of `LoraWeights`, which have neither gain nor shift.

    Attributes:
        a: where the pieces of a begin that lie over each other, and their ranks.
        parts: of columns that don't overlap.
        in_features, out_features: K and N.
        round_inputs: see `LoraWeights`.
    """

    a: Sequence[tuple[int, int]]
    parts: Sequence[LoraSliceLayout]
    in_features: int
    out_features: int
    round_inputs: bool = False


class LoraTemplate(ABC):
    """Adapters whose files have the same numbers in the same places."""

    @abstractmethod
    def fill(self, values: Tensor) -> list[PackedLora] | None:
        """What `KernelSet.pack_lora` makes of each plan, of a file's numbers; nothing is kept of
        them. None where one of them is NaN or infinite. Any thread may call it.
        """


class PackedLora(ABC):
    """`LoraWeights` as a set of kernels likes them best."""

    in_features: int
    out_features: int
    rank: int
    nbytes: int


class LoraTable:
    """An adapter's `PackedLora` of all layers, for a `CompiledDecoder` to walk through."""


#: Rows of a step, int64 and ascending, and what they go through.
LoraSegment = tuple[PackedLora, Tensor]
TableSegment = tuple[LoraTable, Tensor]
#: What an adapter does to a mixture of experts, by the slots of `ExpertLayers.linears`.
ExpertUse = tuple[Mapping[str, PackedLora], Tensor]
#: Of each layer, by "qkv", "o", "up" and "down", or the slots of its experts; what an adapter
#: leaves as it is isn't there.
LayerLoras = Sequence[Mapping[str, PackedLora]]


class TorchLora(PackedLora):
    """The weights as they are, for torch."""

    def __init__(self, lora: LoraWeights, device: torch.device) -> None:
        """Raises ValueError for what doesn't fit together."""
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
    """`KernelSet.add_lora` by torch. Raises ValueError for what other kernels have packed."""
    for lora, rows in uses:
        if not isinstance(lora, TorchLora):
            raise ValueError("an adapter must be packed by these kernels")
        lora.add(y, x, rows)


# What a step brings is three vectors of rows, sorted by slot on the host and padded to a length
# that follows from the number of rows alone, so that a graph replays any mixture of adapters.

#: The number of a layer, and which of its linear layers. The layer behind the last one is the
#: model's two ends: an embedding's low ranks, the rows that it replaces, and the output layer.
LoraTarget = tuple[int, str]
EMBEDDING, EMBEDDING_ROWS, HEAD = "embedding", "embedding_rows", "head"


@dataclass(frozen=True, slots=True)
class LoraMapping:
    """A step's rows by the slots of their adapters, in tiles that each have one slot.

    Attributes:
        order: int32 [max_tiles * tile]: rows, -1 where there is none.
        owners: int32 [max_tiles]: each tile's slot.
        count: int32 [1]: tiles that there are.
    """

    order: Tensor
    owners: Tensor
    count: Tensor

    @property
    def tile(self) -> int:
        """Rows of a tile."""
        return len(self.order) // len(self.owners)

    def moved(self, positions: Tensor) -> LoraMapping:
        """With row i at positions[i], int64."""
        rows = self.order.clamp(min=0).long()
        moved = torch.where(self.order < 0, -1, positions[rows].to(torch.int32))
        return replace(self, order=moved)


#: What adapters do to experts, each of whose rows has an expert of its own.
EXPERTS = {"up": "experts.up", "down": "experts.down"}


class ExpertRowGroups(Protocol):
    """Rows sorted by expert, in tiles that each have one.

    Attributes:
        order: int32 [tiles * tile]: rows; `rows` where there is none.
        group: int32 [tiles]: each tile's expert, -1 for tiles that aren't needed.
        rows: how many there are.
        tile: rows of a tile.
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
    """An adapter's slot; it is freed once this object is released."""

    def __init__(self, slot: int, references: object) -> None:
        """`references`: what the slot points to."""
        self.slot, self.references = slot, references


class LoraSlots(ABC):
    """The adapters of one model on its device.

    Attributes:
        max_adapters: adapters that there can be at once.
    """

    max_adapters: int

    @abstractmethod
    def tile(self, rows: int) -> int:
        """Rows of a tile, in a step of so many."""

    @abstractmethod
    def pack(self, lora: LoraWeights) -> PackedLora:
        """What an adapter does to one linear layer, on the device.

        Raises ValueError for what doesn't fit together.
        """

    @abstractmethod
    def pack_embedding(self, weights: EmbeddingWeights) -> dict[str, PackedLora]:
        """What an adapter does to the embedding, by the places of the model's ends.

        Raises ValueError for what doesn't fit together.
        """

    @abstractmethod
    def put(self, layers: LayerLoras) -> SlotTable:
        """Give an adapter, packed by `pack`, a slot. Any thread may call it.

        Raises ValueError where there is none left.
        """

    @abstractmethod
    def add(self, target: LoraTarget, y: Tensor, x: Tensor, rows: LoraMapping) -> None:
        """Change y [T, N], the result of the linear layer at `target` for x [T, K], as
        `KernelSet.add_lora` does; waits for nothing.
        """

    @abstractmethod
    def embed(self, layer: int, x: Tensor, token_ids: Tensor, rows: LoraMapping) -> None:
        """Change x [T, hidden], the embeddings of token_ids int64 [T]; waits for nothing.

        `layer`: the number that the model's ends have.
        """

    @abstractmethod
    def slot_by_row(self, rows: LoraMapping, count: int) -> Tensor:
        """int32 [count]: the slot of each of a step's rows, -1 for none; doesn't synchronise."""

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
        """Change y [R, N], what experts made of rows, R of them in `groups`; waits for nothing.

        Row i is that of x [R / shared, K] at i // shared, whose slots are `owners`. `target` is a
        layer and one of `EXPERTS`.
        """

    @abstractmethod
    def add_expert(
        self, target: LoraTarget, expert: int, y: Tensor, x: Tensor, owners: Tensor
    ) -> None:
        """The same for rows that all have one expert."""

    def max_tiles(self, rows: int) -> int:
        """Maximum number of tiles for this many rows, whatever their adapters are."""
        return min(rows, -(-rows // self.tile(rows)) + self.max_adapters - 1)

    def mapping_lengths(self, rows: int) -> tuple[int, int]:
        """Lengths of `order` and `owners` that suffice for any step of up to this many rows."""
        tiles = [(self.max_tiles(size), self.tile(size)) for size in range(1, rows + 1)]
        return max(num_tiles * tile for num_tiles, tile in tiles), max(
            num_tiles for num_tiles, _ in tiles
        )

    def sort(
        self, groups: Sequence[tuple[int, np.ndarray]], rows: int, *, padded: bool
    ) -> list[np.ndarray]:
        """The three vectors of `LoraMapping`, for slots and their rows of a step of `rows`.

        `padded`: as long as any mixture could need, for a graph.
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
    """A step's rows at a mixture of experts, by the slots of their adapters.

    Attributes:
        slots: the adapters.
        layer: the mixture's layer.
        rows: the step's.
    """

    slots: LoraSlots
    layer: int
    rows: LoraMapping

    def add(self, slot: str, y: Tensor, x: Tensor) -> None:
        """Change y, what a layer that every row goes through made of x."""
        self.slots.add((self.layer, slot), y, x, self.rows)

    def slot_by_row(self, count: int) -> Tensor:
        return self.slots.slot_by_row(self.rows, count)

    def target(self, kind: str) -> LoraTarget:
        """Of the experts' layers "up" or "down"."""
        return self.layer, EXPERTS[kind]


class SharedExpertLora:
    """The layers of a mixture that every row goes through."""

    def __init__(self, lora: MoeLoraMapping | None) -> None:
        """`lora`: None: nobody goes through an adapter."""
        self._lora = lora

    def __call__(self, slot: str, layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """What one makes of x, and what adapters add."""
        y = layer(x)
        if self._lora is not None:
            self._lora.add(slot, y, x)
        return y
