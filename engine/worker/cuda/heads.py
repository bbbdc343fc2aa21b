"""Rows of logits that adapters change, on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from engine.models.adapters import DeviceHeads, HeadLora, StepAdapters
from kernels.lora_slots import LoraRows, LoraSlots, SlotTable


class HeadRows:
    """Of a step whose adapters change `count` rows of logits, all of one vocabulary.

    Attributes:
        arrays: what the device needs to know.
    """

    def __init__(self, adapters: StepAdapters, slots: LoraSlots, count: int) -> None:
        self._vocab_size = adapters.vocab_size
        self._own: list[HeadLora] = []
        rows: list[np.ndarray] = []
        adding: list[tuple[int, np.ndarray]] = []
        for adapter, own in adapters.groups:
            head, table = adapter.head, adapter.table
            if head is None or not len(own):
                continue
            if head.replaces:
                self._own.append(head)
                rows.append(own.numpy())
            if head.added is not None and isinstance(table, SlotTable):
                adding.append((table.slot, own.numpy()))
        self._adds = bool(adding)
        self.arrays = [*rows, *(slots.sort(adding, count, padded=False) if adding else ())]

    def there(self, sent: Sequence[Tensor]) -> DeviceHeads:
        """For `arrays` that were sent."""
        count = len(self._own)
        return DeviceHeads(
            list(zip(self._own, sent[:count], strict=True)),
            LoraRows(*sent[count:]) if self._adds else None,
            self._vocab_size,
        )
