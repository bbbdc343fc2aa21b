"""PEFT's adapter_config.json: supported settings, and errors that name unsupported ones."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.contract.errors import InvalidRequest
from engine.contract.lora import CONFIG_FILE
from engine.contract.safe_pattern import SafePattern
from engine.contract.validation import format_value

#: A key without pattern characters except dots, which match literally.
_NAME = re.compile(r"[\w.-]+")
#: Maximum number of keys that are patterns, as each is matched with every module's name.
_MAX_PATTERNS = 64
#: Maximum CPU seconds of all patterns over all names.
_MAX_MATCH_S = 10.0


def ends_in(module: str, name: str) -> bool:
    """Whether a module's name is `name` or ends with it after a dot."""
    return module == name or module.endswith(f".{name}")


class NamedValues:
    """Values by key; the first key that is the end of a module's name, or matches it, counts.

    The keys are untrusted, so patterns are matched in bounded time.

    Raises ValueError, with the reason, for an invalid pattern or too many patterns.
    """

    def __init__(self, values: Mapping[str, float] | None = None) -> None:
        self._names: dict[str, tuple[int, float]] = {}
        self._patterns: list[tuple[int, SafePattern, float]] = []
        self._elapsed_s = 0.0
        for index, (key, value) in enumerate((values or {}).items()):
            if _NAME.fullmatch(key):
                self._names[key] = index, value
                continue
            if len(self._patterns) == _MAX_PATTERNS:
                raise ValueError(f"holds more than {_MAX_PATTERNS} patterns")
            try:
                pattern = SafePattern(rf"(.*\.)?({key})$")
            except ValueError as error:
                raise ValueError(f"holds {format_value(key)}, which {error}") from error
            self._patterns.append((index, pattern, value))

    def of(self, module: str, default: float) -> float:
        """Return a module's value. Raises ValueError if the patterns take too long."""
        parts = module.split(".")
        ends = (".".join(parts[start:]) for start in range(len(parts)))
        named = [self._names[end] for end in ends if end in self._names]
        first, value = min(named, default=(-1, default))
        for index, pattern, other in self._patterns:
            if named and index > first:
                break
            if self._matches(pattern, module):
                return other
        return value

    def _matches(self, pattern: SafePattern, module: str) -> bool:
        previous_s = pattern.elapsed_s
        is_match = pattern.matches(module)
        self._elapsed_s += pattern.elapsed_s - previous_s
        if self._elapsed_s > _MAX_MATCH_S:
            raise ValueError("takes too long to look for")
        return is_match


