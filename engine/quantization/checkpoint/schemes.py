"""`config_groups` of compressed-tensors: how the weights of which layers are kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.contract.errors import ModelLoadError
from engine.name_patterns import NamePattern
from engine.quantization.checkpoint.fields import Fields, pattern

_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
#: Classes of layers that stand for all of them.
_CLASSES = ("Linear", "Embedding", "ParallelLMHead", "FusedMoE")

#: Of `config_groups`, and of patterns in them: each layer is held against each.
_MOST_GROUPS, _MOST_PATTERNS = 1024, 64
#: Of a target, in a message.
_MOST_SHOWN = 64


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
    _patterns: tuple[NamePattern, ...]

    @property
    def kind(self) -> tuple[object, ...]:
        """What two schemes that mean the same have in common."""
        return self.bits, self.floats, self.group, self.block, self.symmetric

    def names(self, module: str) -> bool:
        """Whether a layer is named."""
        return module in self._exact

    def matches(self, module: str) -> bool:
        """Whether a layer is matched by a pattern.

        Raises `ModelLoadError` for a pattern that takes too long.
        """
        try:
            return any(one.matches(module) for one in self._patterns)
        except ValueError as error:
            raise self.fields.wrong("targets", f"has a pattern that {error}") from error


def weight_schemes(fields: Fields) -> list[WeightScheme]:
    """All of them.

    Raises `ModelLoadError` for what isn't known, and for layers that two of them name.
    """
    groups = fields.object("config_groups")
    if groups is None:
        raise fields.wrong("config_groups", "isn't there")
    names = list(groups.names())
    if len(names) > _MOST_GROUPS:
        raise fields.wrong("config_groups", f"has {len(names)} entries, more than {_MOST_GROUPS}")
    found = []
    for name in names:
        entry = groups.object(name)
        weights = entry.object("weights") if entry is not None else None
        if entry is not None and weights is not None:
            found.append(_scheme(entry, weights))
    _check_targets(fields, found)
    return found


def _check_targets(fields: Fields, schemes: Iterable[WeightScheme]) -> None:
    owners: dict[str, WeightScheme] = {}
    patterns = 0
    for scheme in schemes:
        for target in scheme.fields.words("targets"):
            patterns += target.startswith("re:")
            other = owners.setdefault(target, scheme)
            if other.kind != scheme.kind:
                why = f"has {target[:_MOST_SHOWN]!r}, as {other.fields.path} has"
                raise scheme.fields.wrong("targets", why)
    if patterns > _MOST_PATTERNS:
        raise fields.wrong("config_groups", f"has {patterns} patterns, more than {_MOST_PATTERNS}")


def scheme_for(module: str, schemes: Sequence[WeightScheme]) -> WeightScheme | None:
    """The one that names a layer, else the one that matches it, else the one of its class.

    Raises `ModelLoadError` where patterns of several schemes match it.
    """
    for scheme in schemes:
        if scheme.names(module):
            return scheme
    matching = [scheme for scheme in schemes if scheme.matches(module)]
    if len({scheme.kind for scheme in matching}) > 1:
        first, second, *_ = matching
        raise second.fields.wrong("targets", f"matches {module!r}, as {first.fields.path} does")
    found = matching or [scheme for scheme in schemes if scheme.of_class]
    return found[0] if found else None


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
