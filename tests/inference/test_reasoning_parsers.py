"""Every reasoning parser: what vLLM's names read, and how the engine is told of it."""

from __future__ import annotations

from functools import partial

import pytest

from engine.contract.reasoning import ReasoningPhase, ReasoningState
from engine.text.tokenizer import Tokenizer
from inference.chat.parsers import OutputParserConfig
from inference.chat.reasoning import reasoning_counter
from inference.chat.turn import build_message
from inference.parsers.registry import reasoning_parsers
from tests.inference.parsers import read, shape

ASSUMED = (
    *(
        "deepseek_r1",
        "deepseek_v4",
        "deepseek_v41",
        "ernie45",
        "glm45",
        "glm47",
        "holo2",
        "kimi_k2",
    ),
    *("ling3", "mimo", "minicpmv", "minimax_m2", "nemotron_v3", "granite_thinking_parser"),
    *("kimi_k2", "olmo3", "step3", "step3p5", "step5"),
)
#: vLLM's names but for beam, hf, hy_v4 and the three of Muse.
NAMES = (
    *ASSUMED,
    *("cohere_command3", "cohere_command4", "deepseek_v3", "gemma4", "granite", "hunyuan_a13b"),
    *("hy_v3", "inkling", "k2_horizon", "kimi_k3", "minimax_m2_append_think", "minimax_m3"),
    *("mistral", "openai_gptoss", "plamo3", "poolside_v1", "qwen3", "seed_oss"),
)
CALL = "<tool_call>\n<function=bash>\n</function>\n</tool_call>"
SECTION = "<|tool_calls_section_begin|>"
DSML = "<｜DSML｜tool_calls>"
THINK3, DONE3 = "<|open|>think<|sep|>", "<|close|>think<|sep|>"
SAY3, SAID3 = "<|open|>response<|sep|>", "<|close|>response<|sep|>"
PLAMO, MALPO = "<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"
#: Parser, where the prompt ends, output, reasoning, content.
CASES: list[tuple[str, bool | None, str, str, str]] = [
    *((name, None, "Hm.</think>Yes.", "Hm.", "Yes.") for name in ASSUMED),
    *((name, None, "<think>Hm.\nAh.</think>\nYes.\n", "Hm.\nAh.", "Yes.\n") for name in ASSUMED),
    *((name, None, "Hm, cut", "Hm, cut", "") for name in ASSUMED),
    *((name, None, "</think>Yes.", "", "Yes.") for name in ASSUMED),
    *((name, False, "Yes.</think>", "", "Yes.</think>") for name in ASSUMED if name != "ernie45"),
    ("deepseek_v3", None, "Yes.", "", "Yes."),
    ("deepseek_v3", True, "Hm.</think>Yes.", "Hm.", "Yes."),
    ("poolside_v1", True, "Hm.</think>Yes.", "Hm.", "Yes."),
    ("hy_v3", None, "Yes.", "", "Yes."),
    ("hy_v3", True, "Hm.</think>Yes.", "Hm.", "Yes."),
    ("olmo3", None, "<think>\n</think>\n\nYes.", "", "Yes."),
    ("glm45", None, "<think>Hm <think> hm.</think>A</think>B", "Hm <think> hm.", "A</think>B"),
    ("qwen3", None, f"<think>Hm.\n\n{CALL}", "Hm.", CALL),
    ("qwen3", True, f"Hm.\n\n{CALL}", "Hm.", CALL),
    ("qwen3", True, f"Or {CALL}?</think>Yes.", f"Or {CALL}?", "Yes."),
    ("qwen3", None, "</think>Yes.", "", "Yes."),
    ("nemotron_v3", None, f"Hm.{CALL}", "Hm.", CALL),
    ("kimi_k2", None, f"Hm.{SECTION}f", "Hm.", f"{SECTION}f"),
    ("deepseek_v4", True, f"Hm.\n{DSML}f", "Hm.", f"{DSML}f"),
    ("deepseek_v4", True, f"Or {DSML}f?</think>\n{DSML}g", f"Or {DSML}f?", f"{DSML}g"),
    ("minimax_m2", True, "Hm.<minimax:tool_call>f", "Hm.", "<minimax:tool_call>f"),
    ("deepseek_r1", True, "Hm.<｜tool▁calls▁begin｜>f", "Hm.", "<｜tool▁calls▁begin｜>f"),
    ("step3", True, "Hm.<｜tool_calls_begin｜>f", "Hm.", "<｜tool_calls_begin｜>f"),
    ("deepseek_v3", True, "Hm.<｜tool▁calls▁begin｜>f", "Hm.", "<｜tool▁calls▁begin｜>f"),
    ("deepseek_v3", True, "Hm.<｜DSML｜function_calls>f", "Hm.", "<｜DSML｜function_calls>f"),
    ("hy_v3", True, "Hm.<tool_calls>f", "Hm.", "<tool_calls>f"),
    ("hunyuan_a13b", True, "Hm.<tool_calls>f", "Hm.", "<tool_calls>f"),
    ("ernie45", True, "Hm.<tool_call>f", "Hm.", "<tool_call>f"),
    ("minimax_m2_append_think", True, "Hm.</think>Yes.", "", "<think>Hm.</think>Yes."),
    ("minimax_m2_append_think", None, "</think>Yes.", "", "<think></think>Yes."),
    ("minimax_m2_append_think", None, "<think>Hm.", "", "<think>Hm."),
    ("minimax_m2_append_think", False, "Yes.", "", "Yes."),
    ("minimax_m3", None, "<mm:think>Hm.</mm:think>Yes.", "Hm.", "Yes."),
    ("minimax_m3", None, "</mm:think>Yes.", "", "Yes."),
    ("minimax_m3", None, "Yes.", "", "Yes."),
    ("minimax_m3", True, "Hm.</mm:think>Yes.", "Hm.", "Yes."),
    ("hunyuan_a13b", None, "<think>\n\n</think>\n<answer>\nYes.\n</answer>", "", "Yes."),
    ("hunyuan_a13b", None, "<think>\nHm\nm\n</think>\n<answer>\nYes.", "Hm\nm", "Yes."),
    ("hunyuan_a13b", None, "<think>\nHm.\n</think>\n<answer>\n", "Hm.", ""),
    ("hunyuan_a13b", None, "Yes. </answer>", "", "Yes. </answer>"),
    (
        "hunyuan_a13b",
        True,
        "</think><answer>A </answer> is a tag.\n</answer>\n",
        "",
        "A </answer> is a tag.",
    ),
    ("hunyuan_a13b", False, "<answer>\nYes.\n</answer>", "", "Yes."),
    ("ernie45", None, "abc\n</think>\n\n<response>\ndef\n</response>\n", "abc", "def"),
    ("gemma4", None, "<|channel>thought\nHm.<channel|>Yes.", "Hm.", "Yes."),
    ("gemma4", None, "<|channel>thought\n<channel|>", "", ""),
    ("gemma4", None, "<|channel>thousand reasons<channel|>Yes.", "thousand reasons", "Yes."),
    ("gemma4", None, "<|channel>Hm.", "Hm.", ""),
    ("gemma4", None, "Before\n<|channel>Hm.<channel|>\nAfter", "Hm.", "Before\nAfter"),
    ("gemma4", None, "Yes.<channel|>No.", "", "Yes.No."),
    ("gemma4", None, "<|tool_call>", "", "<|tool_call>"),
    ("mistral", None, "[THINK]a\nb[/THINK]c\nd", "a\nb", "c\nd"),
    ("mistral", None, "<think>\na\n</think>\nc", "a", "c"),
    ("mistral", None, "[THINK]a", "a", ""),
    ("mistral", None, "[/THINK]Yes.", "", "Yes."),
    ("mistral", None, "Before\n[THINK]r[/THINK]\nAfter", "r", "Before\nAfter"),
    ("mistral", None, "[THINK]a[/THINK][TOOL_CALLS]f{}", "a", "[TOOL_CALLS]f{}"),
    ("plamo3", None, f"{PLAMO}Hm.{MALPO}Yes.", "Hm.", "Yes."),
    ("plamo3", None, "Hm.", "Hm.", ""),
    ("plamo3", None, f"{MALPO}A{MALPO}B", "", "AB"),
    ("plamo3", None, f"{MALPO}A{PLAMO}R{MALPO}", "R", "A"),
    ("seed_oss", None, "<seed:think>Hm.</seed:think>Yes.", "Hm.", "Yes."),
    ("seed_oss", None, "Hm.</seed:think><seed:tool_call>f", "Hm.", "<seed:tool_call>f"),
    ("k2_horizon", None, "<ifm|think_fast>Hm.</ifm|think_fast>Yes.", "Hm.", "Yes."),
    ("k2_horizon", True, "Hm.<ifm|tool_calls>f", "Hm.", "<ifm|tool_calls>f"),
    ("kimi_k3", None, f"{THINK3}Hm.{DONE3}{SAY3}Yes.{SAID3}", "Hm.", "Yes."),
    ("kimi_k3", True, f"Hm.{DONE3}{SAY3}Yes.", "Hm.", "Yes."),
    ("kimi_k3", False, f"Yes.{SAID3}", "", "Yes."),
    (
        *("inkling", None),
        "<|content_thinking|>Hm.<|end_message|><|message_model|><|content_text|>Yes.<|end_message|>",
        *("Hm.", "Yes."),
    ),
    ("inkling", None, "Yes.<|content_model_end_sampling|>", "", "Yes."),
    (
        *("cohere_command3", None),
        "<|START_THINKING|> Hm.<|END_THINKING|>\n<|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        *("Hm.", "Yes."),
    ),
    (
        *("cohere_command4", True),
        "Hm.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>",
        *("Hm.", "Yes."),
    ),
]


