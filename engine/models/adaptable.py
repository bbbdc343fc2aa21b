"""`Adaptable`: a model whose layers adapters may change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from engine.models.adapted_linears import AdaptableLinear, make_slots
from engine.models.adapters import NO_ADAPTERS, CurrentStep, DeviceHeads, StepAdapters
from engine.models.context import AttentionContext
from kernels import KernelSet
from kernels.lora import LayerLoras, LoraTable
from kernels.lora_slots import LoraRows, LoraSlots


class Adaptable(ABC):
    """What such models have in common.

    Attributes:
        ops, weight_dtype: the kernels, and how linear weights are kept.
        lora_slots: where adapters are on a device whose steps are recorded; None: they have no
            slots.
    """

    ops: KernelSet
    weight_dtype: torch.dtype

    def __init__(self) -> None:
        self._step = CurrentStep()

    @property
    @abstractmethod
    def _depth(self) -> int:
        """How many layers there are."""

    @abstractmethod
    def linears(self, layer: int) -> Mapping[str, AdaptableLinear]:
        """A layer's linear layers that adapters may change, by their slots."""

    @abstractmethod
    def _slot_places(self) -> list[list[str]]:
        """The slots of each layer on a device whose steps are recorded."""

    @property
    def _num_experts(self) -> int:
        """Of a layer; 0: there are none."""
        return 0

    @property
    def lora_slots(self) -> LoraSlots | None:
        """See the class."""
        return self._step.slots

    def make_lora_slots(self, most: int, most_rank: int) -> LoraSlots | None:
        """Slots for so many adapters of up to that rank; None: the kernels have none."""
        return make_slots(
            self.ops, self._slot_places(), most, most_rank, self.weight_dtype, self._num_experts
        )

    def use_lora_slots(self, slots: LoraSlots | None) -> None:
        """Have adapters there, see `make_lora_slots`."""
        self._step.slots = slots

    def lora_table(self, layers: LayerLoras) -> LoraTable | None:
        """An adapter's slot, or what takes it through all layers in one call; None: neither is
        there.
        """
        return None if self.lora_slots is None else self.lora_slots.put(layers)

    @staticmethod
    def _moved(
        context: AttentionContext, places: Callable[[], Tensor]
    ) -> tuple[StepAdapters, LoraRows | None]:
        """The step's adapters, with token i at place i of `places()`, int64; in both ways."""
        adapters, rows = context.adapters, context.lora_rows
        moved = adapters.moved(places()) if adapters else adapters
        return moved, None if rows is None else rows.moved(places())

    @contextmanager
    def _through(self, adapters: StepAdapters, rows: LoraRows | None) -> Iterator[None]:
        """Meanwhile the layers that run one by one know of the step's adapters."""
        self._step.adapters, self._step.rows = adapters, rows
        try:
            yield
        finally:
            self._step.adapters, self._step.rows = NO_ADAPTERS, None

    def _adapt_embedding(
        self, x: Tensor, token_ids: Tensor, adapters: StepAdapters, rows: LoraRows | None
    ) -> None:
        """Change rows of x [T, hidden], the embeddings of token_ids int64 [T]."""
        for adapter, own in adapters.groups:
            if adapter.embedding is not None:
                adapter.embedding.change(self.ops, x, token_ids, own)
        if self.lora_slots is not None and rows is not None:
            self.lora_slots.embed(self._depth, x, token_ids, rows)

    def _adapt_logits(
        self, logits: Tensor, hidden: Tensor, adapters: StepAdapters | DeviceHeads
    ) -> None:
        """Change rows of float32 logits [R, vocabulary] of hidden [R, hidden]."""
        if isinstance(adapters, StepAdapters):
            for adapter, rows in adapters.groups:
                if adapter.head is not None:
                    adapter.head.change(self.ops, logits, hidden, rows)
        elif self.lora_slots is not None:
            adapters.change(self.lora_slots, self._depth, logits, hidden)
