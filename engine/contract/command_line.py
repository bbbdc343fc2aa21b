"""Settings as dataclass fields and command-line flags, and vLLM's spellings of command lines."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, ClassVar, Self

from engine.contract.errors import ConfigError
from engine.contract.vllm_flags import VllmFlag


def cli_field(default: Any, help: str, **extra: Any) -> Any:
    """Return a dataclass field that is also a command-line flag.

    `choices`, `low` and `high` are checked; `check(value)` of a value that isn't empty raises
    `ConfigError`.
    """
    return field(default=default, metadata={"help": help, **extra})


def bounded(default: Any, **limits: Any) -> Any:
    """Return a field of `JsonSettings`; `choices`, `low` and `high` are checked."""
    return field(default=default, metadata=limits)


class JsonSettings:
    """Base of frozen dataclasses that a setting gives as a JSON object.

    Raises `ConfigError` for a field of another type or out of its range.
    """

    PARAM: ClassVar[str]

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):  # type: ignore[arg-type]
            try:
                value = validate_field(spec, getattr(self, spec.name))
            except ConfigError as error:
                raise self.error(error.message) from None
            object.__setattr__(self, spec.name, value)

    @classmethod
    def error(cls, message: str) -> ConfigError:
        return ConfigError(f"{cls.PARAM}: {message}", param=cls.PARAM)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from JSON. Raises `ConfigError`, also for an unknown name."""
        names = sorted(spec.name for spec in dataclasses.fields(cls))  # type: ignore[arg-type]
        for name in values:
            if name not in names:
                raise cls.error(f"there is no {name}; there are {', '.join(names)}.")
        return cls(**values)


def validate_field(spec: dataclasses.Field[Any], value: Any) -> Any:
    """Return a field's value, an integer converted to float for a float field.

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
        allowed = ", ".join(str(choice) for choice in choices)
        raise ConfigError(f"{name} must be one of {allowed}; got {value!r}.", param=name)
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        bounds = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ConfigError(f"{name} must be {bounds}, got {value!r}.", param=name)
    if "check" in meta and value:
        meta["check"](value)
    return value


def _check_numbers(name: str, values: list[Any], low: int, high: int) -> None:
    for value in values or [None]:
        is_int = isinstance(value, int) and not isinstance(value, bool)
        if not is_int or not low <= value <= high:
            raise ConfigError(
                f"{name} must be whole numbers in [{low}, {high}], got {value!r}.", param=name
            )


def _check_classes(name: str, values: list[Any]) -> None:
    for value in values:
        if not isinstance(value, type) and not (isinstance(value, str) and ":" in value):
            raise ConfigError(
                f"{name} must be classes or texts such as 'module:Class', got {value!r}.",
                param=name,
            )


def base_type(annotation: str) -> type:
    """Return the base type of an annotation such as `int | None`."""
    head = annotation.split("|")[0].split("[")[0].strip()
    kinds = {"str": str, "bool": bool, "int": int, "float": float, "dict": dict, "list": list}
    return kinds[head]


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def add_flag(group: argparse._ArgumentGroup, spec: dataclasses.Field[Any]) -> None:
    """Add a field's flag, `--like-this`; a boolean also takes `--no-like-this`."""
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
    choices = spec.metadata.get("choices")
    if kind is not str:
        parse: Callable[[str], Any] = human_readable_int if kind is int else kind
        if spec.metadata.get("auto"):
            parse = number_or_auto
        metavar = {"metavar": {int: "N", float: "X"}[kind]} if choices is None else {}
        return {"type": parse, "choices": choices, **metavar}
    optional = "None" in str(spec.type)
    if choices is None:
        return {"type": _string_parser(optional, {}, {}), "metavar": "TEXT"}
    meta = spec.metadata
    parse_choice = _string_parser(optional, meta.get("refused") or {}, meta.get("same") or {})
    return {"type": parse_choice, "choices": (*choices, None) if optional else choices}


def _string_parser(
    optional: bool, refused: Mapping[str, str], same: Mapping[str, str]
) -> Callable[[str], str | None]:
    """Return a parser of a string value.

    Args:
        optional: "None" means None.
        refused: unsupported values -> what to use instead.
        same: aliases -> value.
    """

    def parse(text: str) -> str | None:
        if text in refused:
            raise argparse.ArgumentTypeError(f"{text} can't be used: {refused[text]}.")
        return None if optional and text == "None" else same.get(text, text)

    return parse


_UNITS = {unit: 10 ** (3 * power) for power, unit in enumerate("kmgt", 1)} | {
    unit: 2 ** (10 * power) for power, unit in enumerate("KMGT", 1)
}


def human_readable_int(text: str) -> int:
    """Parse an integer, with an optional unit as in vLLM: 8k is 8000, 25.6k is 25600, 8K is 8192.

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
    """Parse an integer as `human_readable_int` does; "auto" is -1."""
    return -1 if text == "auto" else human_readable_int(text)


def add_vllm_flag(group: argparse._ArgumentGroup, flag: VllmFlag) -> None:
    """Add a flag of vLLM's, hidden from the help: the docs have a table of them."""
    options: dict[str, Any] = {"dest": flag.name, "default": None, "help": argparse.SUPPRESS}
    if flag.kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif flag.kind is dict:
        options["type"] = _json_object
    elif flag.kind is list:
        options["nargs"] = "*"
    else:
        options["type"] = human_readable_int if flag.kind is int else flag.kind
    group.add_argument(*flag.short, "--" + flag.name.replace("_", "-"), **options)


