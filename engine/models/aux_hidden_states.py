"""Hidden states for draft heads, recorded in a forward pass over a step's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.models.forward_context import AttentionMetadata
from kernels.interface import AuxStateBuffer

if TYPE_CHECKING:
    from engine.models.decoder import NativeDecoder


class AuxHiddenStates:
    """Records the inputs of some layers in a pass over a step's tokens.

    Args:
        layers: their indices, ascending.
    """

    def __init__(self, layers: tuple[int, ...]) -> None:
        self._layers = layers
        self._captured: list[Tensor] = []

    def clear(self) -> None:
        """Drop the previous pass."""
        self._captured = []

    def buffer(self, residual: Tensor) -> AuxStateBuffer:
        """Return a buffer for a call that runs all layers; `residual` [T, hidden] is its input."""
        tokens, hidden = residual.shape
        states = torch.empty((tokens, len(self._layers) * hidden))
        self._captured.append(states)
        return AuxStateBuffer(self._layers, states)

    def capture(self, layer: int, residual: Tensor) -> None:
        """Record the input of a layer; `residual` [T, hidden] is copied, since it changes later."""
        if layer in self._layers:
            self._captured.append(residual.clone())

    def states(self) -> Tensor:
        """Return [T, layers * hidden], the inputs side by side in the layers' order."""
        return self._captured[0] if len(self._captured) == 1 else torch.cat(self._captured, dim=-1)


class ForwardWithAux:
    """A model's pass over a step's tokens that returns one tensor [T, (1 + layers) * hidden]: the
    hidden states of all tokens, followed by the recorded layers' inputs.

    For devices with CUDA graphs, whose result is one tensor.
    """

    def __init__(self, model: NativeDecoder, layers: tuple[int, ...]) -> None:
        self._model, self._taps = model, AuxHiddenStates(layers)

    def __call__(self, token_ids: Tensor, context: AttentionMetadata) -> Tensor:
        """See `NativeDecoder.forward`; returns results of all tokens."""
        self._taps.clear()
        hidden = self._model.forward(token_ids, context, self._taps)
        both = torch.cat((hidden, self._taps.states()), dim=-1)
        self._taps.clear()  # releases tensors in the graph's memory
        return both
