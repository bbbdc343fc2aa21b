"""Tool calls are read the same however the text is cut, and nothing is lost."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from inference.apps import check_gateway
from inference.chat.turn import build_message
from inference.parsers.json_tools import HermesParser
from inference.parsers.registry import tool_parsers
from inference.parsers.state_machine import Part

CALL = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}\n</tool_call>'
)


@dataclass
class Parsed:
    """An output put together."""

    content: str
    calls: list[dict[str, Any]]


def parse(chunks: list[str]) -> Parsed:
    parser = HermesParser()
    parts: list[Part] = []
    for chunk in chunks:
        parts += parser.push(chunk)
    message = build_message(parts + parser.flush())
    return Parsed(message["content"] or "", message.get("tool_calls", []))


def calls(parsed: Parsed) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in parsed.calls]


def test_a_call_is_read() -> None:
    parsed = parse([CALL])
    assert parsed.content == ""
    assert calls(parsed) == [("weather", '{"city": "Köln", "days": [1, 2]}')]
    assert parsed.calls[0]["id"].startswith("call_")


def test_several_calls_and_text_around_them() -> None:
    parsed = parse([f"Let me look. \n{CALL}\n{CALL}\nDone. "])
    assert parsed.content == "Let me look.Done. "
    assert [name for name, _ in calls(parsed)] == ["weather", "weather"]
    assert len({call["id"] for call in parsed.calls}) == 2


@pytest.mark.parametrize(
    "text",
    [
        "plain text",
        " white space \n ",
        "a < b and <tool",
        "<tool_cal",
        "<tool_call>not json</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>[1]</tool_call>",
        "<tool_call>" + "[" * 5000 + "</tool_call>",
        "<tool_call>{unfinished",
        "</tool_call>",
        "",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert parse([text]).content == text
    assert parse(list(text)).content == text
    assert parse([text]).calls == []


def test_a_call_without_its_closing_tag_counts() -> None:
    assert calls(parse(['<tool_call>{"name": "f", "arguments": {}}'])) == [("f", "{}")]


def test_arguments_that_are_text_already_stay_so() -> None:
    assert calls(parse(['<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool_call>'])) == [
        ("f", '{"a":1}')
    ]
    assert calls(parse(['<tool_call>{"name":"f"}</tool_call>'])) == [("f", "{}")]


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        f"Hm.\n{CALL}\n\n{CALL} and <b> more\n",
        f"<tool_call>oops</tool_call> {CALL}",
        "x <to y",
    ],
)
def test_any_split_gives_what_the_whole_gives(text: str) -> None:
    full_parsed = parse([text])
    for cut in range(len(text) + 1):
        parsed = parse([text[:cut], text[cut:]])
        assert (parsed.content, calls(parsed)) == (full_parsed.content, calls(full_parsed))
    parsed = parse(list(text))
    assert (parsed.content, calls(parsed)) == (full_parsed.content, calls(full_parsed))


@profile(max_examples=100, deadline=None)
@given(
    chunks=st.lists(
        st.sampled_from([CALL, "text", " ", "\n", "<tool_call>", "</tool_call>", "{", "<", "é🙂"]),
        max_size=8,
    ),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_any_cutting_of_any_text_gives_the_same(chunks: list[str], cuts: list[int]) -> None:
    text = "".join(chunks)
    positions = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    full_parsed = parse([text])
    cut_up = parse([text[a:b] for a, b in pairwise(positions)])
    assert (cut_up.content, calls(cut_up)) == (full_parsed.content, calls(full_parsed))
    for _, arguments in calls(full_parsed):
        json.loads(arguments)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("... <tool_call> ...", "hermes"),
        ("<tool_call> <function=name> <parameter=key>", "qwen3_coder"),
        ("[TOOL_CALLS]", "mistral"),
        ("[TOOL_CALLS] [ARGS]", "mistral_named"),
        ("<|tool_call|>", "granite"),
        ("<｜tool▁call▁begin｜> ```json", "deepseek_v3"),
        ("<｜tool▁call▁begin｜>", "deepseek_v31"),
        ('"parameters": dictionary of argument name and its value', "llama3_json"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", "glm45"),
        ("<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>", "glm47"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<minimax:tool_call>", "minimax_m2"),
        ("<|tool_call>call:", "gemma4"),
        ("<start_function_call>call:", "functiongemma"),
        ("<｜DSML｜function_calls>", "deepseek_v32"),
        ("<tool_calls> <answer>", "hunyuan_a13b"),
        ("<tool_call> <response>", "ernie45"),
        ("<steptml:invoke name=", "step3"),
        ("functools[", "phi4_mini_json"),
        ("<tool_calls>", "jamba"),
        ("<|plugin|>", "internlm"),
        ("<function_calls>", "olmo3"),
        ("<|tool_call_start|>", "lfm2"),
        ("<|python_start|>", "llama4_pythonic"),
        ("<|channel|> <|constrain|>", "gpt_oss"),
    ],
)
def test_the_parser_is_told_by_the_template(template: str, name: str) -> None:
    parser = tool_parsers.for_template(template)
    assert parser is not None
    assert parser.name == name


def test_a_template_without_marks_has_no_parser() -> None:
    assert tool_parsers.for_template("{{ tools }}") is None


class OurParser(HermesParser):
    """An operator's own."""

    name = "ours"
    template_marks = ("<ours>",)


def test_an_operator_adds_a_parser_by_a_setting(settings: Any) -> None:
    path = f"{__name__}.OurParser"
    settings.QUIRE = settings.QUIRE.replace(tool_parsers={"ours": path})
    assert tool_parsers.get("ours") is OurParser
    assert tool_parsers.for_template("<ours> <tool_call>") is OurParser
    settings.QUIRE = settings.QUIRE.replace(tool_parsers={"ours": "json.dumps"})
    with pytest.raises(TypeError, match="ToolCallParser"):
        tool_parsers.get("ours")


def test_bad_settings_show_before_the_start(settings: Any) -> None:
    assert check_gateway() == []
    settings.QUIRE = settings.QUIRE.replace(
        tool_parsers={"ours": "json.dumps"}, reasoning_parsers={"ours": "nowhere.Parser"}
    )
    assert [error.id for error in check_gateway()] == ["inference.E001", "inference.E002"]
