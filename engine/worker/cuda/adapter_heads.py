"""Rows of logits that adapters change, on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.models.adapters import NO_ADAPTERS, DeviceHeads, HeadLora, StepAdapters
from engine.models.context import AttentionContext
from engine.models.interface import EngineModel
from engine.worker.cuda.staging import send
from engine.worker.step_logits import StepLogits
from kernels.lora_slots import LoraRows, LoraSlots, SlotTable


class HeadRows:
    """Of a step whose adapters change some of `count` rows of logits, all of one vocabulary.

    Where adapters have no slots, the model itself knows what to do, and there is nothing to send.

    Attributes:
        arrays: what the device needs to know; [] where no row is changed.
    """

    def __init__(self, model: EngineModel, adapters: StepAdapters, count: int) -> None:
        slots: LoraSlots | None = getattr(model, "lora_slots", None)
        self._model: Any = model
        self._changing = adapters if slots is not None else NO_ADAPTERS
        self._own: list[HeadLora] = []
        rows: list[np.ndarray] = []
        adding: list[tuple[int, np.ndarray]] = []
        for adapter, own in self._changing.groups:
            head, table = adapter.head, adapter.table
            if head is None or not len(own):
                continue
            if head.replaces:
                self._own.append(head)
                rows.append(own.numpy())
            if head.added is not None and isinstance(table, SlotTable):
                adding.append((table.slot, own.numpy()))
        self._adds = bool(adding)
        sorted_rows = slots.sort(adding, count, padded=False) if slots and adding else ()
        self.arrays = [*rows, *sorted_rows]

    @classmethod
    def of(cls, model: EngineModel, context: AttentionContext) -> HeadRows:
        """Of all logits of a step."""
        wanted = context.logits_rows
        count = len(context.positions if wanted is None else wanted)
        return cls(model, context.adapters.heads(wanted), count)

    def logits(self, hidden: Tensor, sent: Sequence[Tensor]) -> Tensor:
        """The rows' logits, of `arrays` that were sent."""
        if not self._changing:
            return self._model.logits(hidden)
        count = len(self._own)
        heads = DeviceHeads(
            list(zip(self._own, sent[:count], strict=True)),
            LoraRows(*sent[count:]) if self._adds else None,
            self._changing.vocab_size,
        )
        return self._model.logits(hidden, heads)


class DeviceLogits(StepLogits):
    """Logits whose adapters' rows go to the device stretch by stretch."""

    def __init__(
        self, model: EngineModel, hidden: Tensor, context: AttentionContext, device: torch.device
    ) -> None:
        super().__init__(model, hidden, context.adapters.heads(context.logits_rows))
        self._device = device

    def _adapted(self, hidden: Tensor, heads: StepAdapters) -> Tensor:
        rows = HeadRows(self._model, heads, len(hidden))
        return rows.logits(hidden, send(rows.arrays, self._device) if rows.arrays else ())
