"""Calls written in odd ways are read, or stay whole as content: never half of one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from inference.chat.parsers import OutputParserConfig
from inference.chat.turn import build_message
from inference.parsers.registry import tool_parsers
from inference.parsers.tool_parser import MAX_HEADER
from tests.inference.parsers import BOTH, FUNCTIONS, NO_CALLS, SAMPLES, Sample, read, shape

W = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
C = '{"name": "clock", "arguments": {}}'
TWO = [("get_weather", '{"city": "Rome"}'), ("clock", "{}")]
#: Parsers of call objects, with what stands around them.
OBJECTS = {
    "hermes": ("<tool_call>\n", "\n</tool_call>"),
    "longcat": ("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
    "ernie45": ("<tool_call>\n", "\n</tool_call>"),
    "granite-20b-fc": ("<function_call> ", ""),
    "gigachat3": ("<|function_call|>", "<|message_sep|>"),
    "mistral": ("[TOOL_CALLS] ", ""),
    "granite": ("<|tool_call|>", ""),
    "hunyuan_a13b": ("<tool_calls>", "</tool_calls>"),
    "jamba": ("<tool_calls>", "</tool_calls>"),
    "phi4_mini_json": ("functools", ""),
    "internlm": ("<|action_start|><|plugin|>", "<|action_end|>"),
    "xlam": ("<tool_call>", "</tool_call>"),
}


def message(name: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls of a text, the same whole and character by character."""
    parser = tool_parsers.get(name)
    assert parser is not None
    plan = OutputParserConfig(tools=partial(parser, FUNCTIONS))
    full = read(plan, [text])
    assert shape(read(plan, list(text))) == shape(full)
    message: dict[str, Any] = build_message(full)
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return message["content"] or "", [(call["name"], call["arguments"]) for call in calls]


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize(
    "body",
    [
        f"{W}\n{C}",
        f"{W}, {C}",
        f"[{W}, {C}]",
        f"[{W}\n{C}]",
        f"```json\n[{W}, {C}]\n```",
        f"```\n{W}\n{C}\n```",
        f"```tool_call\n{W}\n{C}\n```",
        f"```json\n{W}\n```\n```json\n{C}\n```",
        f"[[{W}, {C}]]",
        f"[[{W}], [{C}]]",
        f'{{"tool_calls": [{W}, {C}]}}',
        f'{{\n  "tool_calls" : [\n    {W},\n    {C}\n  ]\n}}',
        f'```json\n{{"tool_calls":[{W}, {C}]}}\n```',
    ],
)
def test_fault_95_several_calls_stand_in_one_block(name: str, body: str) -> None:
    initial, after = OBJECTS[name]
    assert message(name, f"Hm.\n{initial}{body}{after}") == ("Hm.", TWO)


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize(
    "body", [f"[{W}, {C},]", f"[{W}, {C}, ]", f"{W};\n{C}", f"{W},\n{C},", f"{W}}}\n{C}}}}}"]
)
def test_fault_95_marks_too_many_between_calls_are_no_content(name: str, body: str) -> None:
    initial, after = OBJECTS[name]
    assert message(name, f"Hm.\n{initial}{body}{after}") == ("Hm.", TWO)


@pytest.mark.parametrize(
    "text",
    [
        f"[[{W}, {C}]]",
        f'{{"tool_calls": [{W}, {C}]}}',
        f'{{\n  "tool_calls": [\n{W},\n{C}\n]\n}}',
        f'<tool_call>{{"tool_calls": [{W}, {C}]}}</tool_call>',
        f'```json\n{{"tool_calls": [{W}, {C}]}}\n```',
        f"```json\n{W}\n```\n\n```json\n{C}\n```",
        f"```json\n<tool_call>{W}</tool_call>\n```\n```json\n<tool_call>{C}</tool_call>\n```",
    ],
)
def test_fault_95_xlams_brackets_and_fences_are_no_content(text: str) -> None:
    assert message("xlam", f"Hm.\n{text}") == ("Hm.", TWO)


def test_fault_95_a_whole_answer_may_hold_its_calls_in_a_field() -> None:
    text = f'{{"tool_calls": [{W}, {C}]}}'
    for name in ("json", "llama4_pythonic"):
        assert message(name, text) == ("", TWO)
    assert message("llama3_json", text) == (text, [])  # an answer in JSON


def test_fault_95_white_space_without_end_is_read_once() -> None:
    kind = tool_parsers.get("hermes")
    assert kind is not None
    parser = kind()
    parser.push("<tool_call>{" + " " * MAX_HEADER)
    assert not parser._buffer


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("calls", ["[]", '["a"]', "{}", "1", "[", "", " "])
def test_fault_95_a_field_of_calls_that_are_none_stays_whole(name: str, calls: str) -> None:
    initial, after = OBJECTS[name]
    text = f'{initial}{{"tool_calls": {calls}}}{after}'
    assert message(name, text) == (text, [])


@pytest.mark.parametrize(
    "text", ['{"tool_calls": []}', '{"tool_calls": ["a"]}', "[[1]]", "[[", "[ [1, 2], [3]]"]
)
def test_fault_95_lists_without_a_call_stay_whole(text: str) -> None:
    assert message("xlam", text) == (text, [])