_WORDS = {"true": True, "false": False}
_OPPOSITE = {"--enable-": "--disable-", "--disable-": "--enable-"}


def normalize_switches(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return the command line with the parser's switches spelled as argparse expects them.

    Older configurations of vLLM give switches a value (`--flag True`, `--flag=false`), newer ones
    write `--disable-x` for `--no-enable-x`.

    Raises:
        ConfigError: a switch has a value that is neither true nor false.
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
    """Whether the parser has exactly this option; argparse would also accept a prefix."""
    options = parser._option_string_actions
    spellings = (flag, f"--no-{flag[2:]}", _positive(flag, _switches(parser)))
    return any(name in options for name in spellings)


def _switches(parser: argparse.ArgumentParser) -> Mapping[str, str]:
    """Return the parser's switches -> their opposite, "" where that is to omit the switch."""
    opposites: dict[str, str] = {}
    for name, action in parser._option_string_actions.items():
        if isinstance(action, argparse.BooleanOptionalAction):
            off = name.startswith("--no-")
            opposites[name] = f"--{name[5:]}" if off else f"--no-{name[2:]}"
        elif action.nargs == 0 and action.const is True:
            opposites[name] = ""
    return opposites


def _positive(name: str, switches: Mapping[str, str]) -> str:
    """Return `--no-enable-x` for `--disable-x` if the parser only has `--enable-x`."""
    positive = "--" + name.removeprefix("--no-") if name.startswith("--no-") else name
    for prefix, opposite in _OPPOSITE.items():
        candidate = opposite + positive.removeprefix(prefix)
        if positive.startswith(prefix) and candidate in switches:
            return switches[candidate] if positive == name else candidate
    return name


CONFIG = "--config"


def expand_args(words: Sequence[str], parser: argparse.ArgumentParser | None = None) -> list[str]:
    """Return the command line with `--config FILE` expanded, names hyphenated, and `--a.b x` as
    `--a {"b": x}`; with a parser its switches are normalized, see `normalize_switches`.

    Flags of the command line come after the file's, so they take precedence.

    Raises:
        ConfigError: the file can't be read, isn't a mapping or has an unknown setting; a switch has
            a value that is neither true nor false.
    """
    words = list(words)
    if "--" in words:
        separator = words.index("--")
        return [*expand_args(words[:separator], parser), *words[separator:]]
    args, files = _without_config(words)
    # After the positional arguments, which the file's last setting would take if it is a list.
    first_flag = next((index for index, word in enumerate(args) if word.startswith("-")), len(args))
    file_args = [word for file in files for word in _read_config_file(file, parser)]
    expanded = [*args[:first_flag], *file_args, *_join_dotted_names(args[first_flag:])]
    return expanded if parser is None else normalize_switches(expanded, parser)


def _without_config(words: list[str]) -> tuple[list[str], list[str]]:
    rest, files = [], []
    remaining = iter(words)
    for word in remaining:
        name, equals, value = word.partition("=")
        if name != CONFIG:
            rest.append(word)
            continue
        file = value if equals else next(remaining, "")
        if not file:
            raise ConfigError("--config needs a file.", param="config")
        files.append(file)
    return rest, files


def _join_dotted_names(words: list[str]) -> list[str]:
    """Hyphenate names, and join dotted names into one JSON object per flag."""
    result: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    remaining = iter(_spell_compilation_config(words))
    for word in remaining:
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
        text = value if equals else next(remaining, "")
        _set_nested(
            objects.setdefault(head, {}), path.replace("-", "_").split("."), _parse_value(text)
        )
    for head, settings in objects.items():
        result += [head, json.dumps(settings)]
    return result


def _spell_compilation_config(words: list[str]) -> list[str]:
    """Return the words with `--compilation-config` for `-O` where vLLM 0.10 uses it as a short
    form: before a dotted name or a JSON object. Otherwise `-O` is the optimization level.
    """
    flag = "--compilation-config"
    result = []
    for word, following in zip(words, [*words[1:], ""], strict=False):
        rest = word.removeprefix("-O")
        if rest == word:
            pass
        elif rest.startswith(".") or (not rest and following.lstrip().startswith("{")):
            word = flag + rest
        elif (value := rest.removeprefix("=").lstrip()).startswith("{"):
            word = f"{flag}={value}"
        result.append(word)
    return result


def _set_nested(target: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        inner = target.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{'.'.join(path)} is given twice.", param=path[0])
        target = inner
    target[path[-1]] = value


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _read_config_file(file: str, parser: argparse.ArgumentParser | None) -> list[str]:
    """Return the settings of a YAML file as a command line; names must not be abbreviated."""
    import yaml  # only needed with a file

    try:
        settings = yaml.safe_load(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--config {file} can't be read: {reason}", param="config") from error
    if settings is None:
        return []
    if not isinstance(settings, dict) or any(not isinstance(name, str) for name in settings):
        raise ConfigError(f"--config {file} must hold settings, `name: value`.", param="config")
    words: list[str] = []
    for name, value in settings.items():
        flag = "--" + name.strip("-").replace("_", "-")
        if parser is not None and not has_option(parser, flag):
            matches = [
                option[2:] for option in parser._option_string_actions if option.startswith(flag)
            ]
            hint = f" Did you mean {matches[0]}?" if matches else ""
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
