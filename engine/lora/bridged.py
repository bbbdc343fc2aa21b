"""Which parts of a bridged model an adapter can change: its linear layers by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.lora.modules import Modules, Place
from engine.lora.parts import AdaptableModel
from engine.models.decoder import NativeDecoder
from engine.models.description import LinearDescription, LinearPart
from engine.models.encoders.encoder import NativeEncoder
from engine.pooling.head_maker import HeadMaker

if TYPE_CHECKING:  # with it comes `transformers`, which takes seconds
    from engine.models.bridge.model import BridgeModel


class BridgedModules(Modules):
    """The modules of a model of `transformers`, all in one layer, each a slot of its name."""

    takes_gguf = False

    def __init__(self, model: BridgeModel) -> None:
        adapted = model.adapted
        self.classifier: dict[str, tuple[int, ...]] = {}
        self.head, self.heads, self.tied = _name(adapted.output), (0, 0), adapted.tied
        self.embedding, self.vocab_size, self.hidden_size = "", 0, 0
        if adapted.embedding is not None:
            slot, table = adapted.embedding
            self.embedding = _name(slot)
            self.vocab_size, self.hidden_size = table.weight.shape
        self._found = {
            _name(slot): Place(0, slot, 0, layer.out_features, layer.in_features)
            for slot, layer in adapted.linears.items()
            if slot != adapted.output
        }
        self.layers = [
            {
                place.slot: LinearDescription(
                    parts=(LinearPart(name, place.rows),),
                    columns=place.columns,
                    bias=place.slot in adapted.biased,
                )
                for name, place in self._found.items()
            }
        ]

    def find(self, name: str) -> str | None:
        """See `Modules.find`: names are those of `transformers`, as PEFT has them."""
        known = name in self._found or name in {self.embedding, self.head} - {""}
        return name if known else None

    def place(self, name: str) -> Place | None:
        """See `Modules.place`."""
        return self._found.get(name)

    def dense(self, name: str) -> tuple[int, int] | None:
        """See `Modules.dense`: there is no classifier's head."""
        return None

    def is_unused(self, name: str) -> bool:
        """See `Modules.is_unused`."""
        return False

    def stack(self, name: str) -> None:
        """See `Modules.stack`: experts that are one tensor can't have adapters here."""
        return


def modules_of(model: AdaptableModel, heads: HeadMaker | None = None) -> Modules:
    """The modules of a model; `heads`: of a classifier."""
    if isinstance(model, NativeDecoder | NativeEncoder):
        return Modules(model.spec, None if heads is None else heads.shapes)
    return BridgedModules(model)


def slot_of(name: str) -> str:
    """Of the module of this name."""
    return name.replace(".", "/")


def _name(slot: str) -> str:
    """Of the module."""
    return slot.replace("/", ".")
