"""Names of parsers in a model's settings: refused when the model is loaded, not at a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.contract.errors import ConfigError
from inference.reasoning import reasoning_parsers
from inference.tools import tool_parsers

_TEMPLATE = "a checkpoint's response_template isn't read; name the parser of its family"
_SUFFIX = "its tags end in a number of the checkpoint's own; hy_v3 reads those without one"
_MUSE = "Muse's channels aren't read"
_CALLS = "this family's calls aren't read. Without a parser, calls that are required come as JSON"
#: vLLM's names without a parser here, and why. A plug-in of the name takes its place.
NOT_HERE: Mapping[str, Mapping[str, str]] = {
    "reasoning_parser": {
        **dict.fromkeys(("beam", "hf"), _TEMPLATE),
        "hy_v4": _SUFFIX,
        **dict.fromkeys(("muse", "muse_glimmer", "musespark1x"), _MUSE),
    },
    "tool_call_parser": {
        **dict.fromkeys(("beam", "hf"), _TEMPLATE),
        "hy_v4": _SUFFIX,
        **dict.fromkeys(("muse", "muse_glimmer", "musespark1x"), _MUSE),
        **dict.fromkeys(("apertus", "cohere_command3", "cohere_command4", "dots"), _CALLS),
        **dict.fromkeys(("inkling", "kimi_k3", "minicpm5", "minimax_m3"), _CALLS),
    },
}


def check_parser_names(settings: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a parser that this installation doesn't have, plug-ins included."""
    _check("tool_call_parser", settings, tool_parsers.names())
    _check("reasoning_parser", settings, ["none", *reasoning_parsers.names()])


def _check(setting: str, settings: Mapping[str, Any], known: list[str]) -> None:
    name = settings.get(setting)
    if not name or name in known:
        return
    why = NOT_HERE[setting].get(str(name))
    if why is not None:
        raise ConfigError(
            f"vLLM's {setting} {name!r} isn't here: {why}. A package can add one: see "
            "docs/extending/tool-parser.md.",
            param=setting,
        )
    raise ConfigError(
        f"There is no {setting} {str(name)[:100]!r} here. There are: {', '.join(known)}.",
        param=setting,
    )
