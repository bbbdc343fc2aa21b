"""A checkpoint's own layers for drafts (multi-token prediction), which lie behind the model's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from engine.contract.errors import ModelLoadError
from engine.models.spec import DecoderSpec

#: How many there are, in config.json.
COUNT = "num_nextn_predict_layers"
#: Families of which they are run.
FAMILIES = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM")


def count_of(config: dict[str, Any]) -> int:
    """By config.json. Raises `ModelLoadError` for what is no number of layers."""
    count = config.get(COUNT) or 0
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= 64:
        raise ModelLoadError(
            f"config.json: {COUNT} must be a whole number in [0, 64], got {count!r:.80}.",
            param=COUNT,
        )
    return count


def without_them(names: Iterable[str], spec: DecoderSpec, config: dict[str, Any]) -> list[str]:
    """Those of a checkpoint's names that belong to none of them."""
    if spec.architecture not in FAMILIES:
        return list(names)
    layers = range(spec.num_layers, spec.num_layers + count_of(config))
    prefixes = tuple(spec.names.layer.format(layer) for layer in layers)
    return [name for name in names if not name.startswith(prefixes)]


def with_one(spec: DecoderSpec) -> DecoderSpec:
    """The model with the first of them as its last layer."""
    moe = spec.moe
    return replace(
        spec,
        num_layers=spec.num_layers + 1,
        windows=(*spec.windows, 0),
        moe=None if moe is None else replace(moe, layers=(*moe.layers, True)),
    )
