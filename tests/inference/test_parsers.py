"""Every parser: what it reads, the same however the text is cut, with nothing lost."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.chat.parsers import OutputParser, OutputParserConfig
from inference.chat.turn import build_message
from inference.parsers.registry import reasoning_parsers, tool_parsers
from inference.parsers.state_machine import Part, StateMachine
from tests.inference.parsers import FUNCTIONS, NO_CALLS, SAMPLES, Sample, read, shape

NAMES = sorted(tool_parsers.all())
BY_WHOLE_VALUES = ("pythonic", "llama4_pythonic", "lfm2", "olmo3")
THINKING = [
    ("deepseek_r1", "<think>\nHm, 1 < 2.\n</think>\n\nYes.", "Hm, 1 < 2.", "Yes."),
    ("deepseek_r1", "Hm.</think>Yes.", "Hm.", "Yes."),
    ("deepseek_r1", "Hm, cut", "Hm, cut", ""),
    ("qwen3", "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("qwen3", "Yes </thi", "", "Yes </thi"),
    ("granite", "Here's my thought process: Hm. Here is my response: Yes.", "Hm.", "Yes."),
    (
        "gpt_oss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        "Hm.",
        "Yes.",
    ),
    ("gpt_oss", "Yes.", "", "Yes."),
]


def plan_of(name: str) -> OutputParserConfig:
    parser = tool_parsers.get(name)
    assert parser is not None
    return OutputParserConfig(tools=partial(parser, FUNCTIONS))


def thinking(name: str, inside: bool | None = None, **options: bool) -> OutputParserConfig:
    parser = reasoning_parsers.get(name)
    assert parser is not None
    return OutputParserConfig(reasoning=partial(parser, inside), **options)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.parser)
def test_calls_and_content_are_read(sample: Sample) -> None:
    message = build_message(read(plan_of(sample.parser), [sample.text]))
    calls = [call["function"] for call in message["tool_calls"]]
    assert (message["content"] or "") == sample.content
    assert [call["name"] for call in calls] == [name for name, _ in sample.calls]
    expected = [json.loads(arguments) for _, arguments in sample.calls]
    assert [json.loads(call["arguments"]) for call in calls] == expected
    assert len({call["id"] for call in message["tool_calls"]}) == len(calls)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.parser)
def test_a_text_cut_anywhere_reads_the_same(sample: Sample) -> None:
    plan, text = plan_of(sample.parser), sample.text
    full_shape = shape(read(plan, [text]))
    assert shape(read(plan, list(text))) == full_shape
    for cut in range(0, len(text) + 1, 5):
        assert shape(read(plan, [text[:cut], text[cut:]])) == full_shape


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.parser)
def test_an_output_cut_short_reads_the_same_streamed(sample: Sample) -> None:
    plan = plan_of(sample.parser)
    for end in range(0, len(sample.text), 5):
        text = sample.text[:end]
        assert shape(read(plan, list(text))) == shape(read(plan, [text])), text


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.parser)
def test_arguments_come_before_the_call_has_ended(sample: Sample) -> None:
    plan = plan_of(sample.parser)
    started_text = sample.text[: sample.text.index("☂")]
    parts = read(OutputParserConfig(tools=plan.tools), [started_text])
    kinds = [part.kind for part in parts if part.kind != "content"]
    if sample.parser in BY_WHOLE_VALUES:
        assert kinds == ["call", "arguments"]
    else:
        arguments = "".join(part.text for part in parts if part.kind == "arguments")
        assert "Köln" in arguments


@pytest.mark.parametrize(
    ("sample", "rest"),
    [
        (sample, rest)
        for sample in SAMPLES
        if sample.parser in ("hermes", "longcat", "jamba", "hunyuan_a13b", "internlm", "xlam")
        for rest in ("}, <b>Hi</b>", ";\n<|im_end", "}} </t <|a", ", ```")
    ],
)
def test_text_that_begins_like_a_closing_mark_is_kept_however_it_is_cut(
    sample: Sample, rest: str
) -> None:
    plan = plan_of(sample.parser)
    for end in range(len(sample.text) // 2, len(sample.text)):
        text = sample.text[:end] + rest
        assert shape(read(plan, list(text))) == shape(read(plan, [text])), text


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_call_stays_text(name: str) -> None:
    for text in NO_CALLS:
        for chunks in ([text], list(text) or [""]):
            parts = read(plan_of(name), chunks)
            assert "".join(part.text for part in parts) == text
            assert {part.kind for part in parts} <= {"content"}


@pytest.mark.parametrize(("name", "text", "reasoning", "content"), THINKING)
def test_reasoning_is_told_from_content(name: str, text: str, reasoning: str, content: str) -> None:
    for chunks in ([text], list(text)):
        message = build_message(read(thinking(name), chunks))
        assert (message.get("reasoning", ""), message["content"]) == (reasoning, content)
    for cut in range(len(text)):
        assert shape(read(thinking(name), [text[:cut], text[cut:]])) == shape(
            read(thinking(name), [text])
        )


MARKS = [
    *("<think>", "</think>", "<thi", "Here's my thought process:", "Here is my response:"),
    *("<|channel|>", "<|message|>", "<|end|>", "<|start|>assistant", "analysis", "final"),
    *("<tool_call>", "<answer>", "</answer>", "<|channel>", "thought\n", "<channel|>", "[THINK]"),
    *("Hm", " ", "\n", "<", "|", "é🙂", "\x00"),
]


def parser_marks(name: str) -> list[str]:
    """A parser's tags, and halves of them."""
    parser = reasoning_parsers.all()[name]
    tags = [*parser.starts, *parser.ends, *parser.calls, *parser.markers]
    return [*tags, *(tag[: len(tag) // 2] for tag in tags), *(tag[len(tag) // 2 :] for tag in tags)]


@pytest.mark.parametrize("name", sorted(reasoning_parsers.all()))
@settings(max_examples=15, deadline=None)
@given(
    data=st.data(),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    inside=st.sampled_from([None, True, False]),
)
def test_hostile_thoughts_read_the_same_however_they_are_cut(
    name: str, data: st.DataObject, cuts: list[int], inside: bool | None
) -> None:
    chunks = st.sampled_from([*MARKS, *parser_marks(name)]) | st.text(max_size=4)
    plan, text = thinking(name, inside), "".join(data.draw(st.lists(chunks, max_size=12)))
    positions = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    parts = [text[a:b] for a, b in pairwise(positions)] or [""]
    full_shape = shape(read(plan, [text]))
    assert shape(read(plan, parts)) == full_shape
    reported_text = "".join(arguments for _, arguments, _ in full_shape)
    if name.endswith("append_think"):
        reported_text = reported_text.removeprefix("<think>")
    assert set(reported_text) <= set(text)
    assert len(reported_text) <= len(text)


def test_the_prompts_end_tells_where_the_output_begins() -> None:
    parser = reasoning_parsers.get("qwen3")
    assert parser is not None
    assert parser.prompt_opens_reasoning("assistant\n<think>\n") is True
    assert parser.prompt_opens_reasoning("<think>\n\n</think>\n\n") is False
    assert parser.prompt_opens_reasoning("assistant\n") is None
    inside = build_message(read(thinking("qwen3", True), ["Hm.\n</think>\nYes."]))
    assert (inside["reasoning"], inside["content"]) == ("Hm.", "Yes.")
    past = build_message(read(thinking("deepseek_r1", False), ["Yes."]))
    assert past == {"content": "Yes."}


def test_reasoning_can_be_left_out() -> None:
    plan = thinking("qwen3", shows_reasoning=False)
    assert build_message(read(plan, ["<think>Hm.</think>Yes."])) == {"content": "Yes."}


def test_a_call_after_reasoning_and_none_within() -> None:
    call = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    plan = OutputParserConfig(
        reasoning=thinking("qwen3").reasoning, tools=plan_of("hermes").tools, parallel=False
    )
    message = build_message(read(plan, list(f"<think>{call}?</think>{call}{call}")))
    assert message["reasoning"] == f"{call}?"
    assert [tool_call["function"]["name"] for tool_call in message["tool_calls"]] == ["clock"]


def test_harmony_calls_are_messages_to_functions() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.clock <|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    tools = plan_of("gpt_oss").tools
    plan = OutputParserConfig(reasoning=thinking("gpt_oss").reasoning, tools=tools)
    for chunks in ([text], list(text)):
        message = build_message(read(plan, chunks))
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "clock", "arguments": '{"a": 1}'}
        assert (message["reasoning"], message["content"]) == ("Hm.", None)
    without_tools = build_message(read(thinking("gpt_oss"), [text]))
    assert without_tools["content"] == '{"a": 1}'
    assert "tool_calls" not in without_tools


@pytest.mark.parametrize("mark", ["<|channel|>", "<|start|>"])
@pytest.mark.parametrize("length", [400, 490, 500, 501, 502, 510, 520, 5000])
def test_a_header_without_an_end_is_content(mark: str, length: int) -> None:
    text = f"{mark}{'x' * length}<|message|>Hm.<|end|>"
    full_message = build_message(read(thinking("gpt_oss"), [text]))
    assert build_message(read(thinking("gpt_oss"), list(text))) == full_message
    if len(mark) + length > 512:
        assert full_message["content"].startswith(f"{mark}xxx")
    else:
        assert full_message["content"] == "Hm."
    parser = thinking("gpt_oss").reasoning()
    for _ in range(100):
        parser.push(f"{mark}abc" if parser._buffer == "" else "abcdefghij")
        assert len(parser._buffer) < 600


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pythonic", "[clock(a=1e999)]"),
        (
            "qwen3_coder",
            "<tool_call>\n<function=clock>\n<parameter=a>\nNaN\n</parameter>\n</function>\n</tool_call>",
        ),
    ],
)
def test_arguments_are_json_whatever_the_number(name: str, text: str) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    (call,) = build_message(read(plan_of(name), [text]))["tool_calls"]
    arguments = json.loads(call["function"]["arguments"], parse_constant=refuse)
    assert arguments == {"a": "1e999" if name == "pythonic" else "NaN"}


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.parser)
def test_reading_costs_the_same_however_long_a_call_is(sample: Sample) -> None:
    """Work is counted in characters that a parser looks at: no piece is read again and again."""
    plan, looked_at = plan_of(sample.parser), 0
    offset = sample.text.index("☂")
    parser = OutputParser(plan)
    parser.push(sample.text[:offset])
    tools = parser._tools
    assert tools is not None
    for _ in range(2000):
        parser.push("abcd")
        looked_at = max(looked_at, len(tools._buffer))
    assert looked_at < 100


