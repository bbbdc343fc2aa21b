"""Names of parsers in a model's settings: refused when the model is loaded, not at a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.contract.errors import ConfigError
from inference.reasoning import reasoning_parsers
from inference.tools import tool_parsers


def check_parser_names(settings: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a parser that this installation doesn't have, plug-ins included."""
    _check("tool_call_parser", settings, tool_parsers.names())
    _check("reasoning_parser", settings, ["none", *reasoning_parsers.names()])


def _check(setting: str, settings: Mapping[str, Any], known: list[str]) -> None:
    name = settings.get(setting)
    if name and name not in known:
        raise ConfigError(
            f"There is no {setting} {str(name)[:100]!r} here. There are: {', '.join(known)}.",
            param=setting,
        )
