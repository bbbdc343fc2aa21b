"""Adapters of a device whose steps are recorded: each has a slot, and rows say which is theirs.

What a step brings is three vectors of rows, sorted by slot on the host and padded to a length that
follows from the number of rows alone, so that a graph replays any mixture of adapters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.lora import EmbeddingWeights, LayerLoras, LoraTable, LoraWeights, PackedLora

#: The number of a layer, and which of its linear layers. The layer behind the last one is the
#: model's two ends: an embedding's low ranks, the rows that it replaces, and the output layer.
Place = tuple[int, str]
EMBEDDING, EMBEDDING_ROWS, HEAD = "embedding", "embedding_rows", "head"


@dataclass(frozen=True, slots=True)
class LoraRows:
    """A step's rows by the slots of their adapters, in tiles that each have one slot.

    Attributes:
        order: int32 [most tiles * tile]: rows, -1 where there is none.
        owners: int32 [most tiles]: each tile's slot.
        count: int32 [1]: tiles that there are.
    """

    order: Tensor
    owners: Tensor
    count: Tensor

    @property
    def tile(self) -> int:
        """Rows of a tile."""
        return len(self.order) // len(self.owners)

    def moved(self, places: Tensor) -> LoraRows:
        """With row i at places[i], int64."""
        there = self.order.clamp(min=0).long()
        moved = torch.where(self.order < 0, -1, places[there].to(torch.int32))
        return replace(self, order=moved)


#: What adapters do to experts, each of whose rows has an expert of its own.
EXPERTS = {"up": "experts.up", "down": "experts.down"}


class RowGroups(Protocol):
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
    """An adapter's slot; it is free again once nobody holds this."""

    def __init__(self, slot: int, held: object) -> None:
        """`held`: what the slot points to."""
        self.slot, self.held = slot, held


class LoraSlots(ABC):
    """The adapters of one model on its device.

    Attributes:
        most: adapters that there can be at once.
    """

    most: int

    @abstractmethod
    def tile(self, rows: int) -> int:
        """Rows of a tile, in a step of so many."""

    @abstractmethod
    def pack(self, lora: LoraWeights) -> PackedLora:
        """What an adapter does to one linear layer, on the device.

        Raises ValueError for what doesn't fit together.
        """

    @abstractmethod
    def pack_embedding(self, given: EmbeddingWeights) -> dict[str, PackedLora]:
        """What an adapter does to the embedding, by the places of the model's ends.

        Raises ValueError for what doesn't fit together.
        """

    @abstractmethod
    def put(self, layers: LayerLoras) -> SlotTable:
        """Give an adapter, packed by `pack`, a slot. Any thread may call it.

        Raises ValueError where there is none left.
        """

    @abstractmethod
    def add(self, place: Place, y: Tensor, x: Tensor, rows: LoraRows) -> None:
        """Change y [T, N], the result of the linear layer at `place` for x [T, K], as
        `KernelSet.add_lora` does; waits for nothing.
        """

    @abstractmethod
    def embed(self, layer: int, x: Tensor, token_ids: Tensor, rows: LoraRows) -> None:
        """Change x [T, hidden], the embeddings of token_ids int64 [T]; waits for nothing.

        `layer`: the number that the model's ends have.
        """

    @abstractmethod
    def owners(self, rows: LoraRows, count: int) -> Tensor:
        """int32 [count]: the slot of each of a step's rows, -1 for none; waits for nothing."""

    @abstractmethod
    def add_experts(
        self, place: Place, y: Tensor, x: Tensor, owners: Tensor, groups: RowGroups, shared: int = 1
    ) -> None:
        """Change y [R, N], what experts made of rows, R of them in `groups`; waits for nothing.

        Row i is that of x [R / shared, K] at i // shared, whose slots are `owners`. `place` is a
        layer and one of `EXPERTS`.
        """

    @abstractmethod
    def add_expert(self, place: Place, expert: int, y: Tensor, x: Tensor, owners: Tensor) -> None:
        """The same for rows that all have one expert."""

    def most_tiles(self, rows: int) -> int:
        """Tiles that so many rows may need, whatever their adapters are."""
        return min(rows, -(-rows // self.tile(rows)) + self.most - 1)

    def room(self, rows: int) -> tuple[int, int]:
        """Lengths of `order` and `owners` that hold any step of up to so many rows."""
        tiles = [(self.most_tiles(size), self.tile(size)) for size in range(1, rows + 1)]
        return max(most * tile for most, tile in tiles), max(most for most, _ in tiles)

    def sort(
        self, groups: Sequence[tuple[int, np.ndarray]], rows: int, *, padded: bool
    ) -> list[np.ndarray]:
        """The three vectors of `LoraRows`, for slots and their rows of a step of `rows`.

        `padded`: as long as any mixture could need, for a graph.
        """
        tile = self.tile(rows)
        counts = [-(-len(own) // tile) for _, own in groups]
        tiles = self.most_tiles(rows) if padded else sum(counts)
        order = np.full(tiles * tile, -1, dtype=np.int32)
        owners = np.full(tiles, -1, dtype=np.int32)
        first = 0
        for (slot, own), count in zip(groups, counts, strict=True):
            order[first * tile : first * tile + len(own)] = own
            owners[first : first + count] = slot
            first += count
        return [order, owners, np.array([first], dtype=np.int32)]


@dataclass(frozen=True, slots=True)
class MixtureRows:
    """A step's rows at a mixture of experts, by the slots of their adapters.

    Attributes:
        slots: the adapters.
        layer: the mixture's layer.
        rows: the step's.
    """

    slots: LoraSlots
    layer: int
    rows: LoraRows

    def add(self, slot: str, y: Tensor, x: Tensor) -> None:
        """Change y, what a layer that every row goes through made of x."""
        self.slots.add((self.layer, slot), y, x, self.rows)

    def owners(self, count: int) -> Tensor:
        """See `LoraSlots.owners`."""
        return self.slots.owners(self.rows, count)

    def place(self, kind: str) -> Place:
        """Of the experts' layers "up" or "down"."""
        return self.layer, EXPERTS[kind]


class AllRows:
    """The layers of a mixture that every row goes through."""

    def __init__(self, lora: MixtureRows | None) -> None:
        """`lora`: None: nobody goes through an adapter."""
        self._lora = lora

    def __call__(self, slot: str, layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """What one makes of x, and what adapters add."""
        y = layer(x)
        if self._lora is not None:
            self._lora.add(slot, y, x)
        return y