def test_fault_95_what_follows_a_call_as_text_stays_as_it_is() -> None:
    text = "[TOOL_CALLS] " + W
    for more in (", and so on", "; } x", "}, or else"):
        assert message("mistral", text + more) == (more, TWO[:1])


#: Samples that are calls alone, or these behind "Hm.", without a fence or a tag around text.
SINGLE_CALLS = [
    sample
    for sample in SAMPLES
    if sample.parser not in ("pythonic", "llama4_pythonic", "json")
    and sample.content in ("", "Hm.")
    and "```json\n[" not in sample.text
    and "<response>" not in sample.text
]


@pytest.mark.parametrize("sample", SINGLE_CALLS, ids=lambda sample: sample.parser)
@pytest.mark.parametrize("fence", ["```", "```json", "```xml"])
def test_fault_95_a_fence_around_calls_is_no_content(sample: Sample, fence: str) -> None:
    calls = sample.text.removeprefix("Hm.").strip()
    text = f"Hm.\n\n{fence}\n{calls}\n```"
    assert message(sample.parser, text) == ("Hm.", list(sample.calls))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.parser)
def test_fault_95_a_mark_that_comes_twice_counts_once(sample: Sample) -> None:
    parser = tool_parsers.get(sample.parser)
    assert parser is not None
    openers = [mark for mark in parser.markers if sample.text.find(mark) >= 0]
    first = min(openers, key=sample.text.index, default="")
    closing = [mark for mark in parser.closers if mark in parser.markers]
    expected = (sample.content, list(sample.calls))
    if first and first in (*getattr(parser, "openers", ()), *getattr(parser, "section", ())):
        for between in ("", "\n"):
            doubled = sample.text.replace(first, f"{first}{between}{first}", 1)
            assert message(sample.parser, doubled) == expected
    for mark in closing:
        if not sample.content.endswith("Done.") and sample.text.rstrip().endswith(">"):
            assert message(sample.parser, f"{sample.text}\n{mark}\n{mark}") == expected
            content, calls = message(sample.parser, f"{sample.text} {mark} So.")
            assert (content, calls) == (sample.content + "So.", list(sample.calls))


@pytest.mark.parametrize("name", [name for name in OBJECTS if OBJECTS[name][1]])
def test_fault_95_text_in_a_block_is_content_without_the_blocks_marks(name: str) -> None:
    initial, after = OBJECTS[name]
    assert message(name, f"{initial}{W} There.{after} Done.") == ("There.Done.", TWO[:1])
    full = f"{initial}I call {W}{after}"
    assert message(name, full) == (full, [])


def test_fault_95_what_shows_a_call_and_is_none_stays_whole_after_a_call() -> None:
    visible = "It is written <tool_call>like this</tool_call>."
    text = f"<tool_call>{W}</tool_call>\n{visible}"
    assert message("hermes", text) == (visible, TWO[:1])
    code = "So:\n```python\nprint(1)\n```\n"
    assert message("hermes", f"<tool_call>{W}</tool_call>\n{code}") == (code, TWO[:1])


def test_fault_95_kimis_calls_may_lack_their_number() -> None:
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.clock<|tool_call_argument_begin|>"
        "{}<|tool_call_end|><|tool_calls_section_end|>"
    )
    assert message("kimi_k2", text) == ("", TWO[1:])


@pytest.mark.parametrize("name", [*OBJECTS, "qwen3_coder", "glm45", "kimi_k2", "lfm2", "gemma4"])
def test_fault_95_no_number_of_marks_costs_too_much(name: str) -> None:
    parser = tool_parsers.get(name)
    assert parser is not None
    sample = next(sample for sample in SAMPLES if sample.parser == name)
    text = sample.text + "".join(parser.markers) * 500
    assert message(name, text)[1][: len(sample.calls)] == list(sample.calls)


@pytest.mark.parametrize("text", NO_CALLS)
def test_fault_95_fences_without_a_call_stay(text: str) -> None:
    for name in ("hermes", "mistral", "qwen3_coder", "kimi_k2"):
        for fenced in (f"```json\n{text}\n```", f"a `b` ``c``\n```\n{text}", f"{text}```", "````"):
            assert message(name, fenced) == (fenced, [])


@pytest.mark.parametrize("calls", [f"{W}", f"[{W}, {C}]", f"[\n{W},\n{C}\n]", f"{W}\n{C}"])
@pytest.mark.parametrize("marks", ["VALUE", "<|python_start|>VALUE<|python_end|>"])
@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_llama_4_may_write_its_calls_in_json(calls: str, marks: str, key: str) -> None:
    text = marks.replace("VALUE", calls.replace("arguments", key))
    assert message("llama4_pythonic", text) == ("", TWO[: calls.count("name")])


@pytest.mark.parametrize(
    "text",
    ['{"answer": 1}', '[{"name": "Anna"}]', '{"name": "Anna", "parameters": {}}', "[", "{", " [1]"],
)
def test_llama_4_may_answer_in_json(text: str) -> None:
    assert message("llama4_pythonic", text) == (text, [])


def test_both_calls_of_the_samples_are_known() -> None:
    assert {name for name, _ in BOTH} == {function.name for function in FUNCTIONS}
