"""Each name of a parser that vLLM 0.33 has is a parser here, or is refused with its own reason."""

from __future__ import annotations

import pytest

from engine.contract.errors import ConfigError
from inference.parsers.registry import (
    UNAVAILABLE_PARSERS,
    check_parser_names,
    reasoning_parsers,
    tool_parsers,
)

_TOOLS = """
    apertus beam cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32
    deepseek_v4 deepseek_v41 dots ernie45 functiongemma gemma4 gigachat3 glm45 glm47 granite
    granite-20b-fc granite4 hermes hf hunyuan_a13b hy_v3 hy_v4 inkling internlm jamba k2_horizon
    kimi_k2 kimi_k3 lfm2 ling3 llama3_json llama4_json llama4_pythonic longcat mimo minicpm5
    minimax_m2 minimax_m3 mistral muse muse_glimmer musespark1x olmo3 openai phi4_mini_json
    plamo3 poolside_v1 pythonic qwen3_coder qwen3_json qwen3_xml seed_oss step3 step3p5 step5
    xlam
"""
TOOLS = _TOOLS.split()
_REASONING = """
    beam cohere_command3 cohere_command4 deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41
    ernie45 gemma4 glm45 glm47 granite granite_thinking_parser hf holo2 hunyuan_a13b hy_v3 hy_v4
    inkling k2_horizon kimi_k2 kimi_k3 ling3 mimo minicpmv minimax_m2 minimax_m2_append_think
    minimax_m3 mistral muse muse_glimmer musespark1x nemotron_v3 olmo3 openai_gptoss plamo3
    poolside_v1 qwen3 seed_oss step3 step3p5 step5
"""
REASONING = _REASONING.split()


@pytest.mark.parametrize("name", TOOLS)
def test_tool_parsers(name: str) -> None:
    check("tool_call_parser", name, tool_parsers.names())


@pytest.mark.parametrize("name", REASONING)
def test_reasoning_parsers(name: str) -> None:
    check("reasoning_parser", name, reasoning_parsers.names())


def check(setting: str, name: str, names: list[str]) -> None:
    assert (name in names) is (name not in UNAVAILABLE_PARSERS[setting])
    if name in names:
        check_parser_names({setting: name})
        return
    with pytest.raises(ConfigError, match=f"vLLM's {setting} '{name}' isn't here: ") as refusal:
        check_parser_names({setting: name})
    assert refusal.value.param == setting
