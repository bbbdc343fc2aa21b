"""Adapters of a device whose steps are recorded: each has a slot, and rows say which is theirs.

What a step brings is three vectors of rows, sorted by slot on the host and padded to a length that
follows from the number of rows alone, so that a graph replays any mixture of adapters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
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
