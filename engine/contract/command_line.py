"""Command lines as vLLM takes them: underscores, dotted names, a file of settings."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.contract.errors import ConfigError
from engine.contract.switches import switched, takes

CONFIG = "--config"


def expanded(words: Sequence[str], parser: argparse.ArgumentParser | None = None) -> list[str]:
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
        return [*expanded(words[:place], parser), *words[place:]]
    rest, files = _without_config(words)
    # Behind the words that no flag names: the file's last setting may be a list, which takes words.
    flags = next((place for place, word in enumerate(rest) if word.startswith("-")), len(rest))
    given = [word for file in files for word in _file_words(file, parser)]
    found = [*rest[:flags], *given, *_joined(rest[flags:])]
    return found if parser is None else switched(found, parser)


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
        if parser is not None and not takes(parser, flag):
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
