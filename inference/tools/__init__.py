"""Tool calls in a model's text: parsers, each for a way of writing them."""

from inference.tools.base import ToolParser
from inference.tools.function import ToolFunction
from inference.tools.hermes import HermesParser
from inference.tools.layout import Layout
from inference.tools.objects import JsonParser
from inference.tools.registry import parser_for_template, tool_parsers

__all__ = [
    "HermesParser",
    "JsonParser",
    "Layout",
    "ToolFunction",
    "ToolParser",
    "parser_for_template",
    "tool_parsers",
]
