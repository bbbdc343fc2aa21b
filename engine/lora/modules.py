"""Which parts of a model an adapter can change, by the names of its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.models.describe import describe
from engine.models.description import (
    ExpertsDescription,
    LayerDescription,
    LinearDescription,
    MlpDescription,
    ModelDescription,
)
from engine.models.spec import DecoderSpec

#: Wrappers that PEFT and `transformers` put before a module's name, or leave out.
_PREFIXES = ("", "model.", "transformer.", "language_model.", "model.language_model.")


@dataclass(frozen=True, slots=True)
class Place:
    """One of a checkpoint's weights within a linear layer of the model.

    Attributes:
        layer: the layer's number.
        slot: which linear layer of it, see `linears_of`.
        part: which of the linear layer's parts; weights are over each other.
        rows, columns: outputs and inputs of the part.
    """

    layer: int
    slot: str
    part: int
    rows: int
    columns: int


class Modules:
    """A model's modules by name, found whichever wrappers stand before theirs."""

    def __init__(self, spec: DecoderSpec) -> None:
        self.description = describe(spec)
        self.embedding, self.head = spec.names.embedding, spec.names.lm_head
        self.vocab_size, self.hidden_size = spec.vocab_size, spec.hidden_size
        self._places = dict(_places(self.description))
        self._known = {*self._places, self.embedding, self.head}

    def find(self, name: str) -> str | None:
        """The checkpoint's name of a module: a key of `place`, `embedding` or `head`."""
        for prefix in _PREFIXES:
            for candidate in (prefix + name, name.removeprefix(prefix)):
                if candidate in self._known:
                    return candidate
        return None

    def place(self, name: str) -> Place | None:
        """Where the weight of this name is; None for a table, or nothing of the model's."""
        return self._places.get(name)

    def linear(self, place: Place) -> LinearDescription:
        """The linear layer that a place is in."""
        return dict(linears_of(self.description.layers[place.layer]))[place.slot]


def linears_of(layer: LayerDescription) -> Iterator[tuple[str, LinearDescription]]:
    """A layer's linear layers by the names that this package gives them."""
    yield "qkv", layer.attention.qkv
    yield "o", layer.attention.o
    if isinstance(layer.mlp, ExpertsDescription):
        yield "router", layer.mlp.router
        if layer.mlp.shared_gate is not None:
            yield "shared_gate", layer.mlp.shared_gate
        if layer.mlp.shared is not None:
            yield from _mlp("shared_", layer.mlp.shared)
    else:
        yield from _mlp("", layer.mlp)
    if layer.residual_mlp is not None:
        yield from _mlp("residual_", layer.residual_mlp)


def _mlp(prefix: str, mlp: MlpDescription) -> Iterator[tuple[str, LinearDescription]]:
    yield f"{prefix}up", mlp.up
    yield f"{prefix}down", mlp.down


def _places(description: ModelDescription) -> Iterator[tuple[str, Place]]:
    for index, layer in enumerate(description.layers):
        for slot, linear in linears_of(layer):
            for number, part in enumerate(linear.parts):
                yield part.name, Place(index, slot, number, part.rows, linear.columns)
