"""LoRA on the linear layers of an encoder, applied while one item is encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.models.layers.linear import FusedLinear
from engine.models.lora import LinearWithAddition
from engine.models.weight_loader import WeightLoader
from kernels import KernelSet, LinearLayer
from kernels.lora import PackedLora


@dataclass(slots=True)
class EncoderLora:
    """The adapter of the current call of an encoder, which must not be called concurrently.

    Attributes:
        deltas: its additions to linear layers, by the names of their first parts; empty without an
            adapter.
    """

    deltas: Mapping[str, PackedLora] = field(default_factory=dict)


class EncoderLinear(LinearWithAddition):
    """Adds the current adapter's output to all rows."""

    def __init__(self, ops: KernelSet, layer: LinearLayer, name: str, lora: EncoderLora) -> None:
        """`name` is that of the first part, by which `lora` has the addition."""
        super().__init__(ops, layer)
        self._name, self._lora = name, lora

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        y = self._layer(x, out)
        if (delta := self._lora.deltas.get(self._name)) is not None:
            self._ops.add_lora(y, x, [(delta, torch.arange(len(x)))])
        return y


@dataclass(slots=True)
class AdaptableEncoder:
    """An encoder's linear layers, by the names of their first parts.

    Attributes:
        linears, layers: descriptions of the layers, and the loaded layers.
        lora: the adapter of the current call.
    """

    linears: dict[str, FusedLinear] = field(default_factory=dict)
    layers: dict[str, LinearLayer] = field(default_factory=dict)
    lora: EncoderLora = field(default_factory=EncoderLora)


class EncoderLoader(WeightLoader):
    """Loads an encoder, and registers its linear layers in `encoder` for adapters."""

    def __init__(self, encoder: AdaptableEncoder, *arguments: Any) -> None:
        """`arguments` are those of `WeightLoader`."""
        super().__init__(*arguments)
        self._encoder = encoder

    def linear(
        self,
        linear: FusedLinear,
        rows: Sequence[range] | None = None,
        inputs: Sequence[int] | None = None,
    ) -> LinearLayer:
        name, encoder = linear.parts[0].name, self._encoder
        layer = super().linear(linear, rows, inputs)
        encoder.linears[name] = linear
        encoder.layers[name] = EncoderLinear(self.ops, layer, name, encoder.lora)
        return encoder.layers[name]
