"""`Taps`: hidden states from between a decoder's layers."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.models.compiled import compile_decoder
from engine.models.context import AttentionContext
from kernels.interface import CompiledDecoder

if TYPE_CHECKING:
    from engine.models.decoder import NativeDecoder


class Taps:
    """Takes what some layers begin with, in a pass over a step's tokens.

    Where all layers of the model run in one call, those between two taps do. The bits are the same.

    Args:
        model: with its KV cache.
        layers: their numbers, ascending.
    """

    def __init__(self, model: NativeDecoder, layers: tuple[int, ...]) -> None:
        self._layers = layers
        self._stretches = _stretches(model, layers)
        self._taken: list[Tensor] = []

    def clear(self) -> None:
        """Forget the pass before."""
        self._taken = []

    def run(self, residual: Tensor, context: AttentionContext) -> Tensor | None:
        """All layers and the norm behind them, of the model alone; None where they must run one by
        one.
        """
        if not self._stretches:
            return None
        x = residual
        for first, layers in self._stretches:
            self.take(first, residual)
            x = layers(
                residual,
                context.positions,
                context.slot_mapping,
                context.block_tables,
                context.seq_lens,
                context.query_start_loc,
                others=[(group.slot_mapping, group.block_tables) for group in context.others],
            )
        return x

    def take(self, layer: int, residual: Tensor) -> None:
        """The pass has come to a layer; `residual` [T, hidden] changes afterwards."""
        if layer in self._layers:
            self._taken.append(residual.clone())

    def states(self) -> Tensor:
        """[T, layers * hidden], side by side in the layers' order."""
        return torch.cat(self._taken, dim=-1)


class TappedForward:
    """A model's pass over a step's tokens, in one tensor [T, (1 + layers) * hidden]: the hidden
    states of all tokens, and beside them what the taps took.

    For devices that record the pass in graphs, whose result is one tensor.
    """

    def __init__(self, model: NativeDecoder, layers: tuple[int, ...]) -> None:
        self._model, self._taps = model, Taps(model, layers)

    def __call__(self, token_ids: Tensor, context: AttentionContext) -> Tensor:
        """See `NativeDecoder.forward`; all tokens are wanted."""
        self._taps.clear()
        hidden = self._model.forward(token_ids, context, self._taps)
        both = torch.cat((hidden, self._taps.states()), dim=-1)
        self._taps.clear()  # what a graph's memory holds goes back to it
        return both


def _stretches(model: NativeDecoder, layers: tuple[int, ...]) -> list[tuple[int, CompiledDecoder]]:
    """The first layer of each stretch between taps, and the stretch; none where layers run one by
    one. What a stretch gives but the last, the norm that the next begins with, nobody reads.
    """
    found: list[tuple[int, CompiledDecoder]] = []
    if not model.compiled:
        return found
    for first, end in pairwise(sorted({0, *layers, len(model.weights)})):
        last = end == len(model.weights)
        made = compile_decoder(
            model.spec,
            model.ops,
            model.weights[first:end],
            model.final_norm if last else model.weights[end].input_norm,
            model.kv_caches[first:end],
            model.group_of[first:end],
        )
        if made is None:
            return []
        found.append((first, made))
    return found
