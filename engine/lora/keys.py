"""The names of an adapter's tensors, as PEFT writes them."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

Kind = Literal[
    "a",
    "b",
    "b_bias",
    "magnitude",
    "embedding_a",
    "embedding_b",
    "bias",
    "table",
    "tokens",
    "unused",
]

PREFIX = "base_model.model."
#: Endings, the longer ones first; older versions of PEFT wrote no `.weight` behind a magnitude.
_ENDINGS: tuple[tuple[str, Kind], ...] = (
    (".lora_A.weight", "a"),
    (".lora_B.weight", "b"),
    (".lora_B.bias", "b_bias"),
    (".lora_magnitude_vector.weight", "magnitude"),
    (".lora_magnitude_vector", "magnitude"),
    (".lora_embedding_A", "embedding_a"),
    (".lora_embedding_B", "embedding_b"),
    (".token_adapter.trainable_tokens_delta", "tokens"),
    (".token_adapter.base_layer.weight", "table"),
    (".base_layer.weight", "table"),
    (".original_module.weight", "unused"),
    (".original_module.bias", "unused"),
    (".base_layer.bias", "bias"),
    (".modules_to_save.weight", "table"),
    (".modules_to_save.bias", "bias"),
    (".weight", "table"),
    (".bias", "bias"),
)


class Key(NamedTuple):
    """What a tensor is: which module's, and which of its parts.

    Kinds: `a` [rank, inputs] and `b` [outputs, rank] with its bias; `magnitude` [outputs] of DoRA,
    of an embedding [hidden]; `embedding_a` [rank, vocabulary] and `embedding_b` [hidden, rank];
    `bias` and `table` are in the place of the module's own, `tokens` [some, hidden] in that of a
    table's rows; `unused` is what another tensor stands in the place of.
    """

    module: str
    kind: Kind


@lru_cache(maxsize=8192)  # all adapters of a model have the same names
def parse_key(name: str) -> Key | None:
    """What the tensor of this name is; None: nothing that is known."""
    bare = name.removeprefix(PREFIX)
    for ending, kind in _ENDINGS:
        if bare.endswith(ending) and len(bare) > len(ending):
            return Key(bare.removesuffix(ending), kind)
    return None