def _one_text_a_state() -> list[tuple[OutputParserConfig, str]]:
    """Beginnings of the samples, one for each state that a parser gets into."""
    texts: dict[tuple[str, str], tuple[OutputParserConfig, str]] = {}
    plans = [(sample.parser, plan_of(sample.parser), sample.text) for sample in SAMPLES]
    plans += [(name, thinking(name), text) for name, text, *_ in THINKING]
    for name, plan, text in plans:
        parser = OutputParser(plan)
        machine = parser._tools or parser._reasoning
        assert machine is not None
        for cut in range(len(text)):
            texts.setdefault((name, machine._state.__name__), (plan, text[:cut]))
            parser.push(text[cut])
    return list(texts.values())


@pytest.mark.parametrize("run", ["\n", "\n  ", "}", ", ", '"', "\\"])
def test_a_long_run_of_anything_is_read_in_time_proportional_to_its_length(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each state of each parser. Work is counted in characters that a parser looks at."""
    scan, num_scanned = StateMachine._run, 0

    def counting(machine: StateMachine) -> list[Part]:
        nonlocal num_scanned
        num_scanned += len(machine._buffer)
        return scan(machine)

    monkeypatch.setattr(StateMachine, "_run", counting)
    size, chunk = 4000, (run * 32)[:32]
    for plan, text in _one_text_a_state():
        chunks, num_scanned = [text, *[chunk] * (size // len(chunk)), "Hm."], 0
        parts = read(plan, chunks)
        assert num_scanned < 15 * size, (plan, text, num_scanned)
        assert shape(parts) == shape(read(plan, ["".join(chunks)])), (plan, text)
