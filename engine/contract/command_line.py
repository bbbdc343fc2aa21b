"""Command lines as vLLM takes them: underscores, dotted names, a file of settings."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Self

from engine.contract.errors import ConfigError
from engine.contract.vllm_flags import VllmFlag

# -- Settings that are fields of a dataclass and flags of a command line at once. Torch-free.


def cli_field(default: Any, help: str, **extra: Any) -> Any:
    """A dataclass field that is also a command-line flag; `choices`, `low`, `high` are checked, and
    `check`, a function of the value, raises `ConfigError`.
    """
    return field(default=default, metadata={"help": help, **extra})


@dataclass(kw_only=True)
class Settings:
    """A dataclass of options, made from whatever holds them."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """From settings or JSON. An unknown key is refused by its name."""
        known = {spec.name for spec in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                raise ConfigError(f"{key} is no engine setting.", param=str(key))
        return cls(**values)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """From parsed flags; what the parser didn't set keeps its default."""
        known = {spec.name for spec in dataclasses.fields(cls)}
        given = {k: v for k, v in vars(args).items() if k in known and v is not None}
        return cls(**given)

    def to_mapping(self) -> dict[str, Any]:
        """Only what differs from the defaults; `from_mapping` takes it back."""
        return {
            spec.name: getattr(self, spec.name)
            for spec in dataclasses.fields(self)
            if getattr(self, spec.name) != spec.default
        }


def validate_field(spec: dataclasses.Field[Any], value: Any) -> Any:
    """A field's value, whole numbers made floats where these belong.

    Raises `ConfigError` unless it has the field's type and lies in its range.
    """
    name, meta, kind = spec.name, spec.metadata, base_type(str(spec.type))
    if value is None and "None" in str(spec.type):
        return None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name} must be {kind.__name__}, got {value!r}.", param=name)
    if isinstance(value, list):
        if "low" in meta:
            _check_numbers(name, value, meta["low"], meta["high"])
        else:
            _check_classes(name, value)
        return value
    choices, low, high = meta.get("choices"), meta.get("low"), meta.get("high")
    if choices and value not in choices:
        known = ", ".join(str(choice) for choice in choices)
        raise ConfigError(f"{name} must be one of {known}; got {value!r}.", param=name)
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        bounds = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ConfigError(f"{name} must be {bounds}, got {value!r}.", param=name)
    if "check" in meta:
        meta["check"](value)
    return value


def _check_numbers(name: str, values: list[Any], low: int, high: int) -> None:
    """Raise `ConfigError` unless these are whole numbers from `low` to `high`, at least one."""
    for value in values or [None]:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not low <= value <= high:
            raise ConfigError(
                f"{name} must be whole numbers in [{low}, {high}], got {value!r}.", param=name
            )


def _check_classes(name: str, values: list[Any]) -> None:
    """Raise `ConfigError` unless these are classes, or say where they are."""
    for value in values:
        if not isinstance(value, type) and not (isinstance(value, str) and ":" in value):
            raise ConfigError(
                f"{name} must be classes or texts such as 'module:Class', got {value!r}.",
                param=name,
            )


def base_type(annotation: str) -> type:
    """The plain type behind an annotation such as `int | None`."""
    head = annotation.split("|")[0].split("[")[0].strip()
    kinds = {"str": str, "bool": bool, "int": int, "float": float, "dict": dict, "list": list}
    return kinds[head]


