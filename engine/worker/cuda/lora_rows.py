"""`StaticLoraRows`: which rows of a step go through which adapters, where graphs read it."""

from __future__ import annotations

import torch

from engine.models.decoder import NativeDecoder
from engine.models.interface import EngineModel
from engine.worker.cuda.dispatcher import BatchDescriptor
from kernels.lora_slots import LoraRows, LoraSlots


class StaticLoraRows:
    """Buffers at fixed addresses; none where the model's adapters have no slots."""

    def __init__(self, slots: LoraSlots | None, max_tokens: int, device: torch.device) -> None:
        """`max_tokens`: of the largest graph."""
        self._slots, self._whole = slots, None
        if slots is not None:
            rows, tiles = slots.room(max_tokens)
            sizes = (rows, tiles, 1)
            self._whole = LoraRows(
                *(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes)
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        whole = self._whole
        return 0 if whole is None else sum(each.nbytes for each in _parts(whole))

    def of(self, graph: BatchDescriptor) -> LoraRows | None:
        """What a graph of that size reads; None: it runs no adapters."""
        whole, slots = self._whole, self._slots
        if whole is None or slots is None or not graph.adapted:
            return None
        tiles, tile = slots.most_tiles(graph.num_tokens), slots.tile(graph.num_tokens)
        return LoraRows(whole.order[: tiles * tile], whole.owners[:tiles], whole.count)

    def fill(self, given: LoraRows | None, graph: BatchDescriptor) -> None:
        """Copy a step's in that were padded for this graph; on the device alone."""
        static = self.of(graph)
        if static is not None and given is not None:
            torch._foreach_copy_(_parts(static), _parts(given))

    def clear(self) -> None:
        """Nobody goes through an adapter."""
        if self._whole is not None:
            self._whole.count.zero_()


def slots_of(model: EngineModel) -> LoraSlots | None:
    """Of the model's adapters; None: it has none."""
    return model.lora_slots if isinstance(model, NativeDecoder) else None


def _parts(rows: LoraRows) -> list[torch.Tensor]:
    return [rows.order, rows.owners, rows.count]
