"""Which parser reads a model's calls: by name, or told by its chat template."""

from __future__ import annotations

from inference.parsing.plugins import Registry
from inference.tools.base import ToolParser
from inference.tools.hermes import HermesParser

#: The first whose marks a chat template holds reads that model's calls.
tool_parsers: Registry[ToolParser] = Registry(
    "tool_parsers",
    ToolParser,  # type: ignore[type-abstract]
    [HermesParser],
)


def parser_for_template(template: str) -> type[ToolParser] | None:
    """The parser for models with this chat template, or None."""
    return tool_parsers.for_template(template)
