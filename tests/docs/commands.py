"""The commands that documents and deployments name, checked against the real ones."""

from __future__ import annotations

import argparse
import shlex
from functools import cache
from typing import Any

from django.core.management import get_commands, load_command_class


@cache
def options_of(name: str) -> frozenset[str]:
    """Every option of a `manage.py` command, those of its subcommands with them."""
    app: Any = get_commands()[name]
    parser = load_command_class(app, name).create_parser("manage.py", name)
    return frozenset(_options(parser))


def our_options() -> frozenset[str]:
    """Every option of Quire's own commands."""
    ours = ("config", "tenants", "catalog", "adapters", "metering", "console", "accounts", "chaos")
    names = [name for name, app in get_commands().items() if app in ours]
    return frozenset().union(*map(options_of, names))


def _options(parser: Any) -> list[str]:
    options = list(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                options += _options(inner)
    return options


def problems_with(line: str) -> list[str]:
    """What is wrong with a command line that begins behind `manage.py`."""
    words = shlex.split(line, comments=True)
    name, rest = words[0], words[1:]
    if name == "help":  # no command of its own
        return []
    if name not in get_commands():
        return [f"there is no command {name!r}"]
    unknown = [
        word
        for word in rest
        if word.startswith("--") and word.partition("=")[0] not in options_of(name)
    ]
    return [f"{name} has no {word}" for word in unknown]
