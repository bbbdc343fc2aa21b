"""Which parser reads a model's calls, told by its chat template."""

from __future__ import annotations

from collections.abc import Callable

from inference.tools.base import ToolParser
from inference.tools.hermes import OPEN, HermesParser

#: A mark that a chat template writes, and the parser for models trained on it.
PARSERS: dict[str, Callable[[], ToolParser]] = {OPEN: HermesParser}


def parser_for_template(template: str) -> Callable[[], ToolParser] | None:
    """The parser for models with this chat template, or None."""
    return next((parser for mark, parser in PARSERS.items() if mark in template), None)
