"""`config_groups` of compressed-tensors: how the weights of which layers are kept."""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.contract.errors import ModelLoadError
from engine.quantization.checkpoint.fields import Fields, pattern

_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
#: Classes of layers that stand for all of them.
_CLASSES = ("Linear", "Embedding", "ParallelLMHead", "FusedMoE")


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How the weights of some layers are kept.

    Attributes:
        bits: of a value. floats: it's a float.
        group: neighbours of a row that share a scale; 0: all of a row, or of the weight.
        block: rows and columns that share a scale; None: no such blocks.
        symmetric: there are no zero points.
        of_class: a class of layers is named, not layers.
        fields: where it was read.
    """

    bits: int
    floats: bool
    group: int
    block: tuple[int, int] | None
    symmetric: bool
    of_class: bool
    fields: Fields
    _exact: frozenset[str]
    _patterns: tuple[re.Pattern[str], ...]

    def names(self, module: str) -> bool:
        """Whether a layer is named, or matched by a pattern."""
        return module in self._exact or any(found.match(module) for found in self._patterns)


def weight_schemes(fields: Fields) -> list[WeightScheme]:
    """All of them. Raises `ModelLoadError` for what isn't known."""
    groups = fields.object("config_groups")
    if groups is None:
        raise fields.wrong("config_groups", "isn't there")
    found = []
    for name in groups.names():
        entry = groups.object(name)
        weights = entry.object("weights") if entry is not None else None
        if entry is not None and weights is not None:
            found.append(_scheme(entry, weights))
    return found


def _scheme(entry: Fields, weights: Fields) -> WeightScheme:
    kind = weights.word("type", "int")
    if kind not in ("int", "float"):
        raise weights.wrong("type", f"must be int or float, not {kind!r}")
    strategy = weights.word("strategy", "tensor")
    if strategy not in _STRATEGIES:
        raise weights.wrong("strategy", f"is {strategy!r}; known are {', '.join(_STRATEGIES)}")
    grouped = strategy in ("group", "tensor_group")
    size = weights.integer("group_size", None) if grouped else 0
    if grouped and size < 1:
        raise weights.wrong("group_size", f"is {size}, not a positive number")
    targets = entry.words("targets")
    patterns = [target.removeprefix("re:") for target in targets if target.startswith("re:")]
    return WeightScheme(
        bits=weights.integer("num_bits", 8, range(1, 9)),
        floats=kind == "float",
        group=size,
        block=weights.pair("block_structure"),
        symmetric=weights.boolean("symmetric", True),
        of_class=not targets or any(target in _CLASSES for target in targets),
        fields=entry,
        _exact=frozenset(targets),
        _patterns=tuple(pattern(entry, "targets", text) for text in patterns),
    )


def has_weights(values: object) -> bool:
    """Whether a `quantization_config` is of more than the KV cache."""
    groups = values.get("config_groups") if isinstance(values, dict) else None
    if groups is not None and not isinstance(groups, dict):
        path = "quantization_config.config_groups"
        raise ModelLoadError(f"config.json: {path} must be an object.", param=path)
    return bool(groups)
