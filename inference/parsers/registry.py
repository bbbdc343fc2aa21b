"""Selects the parsers of a model: by name, or by its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.contract.errors import ConfigError
from inference.parsers import reasoning_families as control
from inference.parsers import reasoning_families as tags
from inference.parsers.gemma_tools import FunctionGemmaParser, Gemma4Parser
from inference.parsers.harmony import HarmonyParser, HarmonyToolParser
from inference.parsers.json_tools import (
    Ernie45Parser,
    GigaChat3Parser,
    Granite20bParser,
    GraniteParser,
    HermesParser,
    HunyuanA13BParser,
    InternLMParser,
    JambaParser,
    JsonParser,
    LongcatParser,
    Phi4MiniJsonParser,
    XlamParser,
)
from inference.parsers.llama_mistral_tools import (
    Llama3JsonParser,
    MistralNamedParser,
    MistralParser,
)
from inference.parsers.plugins import ParserRegistry
from inference.parsers.pythonic_tools import (
    Lfm2Parser,
    Llama4PythonicParser,
    Olmo3Parser,
    PythonicParser,
)
from inference.parsers.reasoning_parser import ReasoningParser
from inference.parsers.section_tools import (
    DeepSeekV3Parser,
    DeepSeekV31Parser,
    KimiK2Parser,
    Plamo3Parser,
)
from inference.parsers.tagged_families import (
    DeepSeekV4Parser,
    DeepSeekV32Parser,
    DeepSeekV41Parser,
    Glm45Parser,
    Glm47Parser,
    HyV3Parser,
    K2HorizonParser,
    MimoParser,
    MiniMaxM2Parser,
    QwenCoderParser,
    SeedOssParser,
    Step3Parser,
)
from inference.parsers.tool_parser import ToolCallParser

# -- Reasoning parsers.


#: Checked in order: the first parser whose marks all occur in the chat template is used.
reasoning_parsers: ParserRegistry[ReasoningParser] = ParserRegistry(
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


#: Checked in order: the first parser whose marks all occur in the chat template is used.
tool_parsers: ParserRegistry[ToolCallParser] = ParserRegistry(
    "tool_parsers",
    ToolCallParser,
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


# -- Parser names in a model's settings are checked when the model is loaded, not per request.


_TEMPLATE = "a checkpoint's response_template isn't read; name the parser of its family"
_SUFFIX = "its tags end in a number of the checkpoint's own; hy_v3 reads those without one"
_MUSE = "Muse's channels aren't read"
_CALLS = "this family's calls aren't read. Without a parser, calls that are required come as JSON"
#: vLLM's parser names that Quire doesn't have -> the reason. A plug-in may define them.
UNAVAILABLE_PARSERS: Mapping[str, Mapping[str, str]] = {
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


def _check(setting: str, settings: Mapping[str, Any], registered: list[str]) -> None:
    name = settings.get(setting)
    if not name or name in registered:
        return
    why = UNAVAILABLE_PARSERS[setting].get(str(name))
    if why is not None:
        raise ConfigError(
            f"vLLM's {setting} {name!r} isn't here: {why}. A package can add one: see "
            "docs/extending.md.",
            param=setting,
        )
    raise ConfigError(
        f"There is no {setting} {str(name)[:100]!r} here. There are: {', '.join(registered)}.",
        param=setting,
    )