def plan(name: str, inside: bool | None) -> OutputParserConfig:
    parser = reasoning_parsers.get(name)
    assert parser is not None
    return OutputParserConfig(reasoning=partial(parser, inside))


@pytest.mark.parametrize(("name", "inside", "text", "reasoning", "content"), CASES)
def test_vllms_names_read_what_their_models_write(
    name: str, inside: bool | None, text: str, reasoning: str, content: str
) -> None:
    message = build_message(read(plan(name, inside), [text]))
    assert (message.get("reasoning") or "", message.get("content") or "") == (reasoning, content)
    full_shape = shape(read(plan(name, inside), [text]))
    assert shape(read(plan(name, inside), list(text))) == full_shape
    for cut in range(len(text)):
        assert shape(read(plan(name, inside), [text[:cut], text[cut:]])) == full_shape


def test_every_name_of_vllm_has_a_case_or_one_elsewhere() -> None:
    elsewhere = {"openai_gptoss", "granite"}
    assert {name for name, *_ in CASES} | elsewhere == set(NAMES)
    assert all(reasoning_parsers.get(name) for name in NAMES)
    assert set(NAMES) <= set(reasoning_parsers.names())


def written(parser_name: str, tokenizer: Tokenizer, budget: int) -> str:
    """What comes of a model that would think for ever, under a budget, and then says "{}"."""
    parser = reasoning_parsers.get(parser_name)
    assert parser is not None
    params = reasoning_counter(parser, tokenizer, None)
    assert params is not None
    params.budget = budget
    state, tokens = ReasoningState(params), list(params.start)
    for token in tokens:
        assert state.advance(token)
    thought = iter(tokenizer.encode("hmhm" * 20, add_special_tokens=False))
    while state.phase is not ReasoningPhase.PAST:
        forced = state.forced_token
        tokens.append(next(thought) if forced is None else forced)
        assert state.advance(tokens[-1])
    answer = tokenizer.encode("{}", add_special_tokens=False)
    assert not state.advance(answer[0])
    return tokenizer.decode(tokens + answer, False)


