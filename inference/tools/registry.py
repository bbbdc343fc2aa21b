"""Which parser reads a model's calls: by name, or told by its chat template."""

from __future__ import annotations

from inference.parsing.plugins import Registry
from inference.tools.base import ToolParser
from inference.tools.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from inference.tools.harmony import HarmonyToolParser
from inference.tools.hermes import HermesParser
from inference.tools.mistral import MistralNamedParser, MistralParser
from inference.tools.objects import GraniteParser, JsonParser, Llama3JsonParser
from inference.tools.pythonic import PythonicParser
from inference.tools.qwen_coder import QwenCoderParser

#: The first whose marks a chat template holds reads that model; the more telling come first.
tool_parsers: Registry[ToolParser] = Registry(
    "tool_parsers",
    ToolParser,
    [
        HarmonyToolParser,
        DeepSeekV3Parser,
        DeepSeekV31Parser,
        QwenCoderParser,
        MistralNamedParser,
        MistralParser,
        GraniteParser,
        PythonicParser,
        Llama3JsonParser,
        HermesParser,
        JsonParser,
    ],
)


def parser_for_template(template: str) -> type[ToolParser] | None:
    """The parser for models with this chat template, or None."""
    return tool_parsers.for_template(template)
