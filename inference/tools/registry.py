"""Which parser reads a model's calls: by name, or told by its chat template."""

from __future__ import annotations

from inference.parsing.plugins import Registry
from inference.tools.base import ToolParser
from inference.tools.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from inference.tools.gemma import FunctionGemmaParser, Gemma4Parser
from inference.tools.glm import Glm45Parser, Glm47Parser, HyV3Parser, K2HorizonParser
from inference.tools.harmony import HarmonyToolParser
from inference.tools.hermes import (
    Ernie45Parser,
    GigaChat3Parser,
    Granite20bParser,
    HermesParser,
    LongcatParser,
)
from inference.tools.invoke import (
    DeepSeekV4Parser,
    DeepSeekV32Parser,
    DeepSeekV41Parser,
    MiniMaxM2Parser,
    Step3Parser,
)
from inference.tools.kimi import KimiK2Parser
from inference.tools.lists import (
    HunyuanA13BParser,
    InternLMParser,
    JambaParser,
    Phi4MiniJsonParser,
    XlamParser,
)
from inference.tools.llama import Llama3JsonParser
from inference.tools.mistral import MistralNamedParser, MistralParser
from inference.tools.objects import GraniteParser, JsonParser
from inference.tools.plamo import Plamo3Parser
from inference.tools.pythonic import (
    Lfm2Parser,
    Llama4PythonicParser,
    Olmo3Parser,
    PythonicParser,
)
from inference.tools.qwen_coder import MimoParser, QwenCoderParser, SeedOssParser

#: The first whose marks a chat template holds reads that model; the more telling come first.
tool_parsers: Registry[ToolParser] = Registry(
    "tool_parsers",
    ToolParser,
    [
        HarmonyToolParser,
        DeepSeekV4Parser,
        DeepSeekV41Parser,
        DeepSeekV32Parser,
        DeepSeekV3Parser,
        DeepSeekV31Parser,
        KimiK2Parser,
        Step3Parser,
        MiniMaxM2Parser,
        Gemma4Parser,
        FunctionGemmaParser,
        Plamo3Parser,
        K2HorizonParser,
        LongcatParser,
        GigaChat3Parser,
        HyV3Parser,
        Glm47Parser,
        Glm45Parser,
        SeedOssParser,
        QwenCoderParser,
        MimoParser,
        MistralNamedParser,
        MistralParser,
        Lfm2Parser,
        Olmo3Parser,
        Llama4PythonicParser,
        InternLMParser,
        Phi4MiniJsonParser,
        HunyuanA13BParser,
        JambaParser,
        GraniteParser,
        PythonicParser,
        Llama3JsonParser,
        Granite20bParser,
        Ernie45Parser,
        HermesParser,
        XlamParser,
        JsonParser,
    ],
    aliases={
        "openai": "gpt_oss",
        "qwen3_xml": "qwen3_coder",
        "llama4_json": "llama3_json",
        "granite4": "hermes",
        "qwen3_json": "hermes",
        "ling3": "glm47",
        "poolside_v1": "glm45",
        **dict.fromkeys(("step3p5", "step5"), "qwen3_coder"),
    },
)


def parser_for_template(template: str) -> type[ToolParser] | None:
    """The parser for models with this chat template, or None."""
    return tool_parsers.for_template(template)
