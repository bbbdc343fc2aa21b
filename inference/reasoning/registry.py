"""Which parser finds a model's reasoning: by name, or told by its chat template."""

from __future__ import annotations

from inference.parsing.plugins import Registry
from inference.reasoning import control, tags
from inference.reasoning.base import ReasoningParser
from inference.reasoning.harmony import HarmonyParser

#: The first whose marks a chat template holds; the more telling come first.
reasoning_parsers: Registry[ReasoningParser] = Registry(
    "reasoning_parsers",
    ReasoningParser,
    [
        HarmonyParser,
        control.SeedOssParser,
        control.MiniMaxM3Parser,
        control.K2HorizonParser,
        control.Gemma4Parser,
        control.MistralParser,
        control.Plamo3Parser,
        control.KimiK3Parser,
        control.InklingParser,
        control.CohereCommand3Parser,
        control.CohereCommand4Parser,
        tags.DeepSeekR1Parser,
        tags.KimiK2Parser,
        tags.HunyuanA13BParser,
        tags.Ernie45Parser,
        tags.Qwen3Parser,
        tags.GraniteParser,
        tags.DeepSeekV3Parser,
        tags.DeepSeekV4Parser,
        tags.Glm45Parser,
        tags.MiniMaxM2Parser,
        tags.MiniMaxM2AppendThinkParser,
        tags.HyV3Parser,
    ],
    aliases={
        "openai_gptoss": "gpt_oss",
        "deepseek_v41": "deepseek_v4",
        "poolside_v1": "deepseek_v3",
        **dict.fromkeys(("olmo3", "step3", "step5"), "deepseek_r1"),
        **dict.fromkeys(
            (
                *("glm47", "granite_thinking_parser", "holo2", "ling3", "mimo", "minicpmv"),
                *("nemotron_v3", "step3p5"),
            ),
            "glm45",
        ),
    },
)