def _json_object(text: str) -> dict[str, Any]:
    """A JSON object from a flag's text."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def add_flag(group: argparse._ArgumentGroup, spec: dataclasses.Field[Any]) -> None:
    """A field's flag, `--like-this`; a boolean's also takes `--no-like-this`."""
    flag = "--" + spec.name.replace("_", "-")
    kind = base_type(str(spec.type))
    text = spec.metadata["help"].replace("%", "%%")
    if spec.default not in (None, ""):
        text += f" (default: {spec.default})"
    options: dict[str, Any] = {"dest": spec.name, "default": None, "help": text}
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif spec.metadata.get("json"):
        options |= {"type": _json_object, "metavar": "JSON"}
    elif kind is list:
        numbers = "low" in spec.metadata
        options |= {"nargs": "+", "metavar": "N"} if numbers else {"nargs": "*", "metavar": "CLASS"}
        options["type"] = int if numbers else str
    elif spec.metadata.get("several"):
        options |= {"nargs": "+", "metavar": "TEXT"}
    else:
        options |= _value_options(spec, kind)
    short = [spec.metadata["short"]] if "short" in spec.metadata else []
    group.add_argument(*short, flag, **options)


def _value_options(spec: dataclasses.Field[Any], kind: type) -> dict[str, Any]:
    """Of a flag with one value: how it's read, what it may be."""
    choices = spec.metadata.get("choices")
    if kind is not str:
        read: Callable[[str], Any] = whole_number if kind is int else kind
        if spec.metadata.get("auto"):
            read = number_or_auto
        shown = {"metavar": {int: "N", float: "X"}[kind]} if choices is None else {}
        return {"type": read, "choices": choices, **shown}
    optional = "None" in str(spec.type)
    if choices is None:
        return {"type": _word(optional, {}, {}), "metavar": "TEXT"}
    meta = spec.metadata
    words = _word(optional, meta.get("refused") or {}, meta.get("same") or {})
    return {"type": words, "choices": (*choices, None) if optional else choices}


def _word(
    optional: bool, refused: Mapping[str, str], same: Mapping[str, str]
) -> Callable[[str], str | None]:
    """Reads a text: "None" is none where there may be none; what's refused says what to take;
    `same` are other names.
    """

    def text(given: str) -> str | None:
        if given in refused:
            raise argparse.ArgumentTypeError(f"{given} can't be used: {refused[given]}.")
        return None if optional and given == "None" else same.get(given, given)

    return text


_UNITS = {unit: 10 ** (3 * power) for power, unit in enumerate("kmgt", 1)} | {
    unit: 2 ** (10 * power) for power, unit in enumerate("KMGT", 1)
}


def whole_number(text: str) -> int:
    """A whole number, or one with a unit as vLLM takes it: 8k is 8000, 25.6k is 25600, 8K is 8192.

    Raises `argparse.ArgumentTypeError`.
    """
    number, factor = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1)
    try:
        if number.isascii() and "." in number and factor % 1000 == 0:
            value = Decimal(number) * factor
            if value == int(value):
                return int(value)
        return int(number) * factor
    except (ValueError, InvalidOperation) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from error


def number_or_auto(text: str) -> int:
    """A whole number, or -1 for "auto"."""
    return -1 if text == "auto" else whole_number(text)


def add_vllm_flag(group: argparse._ArgumentGroup, foreign: VllmFlag) -> None:
    """A flag of vLLM's, hidden from the help: the table in the docs explains them all."""
    options: dict[str, Any] = {"dest": foreign.name, "default": None, "help": argparse.SUPPRESS}
    if foreign.kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif foreign.kind is dict:
        options["type"] = _json_object
    elif foreign.kind is list:
        options["nargs"] = "*"
    else:
        options["type"] = whole_number if foreign.kind is int else foreign.kind
    group.add_argument(*foreign.short, "--" + foreign.name.replace("_", "-"), **options)


# -- Flags without a value, however they are written: `--flag True`, `--flag=false`, `--disable-x`.


_WORDS = {"true": True, "false": False}
_OPPOSITE = {"--enable-": "--disable-", "--disable-": "--enable-"}


