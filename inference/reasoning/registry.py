"""Which parser finds a model's reasoning: by name, or told by its chat template."""

from __future__ import annotations

from inference.parsing.plugins import Registry
from inference.reasoning.base import ReasoningParser
from inference.reasoning.harmony import HarmonyParser
from inference.reasoning.tags import DeepSeekR1Parser, GraniteParser, Qwen3Parser

#: The first whose marks a chat template holds.
reasoning_parsers: Registry[ReasoningParser] = Registry(
    "reasoning_parsers",
    ReasoningParser,
    [HarmonyParser, DeepSeekR1Parser, Qwen3Parser, GraniteParser],
)
