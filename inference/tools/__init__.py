"""Tool calls in a model's text: parsers, each for a way of writing them."""

from inference.tools.base import ParsedText, ToolCallText, ToolParser
from inference.tools.hermes import HermesParser
from inference.tools.registry import parser_for_template

__all__ = ["HermesParser", "ParsedText", "ToolCallText", "ToolParser", "parser_for_template"]
