"""`Taps`: hidden states from between a decoder's layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.models.context import AttentionContext
from kernels.interface import LayerInputs

if TYPE_CHECKING:
    from engine.models.decoder import NativeDecoder


class Taps:
    """Takes what some layers begin with, in a pass over a step's tokens.

    Args:
        layers: their numbers, ascending.
    """

    def __init__(self, layers: tuple[int, ...]) -> None:
        self._layers = layers
        self._taken: list[Tensor] = []

    def clear(self) -> None:
        """Forget the pass before."""
        self._taken = []

    def room(self, residual: Tensor) -> LayerInputs:
        """Where a call that runs all layers leaves it; `residual` [T, hidden]: of the first."""
        tokens, hidden = residual.shape
        states = torch.empty((tokens, len(self._layers) * hidden))
        self._taken.append(states)
        return LayerInputs(self._layers, states)

    def take(self, layer: int, residual: Tensor) -> None:
        """The pass has come to a layer; `residual` [T, hidden] changes afterwards."""
        if layer in self._layers:
            self._taken.append(residual.clone())

    def states(self) -> Tensor:
        """[T, layers * hidden], side by side in the layers' order."""
        return self._taken[0] if len(self._taken) == 1 else torch.cat(self._taken, dim=-1)


class TappedForward:
    """A model's pass over a step's tokens, in one tensor [T, (1 + layers) * hidden]: the hidden
    states of all tokens, and beside them what the taps took.

    For devices that record the pass in graphs, whose result is one tensor.
    """

    def __init__(self, model: NativeDecoder, layers: tuple[int, ...]) -> None:
        self._model, self._taps = model, Taps(layers)

    def __call__(self, token_ids: Tensor, context: AttentionContext) -> Tensor:
        """See `NativeDecoder.forward`; all tokens are wanted."""
        self._taps.clear()
        hidden = self._model.forward(token_ids, context, self._taps)
        both = torch.cat((hidden, self._taps.states()), dim=-1)
        self._taps.clear()  # what a graph's memory holds goes back to it
        return both
