"""Flags without a value, however they are written: `--flag True`, `--flag=false`, `--disable-x`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from engine.contract.errors import ConfigError

_WORDS = {"true": True, "false": False}
_OPPOSITE = {"--enable-": "--disable-", "--disable-": "--enable-"}


def switched(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
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


def takes(parser: argparse.ArgumentParser, flag: str) -> bool:
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
