"""`SlottedAdapters`: the adapters of a GPU's model, whose steps are recorded with their slots."""

from __future__ import annotations

from collections.abc import Callable

from engine.contract.config import EngineConfig
from engine.devices.host_memory import GIB
from engine.models.adaptable import Adaptable
from kernels.lora_slots import LoraSlots

_MOST_ADAPTERS, _MOST_RANK = 256, 256
"""By default: adapters at once, and their ranks."""
_PART, _MOST_BYTES = 32, 4 * GIB
"""A GPU's memory for adapters: one part of so many, at most so many bytes."""


class SlottedAdapters:
    """Slots for them, and the memory that the KV cache leaves.

    Attributes:
        slots: from `prepare` on, where the model has adapters.
        num_bytes: of memory that is theirs.
        most, most_rank: how many there may be at once, and of which rank.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.slots: LoraSlots | None = None
        self.num_bytes = 0
        self.most = config.max_loras or _MOST_ADAPTERS
        self.most_rank = config.max_lora_rank or _MOST_RANK

    def prepare(self, model: object, kernels: str, total: Callable[[], int]) -> str:
        """See `Device.prepare_adapters`: graphs are recorded with the slots, so they are made
        before, and stay when the weights are read anew.

        `kernels`: their name; `total`: the GPU's bytes.
        """
        if not self._config.enable_lora or not isinstance(model, Adaptable):
            return ""
        if self.slots is None:
            # One that was driven out has its slot until the steps that it was in are over.
            most = self.most + self._config.max_num_seqs
            self.slots = model.make_lora_slots(most, self.most_rank)
        if self.slots is None:
            return f"Adapters aren't supported by the kernels {kernels} on a GPU."
        model.use_lora_slots(self.slots)
        self.num_bytes = min(total() // _PART, _MOST_BYTES)
        return ""
