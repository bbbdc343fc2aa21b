"""The linear layers of a mixture that runs one expert after the other, with what adapters add."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kernels.lora import ExpertUse, LoraUse
from kernels.lora_slots import MixtureRows

if TYPE_CHECKING:
    from kernels.layers import LinearLayer

#: By a layer's slot, x and the rows of the mixture's own that x is, ascending: what comes of it.
ExpertLinears = Callable[[str, Tensor, Tensor], Tensor]


class LoraKernels(Protocol):
    """A set of kernels that adds."""

    def add_lora(self, y: Tensor, x: Tensor, uses: Sequence[LoraUse]) -> None:
        """See `KernelSet.add_lora`."""


class AdaptedLinears:
    """`ExpertLinears` whose rows get what their adapters add; where `uses` is empty, nothing."""

    def __init__(
        self, ops: LoraKernels, layers: Mapping[str, LinearLayer], uses: Sequence[ExpertUse]
    ) -> None:
        self._ops, self._layers, self._uses = ops, layers, uses

    def __call__(self, slot: str, x: Tensor, tokens: Tensor) -> Tensor:
        """See `ExpertLinears`."""
        y = self._layers[slot](x)
        own = [
            (loras[slot], torch.isin(tokens, rows).nonzero().flatten())
            for loras, rows in self._uses
            if slot in loras
        ]
        if found := [use for use in own if len(use[1])]:
            self._ops.add_lora(y, x, found)
        return y


class SlottedLinears:
    """The same for adapters that have slots."""

    def __init__(
        self, layers: Mapping[str, LinearLayer], rows: MixtureRows, owners: Tensor
    ) -> None:
        self._layers, self._rows, self._owners = layers, rows, owners

    def __call__(self, slot: str, x: Tensor, tokens: Tensor) -> Tensor:
        """See `ExpertLinears`."""
        y = self._layers[slot](x)
        kind, _, expert = slot.partition(".")
        if expert:
            place, owners = self._rows.place(kind), self._owners[tokens]
            self._rows.slots.add_expert(place, int(expert), y, x, owners)
        else:
            self._rows.add(slot, y, x)
        return y