#: Maximum bytes of an adapter_config.json; real ones have a few kilobytes.
_MAX_BYTES = 1 << 22
_MAX_NAMES = 10_000
_MAX_RANK = 1 << 16
#: Settings about training, about the base's origin, or that the tensors imply.
_HARMLESS = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying",
        "eva_config", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern",
        "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config",
        "megatron_core", "modules_to_save", "parent_library", "peft_type", "peft_version",
        "qalora_group_size", "revision", "runtime_config", "target_modules", "target_parameters",
        "task_type", "unsloth_fixed", "velora_config",
    }
)  # fmt: skip
_READ = frozenset(
    {
        "alpha_pattern", "bias", "fan_in_fan_out", "lora_alpha", "lora_bias", "r", "rank_pattern",
        "trainable_token_indices", "use_dora", "use_rslora",
    }
)  # fmt: skip
#: Initializations that keep the base's weights; others change them.
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """Settings of an adapter that its tensors don't determine.

    Attributes:
        rank, alpha: of modules that no pattern matches.
        rank_pattern, alpha_pattern: of modules whose names match a key at their end.
        rank_stabilized: the scale is alpha / sqrt(rank) (rsLoRA) instead of alpha / rank.
        dora: the changed weights' rows are normalized (DoRA).
        modules_to_save: names of modules that the adapter replaces completely.
        task: PEFT's name of the task it was trained for; "" if unspecified.
        tokens: ids of table rows that the adapter replaces, by the last components of the table's
            name; "" stands for the embedding.
    """

    rank: int
    alpha: float
    rank_pattern: NamedValues = field(default_factory=NamedValues)
    alpha_pattern: NamedValues = field(default_factory=NamedValues)
    rank_stabilized: bool = False
    dora: bool = False
    modules_to_save: tuple[str, ...] = ()
    task: str = ""
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def tokens_of(self, table: str) -> tuple[int, ...]:
        """Return the ids of a table's rows that the adapter replaces."""
        named = (ids for name, ids in self.tokens.items() if name and ends_in(table, name))
        return next(named, self.tokens.get("", ()))

    def replaces(self, module: str) -> bool:
        """Whether the adapter replaces this module completely."""
        return any(ends_in(module, name) for name in self.modules_to_save)

    def rank_of(self, module: str) -> int:
        """Return the rank that a module's matrices must have."""
        return int(_looked_up("rank_pattern", self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Return the factor of a module's change."""
        rank = self.rank_of(module)
        alpha = _looked_up("alpha_pattern", self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


def _looked_up(name: str, values: NamedValues, module: str, default: float) -> float:
    try:
        return values.of(module, default)
    except ValueError as error:
        raise _refused(name, f"holds a pattern that {error}") from error


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read the configuration in an adapter's folder.

    Raises `InvalidRequest`, which names the field, for invalid or unsupported settings.
    """
    return parse_adapter_config(_read(folder / CONFIG_FILE))


def parse_adapter_config(raw: Mapping[str, Any]) -> AdapterConfig:
    """See `read_adapter_config`."""
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise _refused("peft_type", f"must be LORA, got {format_value(kind)}")
    _refuse_unknown(raw)
    if not isinstance(raw.get("target_modules"), str):  # a single pattern
        _names(raw, "target_modules")
    return AdapterConfig(
        rank=_rank(raw, "r", 8),
        alpha=_number("lora_alpha", raw.get("lora_alpha", 8)),
        rank_pattern=_patterns(raw, "rank_pattern", 1),
        alpha_pattern=_patterns(raw, "alpha_pattern", None),
        rank_stabilized=_flag(raw, "use_rslora"),
        dora=_flag(raw, "use_dora"),
        modules_to_save=_names(raw, "modules_to_save"),
        task=str(raw.get("task_type") or "")[:80],
        tokens=_tokens(raw, "trainable_token_indices"),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise _refused("path", f"has more than {_MAX_BYTES} bytes")
        value = json.loads(
            path.read_text(encoding="utf-8"), object_pairs_hook=_reject_duplicate_keys
        )
    except OSError as error:
        raise InvalidRequest(
            f"{CONFIG_FILE} can't be read: {error.strerror}.", param="path"
        ) from error
    except InvalidRequest:
        raise
    except (ValueError, RecursionError) as error:
        raise _refused("path", f"isn't valid JSON: {format_value(error)}") from error
    if not isinstance(value, dict):
        raise _refused("path", "must hold a JSON object")
    return value


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object without duplicate keys, of which readers use different values."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _refused(key, "is there twice")
        result[key] = value
    return result


def _refuse_unknown(raw: Mapping[str, Any]) -> None:
    """Raise for an unsupported setting that would change what the adapter computes."""
    init = raw.get("init_lora_weights", True)
    if not isinstance(init, bool | str | None) or init not in _INITS:
        raise _refused(
            "init_lora_weights",
            f"is {format_value(init)}, which changes the base's weights. Convert the adapter to "
            "a plain one: PEFT's save_pretrained does it with "
            "path_initial_model_for_weight_conversion",
        )
    if raw.get("bias", "none") not in ("none", "all", "lora_only"):
        raise _refused("bias", f"must be none, all or lora_only, got {format_value(raw['bias'])}")
    for key, value in raw.items():
        if value and key not in _HARMLESS and key not in _READ:
            raise _refused(key, "isn't supported")


def _refused(param: str, why: str) -> InvalidRequest:
    subject = (
        CONFIG_FILE if param == "path" else f"{CONFIG_FILE}: {format_value(param).strip(chr(39))}"
    )
    return InvalidRequest(f"{subject} {why}.", param=param[:80])


def _rank(raw: Mapping[str, Any], name: str, default: int) -> int:
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_RANK:
        raise _refused(
            name, f"must be a whole number from 1 to {_MAX_RANK}, got {format_value(value)}"
        )
    return value


def _number(name: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) < 1e30:
        raise _refused(name, f"must be a finite number, got {format_value(value)}")
    return float(value)


def _flag(raw: Mapping[str, Any], name: str) -> bool:
    value = raw.get(name) or False
    if not isinstance(value, bool):
        raise _refused(name, f"must be true or false, got {format_value(value)}")
    return value


def _patterns(raw: Mapping[str, Any], name: str, min_value: int | None) -> NamedValues:
    value = raw.get(name) or {}
    if not isinstance(value, dict) or len(value) > _MAX_NAMES:
        raise _refused(name, "must be an object of names and numbers")
    for number in value.values():
        _number(name, number)
        if min_value is not None and (
            not isinstance(number, int) or not min_value <= number <= _MAX_RANK
        ):
            raise _refused(name, f"must hold whole numbers from 1 to {_MAX_RANK}")
    try:
        return NamedValues({str(key): float(number) for key, number in value.items()})
    except ValueError as error:
        raise _refused(name, str(error)) from error


def _tokens(raw: Mapping[str, Any], name: str) -> dict[str, tuple[int, ...]]:
    value = raw.get(name) or {}
    tables = {"": value} if isinstance(value, list) else value
    if not isinstance(tables, dict) or len(tables) > _MAX_NAMES:
        raise _refused(name, "must be a list of token ids, or an object of such lists")
    for ids in tables.values():
        are_token_ids = isinstance(ids, list) and all(type(one) is int and one >= 0 for one in ids)
        if not are_token_ids or len(set(ids)) != len(ids):
            raise _refused(name, "must hold lists of token ids, each once")
    return {str(table): tuple(ids) for table, ids in tables.items()}


def _names(raw: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = raw.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _refused(name, "must be a list of names")
    return tuple(value)