@pytest.mark.parametrize("name", NAMES)
def test_a_budget_closes_the_reasoning_and_a_form_begins_behind_it(
    name: str, tokenizer: Tokenizer
) -> None:
    text = written(name, tokenizer, budget=4)
    message = build_message(read(plan(name, None), [text]))
    if name == "minimax_m2_append_think":
        assert message["content"].startswith("<think>hm")
        assert message["content"].endswith("</think>{}")
    elif name == "openai_gptoss":  # a form has a header there: test_harmony_grammar.py
        assert text.count("<|end|>") == 1
    else:
        assert set(message["reasoning"]) == {"h", "m"}
        assert message["content"] == "{}"


@pytest.mark.parametrize(
    ("name", "variables", "on"),
    [
        ("qwen3", {}, None),
        ("qwen3", {"enable_thinking": False}, False),
        ("holo2", {"thinking": False}, False),
        ("kimi_k3", {"thinking": False, "enable_thinking": True}, True),
        ("deepseek_v3", {"thinking": True}, True),
        ("deepseek_v4", {"enable_thinking": True, "reasoning_effort": "none"}, False),
        ("hy_v3", {"reasoning_effort": "no_think"}, False),
        ("hy_v3", {"reasoning_effort": "low"}, True),
        ("minimax_m3", {"thinking_mode": "enabled"}, True),
        ("minimax_m3", {"thinking_mode": "disabled"}, False),
        ("minimax_m3", {"thinking_mode": "adaptive"}, None),
        ("gpt_oss", {"reasoning_effort": "none"}, None),
    ],
)
def test_a_templates_variables_turn_thinking_on_and_off(
    name: str, variables: dict[str, object], on: bool | None
) -> None:
    parser = reasoning_parsers.get(name)
    assert parser is not None
    assert parser.switched(variables) is on


@pytest.mark.parametrize(
    ("name", "tail", "inside"),
    [
        ("seed_oss", "<seed:bos>assistant\n<seed:think>\n", True),
        ("gemma4", "<|turn>model\n<|channel>thought\n", True),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", False),
        ("gemma4", "<|turn>model\n", None),
        ("kimi_k3", f"<|open|>message<|sep|>{SAY3}", False),
        ("kimi_k3", THINK3, True),
        ("hunyuan_a13b", "<think>\n\n</think>\n<answer>\n", False),
        ("k2_horizon", "<ifm|think_faster>", True),
        ("inkling", "<|message_model|>", None),
    ],
)
def test_the_prompts_end_tells_each_family(name: str, tail: str, inside: bool | None) -> None:
    parser = reasoning_parsers.get(name)
    assert parser is not None
    assert parser.prompt_opens_reasoning(tail) is inside