def normalize_switches(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """The command line with each of the parser's switches written as argparse wants it.

    Older configurations of vLLM give switches a value, and newer ones write `--disable-x` for
    `--no-enable-x`.

    Raises: ConfigError: a switch has a value that is neither true nor false.
    """
    switches = _switches(parser)
    result: list[str] = []
    words = list(words)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name not in parser._option_string_actions:
            name = _positive(name, switches)
        if name not in switches:
            result.append(word)
            continue
        if not equals and words and words[0].lower() in _WORDS:
            equals, value = "=", words.pop(0)
        if equals and value.lower() not in _WORDS:
            flag = word.partition("=")[0]
            raise ConfigError(f"{flag} is true or false, got {value!r}.", param=flag.lstrip("-"))
        if equals and not _WORDS[value.lower()]:
            name = switches[name]
        result += [name] if name else []
    return result


def has_option(parser: argparse.ArgumentParser, flag: str) -> bool:
    """Whether the parser has this very option: argparse would take the beginning of one, too."""
    options = parser._option_string_actions
    whole = (flag, f"--no-{flag[2:]}", _positive(flag, _switches(parser)))
    return any(name in options for name in whole)


def _switches(parser: argparse.ArgumentParser) -> Mapping[str, str]:
    """The parser's switches, and what says the contrary; "" where leaving it out does."""
    found: dict[str, str] = {}
    for name, action in parser._option_string_actions.items():
        if isinstance(action, argparse.BooleanOptionalAction):
            off = name.startswith("--no-")
            found[name] = f"--{name[5:]}" if off else f"--no-{name[2:]}"
        elif action.nargs == 0 and action.const is True:
            found[name] = ""
    return found


def _positive(name: str, switches: Mapping[str, str]) -> str:
    """`--no-enable-x` for `--disable-x` where the parser knows `--enable-x` alone."""
    plain = "--" + name.removeprefix("--no-") if name.startswith("--no-") else name
    for start, opposite in _OPPOSITE.items():
        turned = opposite + plain.removeprefix(start)
        if plain.startswith(start) and turned in switches:
            return switches[turned] if plain == name else turned
    return name


CONFIG = "--config"


def expand_args(words: Sequence[str], parser: argparse.ArgumentParser | None = None) -> list[str]:
    """The command line with `--config FILE` read, names spelled with hyphens, and `--a.b x` as
    `--a {"b": x}`; the parser's flags without a value may have one (`--flag true`).

    Flags of the command line come after the file's, so they win.

    Raises:
        ConfigError: the file can't be read, or holds no settings or one that the parser hasn't;
            a value that is no true or false.
    """
    words = list(words)
    if "--" in words:
        place = words.index("--")
        return [*expand_args(words[:place], parser), *words[place:]]
    rest, files = _without_config(words)
    # Behind the words that no flag names: the file's last setting may be a list, which takes words.
    flags = next((place for place, word in enumerate(rest) if word.startswith("-")), len(rest))
    given = [word for file in files for word in _file_words(file, parser)]
    found = [*rest[:flags], *given, *_joined(rest[flags:])]
    return found if parser is None else normalize_switches(found, parser)


def _without_config(words: list[str]) -> tuple[list[str], list[str]]:
    rest, files = [], []
    each = iter(words)
    for word in each:
        name, equals, value = word.partition("=")
        if name != CONFIG:
            rest.append(word)
            continue
        file = value if equals else next(each, "")
        if not file:
            raise ConfigError("--config needs a file.", param="config")
        files.append(file)
    return rest, files


def _joined(words: list[str]) -> list[str]:
    """Hyphens in names, and dotted names as one JSON object each."""
    result: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    each = iter(words)
    for word in each:
        if not word.startswith("-") or word in ("-", "--"):
            result.append(word)
            continue
        name, equals, value = word.partition("=")
        if word.startswith("--") or "." in name:
            name = name.replace("_", "-") if word.startswith("--") else name
        head, dot, path = name.partition(".")
        if not dot or not head.strip("-") or head.strip("-").isdigit():
            result.append(name + equals + value)
            continue
        text = value if equals else next(each, "")
        _put(objects.setdefault(head, {}), path.replace("-", "_").split("."), _value(text))
    for head, found in objects.items():
        result += [head, json.dumps(found)]
    return result


def _put(where: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        inner = where.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{'.'.join(path)} is given twice.", param=path[0])
        where = inner
    where[path[-1]] = value


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _file_words(file: str, parser: argparse.ArgumentParser | None) -> list[str]:
    """The settings of a YAML file as a command line; a setting has its whole name."""
    import yaml  # not for those who have no such file

    try:
        read = yaml.safe_load(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"--config {file} can't be read: {first}", param="config") from error
    if read is None:
        return []
    if not isinstance(read, dict) or any(not isinstance(name, str) for name in read):
        raise ConfigError(f"--config {file} must hold settings, `name: value`.", param="config")
    words: list[str] = []
    for name, value in read.items():
        flag = "--" + name.strip("-").replace("_", "-")
        if parser is not None and not has_option(parser, flag):
            meant = [each[2:] for each in parser._option_string_actions if each.startswith(flag)]
            hint = f" Did you mean {meant[0]}?" if meant else ""
            raise ConfigError(f"--config {file}: there is no setting {name!r}.{hint}", param=name)
        if value is None or value == []:
            continue
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list):
            words += [flag, *(str(item) for item in value)]
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            words.append(f"{flag}={text}")
    return words
