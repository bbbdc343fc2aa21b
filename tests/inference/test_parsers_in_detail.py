"""Odd outputs that real models write: values by their schemas, tags left out, text around calls."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.chat.parsers import OutputParserConfig
from inference.chat.turn import build_message
from inference.parsers import section_tools as deepseek
from inference.parsers import section_tools as plamo
from inference.parsers.registry import tool_parsers
from inference.parsers.tool_grammar import ToolFunction
from tests.inference.parsers import NO_CALLS, SAMPLES, read, shape

NULLABLE = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
SCHEMAS: dict[str, Any] = {
    "text": {"type": "string"},
    "choice": {"type": "string", "enum": ["none", "nil", "all"]},
    "whole": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "list": {"type": "array"},
    "object": {"type": "object"},
    "maybe": NULLABLE,
    "either": {"type": ["integer", "null"]},
    "several": {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
    "timer": {"anyOf": [{"type": "object"}, {"type": "null"}]},
    "odd": {"type": "float"},
    "any": {},
    "referred": {"$ref": "#/$defs/size"},
    "circular": {"$ref": "#/$defs/circle"},
}
FUNCTION = ToolFunction(
    "f",
    {
        "type": "object",
        "properties": SCHEMAS,
        "$defs": {"size": {"type": "integer"}, "circle": {"$ref": "#/$defs/circle"}},
    },
)
#: Parameter, what the model writes, what that is.
VALUES = [
    ("text", "42", "42"),
    ("text", "null", "null"),
    ("text", "  two  spaces  ", "  two  spaces  "),
    (
        "text",
        'He said "hi" to C:\\Users\\x & <b>5 < 6</b>',
        'He said "hi" to C:\\Users\\x & <b>5 < 6</b>',
    ),
    ("text", "line 1\nline 2", "line 1\nline 2"),
    ("choice", "none", "none"),
    ("choice", "nil", "nil"),
    ("whole", "42", 42),
    ("whole", "abc", "abc"),
    ("ratio", "3.14", 3.14),
    ("ratio", "5.0", 5),
    ("ratio", "1e999", "1e999"),
    ("flag", "true", True),
    ("flag", "False", False),
    ("list", '["a", "b"]', ["a", "b"]),
    ("list", "['a', 'b']", ["a", "b"]),
    ("object", '{"k": 1}', {"k": 1}),
    ("maybe", "5", 5),
    ("maybe", "null", None),
    ("either", "42", 42),
    ("either", "NULL", None),
    ("several", "some text", "some text"),
    ("several", "7", 7),
    ("several", "null", None),
    ("timer", '{"minutes": 2880}', {"minutes": 2880}),
    ("odd", "2.5", 2.5),
    ("any", "[1]", [1]),
    ("any", "word", "word"),
    ("referred", "3", 3),
    ("circular", "3", 3),
    ("unknown", "5", "5"),
]
#: A call of `f` with one parameter in each way that has a tag for it.
TAGGED = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n"
    "</tool_call>",
    "glm45": "<tool_call>f\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
    "glm47": "<tool_call>f<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>",
    "minimax_m2": '<minimax:tool_call><invoke name="f"><parameter name="KEY">VALUE</parameter>'
    "</invoke></minimax:tool_call>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="KEY" string="IS_TEXT">VALUE</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "step3": "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="f"><steptml:parameter name="KEY">VALUE</steptml:parameter>'
    "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
}


def message(parser: str, text: str, *functions: ToolFunction) -> dict[str, Any]:
    """What the parser makes of a text, the same whole and character by character."""
    tool_parser = tool_parsers.get(parser)
    assert tool_parser is not None
    plan = OutputParserConfig(tools=partial(tool_parser, functions))
    full, streamed = read(plan, [text]), read(plan, list(text) or [""])
    assert shape(full) == shape(streamed)
    return build_message(full)


def calls(parser: str, text: str, *functions: ToolFunction) -> list[tuple[str, Any]]:
    tool_calls = message(parser, text, *functions).get("tool_calls", [])
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in tool_calls
    ]


@pytest.mark.parametrize("parser", TAGGED)
def test_values_in_tags_are_read_by_their_schemas(parser: str) -> None:
    for key, written, value in VALUES:
        is_text = str(isinstance(value, str)).lower()
        text = TAGGED[parser].replace("KEY", key).replace("VALUE", written)
        text = text.replace("IS_TEXT", is_text)
        assert calls(parser, text, FUNCTION) == [("f", {key: value})], (key, written)


@pytest.mark.parametrize("parser", TAGGED)
def test_without_a_schema_values_stay_text(parser: str) -> None:
    text = TAGGED[parser].replace("KEY", "days").replace("VALUE", "5").replace("IS_TEXT", "true")
    assert calls(parser, text) == [("f", {"days": "5"})]


def test_deepseek_says_by_itself_what_is_no_text() -> None:
    text = TAGGED["deepseek_v32"].replace("IS_TEXT", "false")
    for key, written, value in (
        ("n", "42", 42),
        ("n", "true", True),
        ("n", '{"a": [1]}', {"a": [1]}),
        ("n", "abc", "abc"),
        ("text", "null", "null"),
        ("maybe", "null", None),
    ):
        filled = text.replace("KEY", key).replace("VALUE", written)
        assert calls("deepseek_v32", filled, FUNCTION) == [("f", {key: value})]


WEATHER = ToolFunction(
    "weather",
    {
        "properties": {
            "city": {"type": "string"},
            "state": {"type": "string"},
            "days": {"type": "integer"},
        }
    },
)


@pytest.mark.parametrize("functions", [(), (WEATHER,)])
def test_qwen_may_leave_out_a_closing_tag(functions: tuple[ToolFunction, ...]) -> None:
    text = (
        "Let me see:\n<tool_call>\n<function=weather>\n<parameter=city>\nDallas\n"
        "<parameter=state>\nTX\n</parameter>\n</function>\n</tool_call>"
    )
    assert calls("qwen3_coder", text, *functions) == [
        ("weather", {"city": "Dallas", "state": "TX"})
    ]
    assert message("qwen3_coder", text)["content"] == "Let me see:"


def test_qwens_tags_inside_a_value_are_text_unless_they_name_a_parameter() -> None:
    text = (
        "<tool_call>\n<function=weather>\n<parameter=city>\na\n<parameter=x>\nb <parameter=state>\n"
        "</parameter>\n<parameter=days>\n3\n<parameter=state>\nTX\n</parameter>\n</function>"
    )
    assert calls("qwen3_coder", text, WEATHER) == [
        ("weather", {"city": "a\n<parameter=x>\nb <parameter=state>", "days": 3, "state": "TX"})
    ]


@pytest.mark.parametrize(
    ("parser", "text", "arguments"),
    [
        ("glm45", "<tool_call>f<arg_key>text</arg_key><arg_value>a</tool_call>", {"text": "a"}),
        (
            "minimax_m2",
            '<minimax:tool_call><invoke name="f"><parameter name="text">a</invoke>',
            {"text": "a"},
        ),
        ("step3", '<｜tool_call_begin｜><steptml:invoke name="f"></steptml:invoke>', {}),
        (
            "deepseek_v32",
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜function_calls>',
            {},
        ),
    ],
)
def test_other_closing_tags_may_be_missing_too(parser: str, text: str, arguments: Any) -> None:
    assert calls(parser, text, FUNCTION) == [("f", arguments)]


def test_a_broken_tag_raises_nothing_and_loses_nothing() -> None:
    text = "<tool_call>\n<function=weather\n<parameter=city>Dallas</parameter>\n</function>"
    assert message("qwen3_coder", text, WEATHER) == {"content": text}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("'Martha\\'s \"Vineyard\"'", 'Martha\'s "Vineyard"'),
        ("{'city': 'LA', 'open': True, 'n': None}", {"city": "LA", "open": True, "n": None}),
        ("[true, false, null]", [True, False, None]),
        ("{'urgent', 'bug'}", ["urgent", "bug"]),
        ("(1, 2.5)", [1, 2.5]),
        ("07", 7),
        ("-3", -3),
        ("'sed -n '1,4p' /a/b.py'", "sed -n '1,4p' /a/b.py"),
        ("'python3 -c \"print(f(3*x, s='\\,'))\"'", "python3 -c \"print(f(3*x, s='\\,'))\""),
        ("'cat > f << EOF\nimport csv\nEOF'", "cat > f << EOF\nimport csv\nEOF"),
        ("'grep -F \"]\" log.txt'", 'grep -F "]" log.txt'),
        ("'a\x00b'", "a\x00b"),
        ("{}", {}),
        ("[]", []),
        ("1e999", "1e999"),
        ("print(1)", "print(1)"),
    ],
)
def test_python_values(written: str, value: Any) -> None:
    wrapped = {
        "pythonic": "[CALLS]",
        "llama4_pythonic": "<|python_start|>[CALLS]<|python_end|>",
        "lfm2": "<|tool_call_start|>[CALLS]<|tool_call_end|>",
    }
    both = f"a.run(v={written}, n=1), g()"
    expected = [("a.run", {"v": value, "n": 1}), ("g", {})]
    for parser, text in wrapped.items():
        assert calls(parser, text.replace("CALLS", both)) == expected, parser
        last = text.replace("CALLS", f"g(v={written})")
        assert calls(parser, last) == [("g", {"v": value})], parser
    lines = f"<function_calls>a.run(v={written}, n=1)\ng()</function_calls>"
    assert calls("olmo3", lines) == expected


def test_llamas_objects_count_after_other_text_when_they_name_a_function() -> None:
    call = '{"name": "weather", "parameters": {"city": "a {b} [c]"}}'
    expected = [("weather", {"city": "a {b} [c]"})]
    assert calls("llama3_json", f"Here is the result: {call} Anything else?", WEATHER) == expected
    assert calls("llama3_json", f"Here is the result: {call}") == expected
    assert calls("llama3_json", f"So: {call}; {call} ; {call}.", WEATHER) == expected * 3
    other = 'As JSON: {"name": "Anna", "parameters": {"age": 3}}'
    assert message("llama3_json", other, WEATHER) == {"content": other}
    nested = f'{{"answer": {call}}} and {{"a": "{{"}} '
    assert message("llama3_json", nested, WEATHER) == {"content": nested}
    assert calls("llama3_json", f"{nested}{call}", WEATHER) == expected
    assert calls("llama3_json", f"a {{brace}} and {call}", WEATHER) == expected
    unknown = call.replace("weather", "whether")
    assert calls("llama3_json", unknown, WEATHER) == [("whether", expected[0][1])]


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("", {}),
        ("text:SParis, FranceS", {"text": "Paris, France"}),
        ("text:SaS,choice:SallS", {"text": "a", "choice": "all"}),
        ("whole:42,flag:true,ratio:3.14", {"whole": 42, "flag": True, "ratio": 3.14}),
        (
            "object:{inner:SvalueS,deep:{n:1,t:true}}",
            {"object": {"inner": "value", "deep": {"n": 1, "t": True}}},
        ),
        ("list:[Sa]bS,ScS,4,null]", {"list": ["a]b", "c", 4, None]}),
        ("StextS:SaS, whole: 7", {"text": "a", "whole": 7}),
        ("text:S<!DOCTYPE html>\n<b>{}</b>S", {"text": "<!DOCTYPE html>\n<b>{}</b>"}),
        ("whole:S42S", {"whole": 42}),
        ("unknown:12,other:SxS", {"unknown": 12, "other": "x"}),
        ("text:", {"text": ""}),
        ("object:{a:{b", None),
    ],
)
def test_gemmas_values(body: str, arguments: Any) -> None:
    for parser, mark, begin, end in (
        ("gemma4", '<|"|>', "<|tool_call>call:f{", "}<tool_call|>"),
        ("gemma4", '<|"|>', "<|tool_call>:f{", "}<tool_call|>"),
        ("functiongemma", "<escape>", "<start_function_call>call:f{", "}<end_function_call>"),
    ):
        text = begin + body.replace("S", mark) + end
        if arguments is None:
            message(parser, text, FUNCTION)
        else:
            assert calls(parser, text, FUNCTION) == [("f", arguments)], body


@pytest.mark.parametrize("parser", ["kimi_k2", "deepseek_v31", "plamo3"])
def test_arguments_that_arent_closed_end_at_the_calls_mark(parser: str) -> None:
    kind = tool_parsers.get(parser)
    assert kind is not None
    (section, end), (begin, close) = kind.section, kind.call
    name = {
        "kimi_k2": "functions.NAME:0 <|tool_call_argument_begin|>",
        "deepseek_v31": f"NAME{deepseek.SEPARATOR}",
        "plamo3": f"{plamo.NAME_BEGIN}NAME{plamo.NAME_END}{plamo.ARGUMENTS_BEGIN}",
    }[parser]
    broken = '{"city": "Rome<b>", "days": [1'
    first, second = (
        f"{begin}{name.replace('NAME', function_name)}{arguments}{close}"
        for function_name, arguments in (("get_weather", broken), ("clock", "{}"))
    )
    parsed_message = message(parser, f"Hm. {section}{first}{second}{end}")
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in parsed_message["tool_calls"]
    ]
    assert calls == [("get_weather", broken), ("clock", "{}")]
    assert parsed_message["content"] == "Hm."


def test_kimis_ids_are_kept_unless_they_come_twice() -> None:
    one = '<|tool_call_begin|>functions.f:0 <|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
    text = f"<|tool_calls_section_begin|>{one}{one}<|tool_calls_section_end|>"
    tool_calls = message("kimi_k2", text)["tool_calls"]
    assert tool_calls[0]["id"] == "functions.f:0"
    assert tool_calls[1]["id"].startswith("call_")
    assert [call["function"]["name"] for call in tool_calls] == ["f", "f"]


def test_ernies_answer_comes_without_its_tags() -> None:
    assert message("ernie45", "<response>\nIt is warm.\n</response>") == {"content": "It is warm."}


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ("openai", "gpt_oss"),
        ("qwen3_xml", "qwen3_coder"),
        ("llama4_json", "llama3_json"),
        ("granite4", "hermes"),
        ("qwen3_json", "hermes"),
        ("ling3", "glm47"),
        ("poolside_v1", "glm45"),
        ("step3p5", "qwen3_coder"),
        ("step5", "qwen3_coder"),
    ],
)
def test_other_names_of_parsers(other: str, name: str) -> None:
    assert tool_parsers.get(other) is tool_parsers.get(name)


def test_mimos_values_keep_their_line_breaks() -> None:
    text = "<tool_call><function=f><parameter=text>\na\n</parameter></function></tool_call>"
    assert calls("mimo", text, FUNCTION) == [("f", {"text": "\na\n"})]


NAMES = sorted(tool_parsers.all())
FRAGMENTS = sorted(
    {chunk for sample in SAMPLES for chunk in sample.text.replace(">", ">\0").split("\0")}
    | {sample.text for sample in SAMPLES}
    | set(NO_CALLS)
    | {
        "{",
        "}",
        "[",
        "]",
        '"',
        "'",
        "\\",
        "(",
        ")",
        ",",
        ":",
        "=",
        "\n",
        "\x00",
        "é🙂",
        "<",
        ">",
        "|",
    }
    | {"{" * 300, "[" * 300, "(" * 300, '{"a":' * 300, "9" * 5000, "a=" * 200, "\\" * 99, '"' * 99}
    | {
        "call:f{k:",
        '<|"|>',
        "<escape>",
        "<arg_key>a</arg_key><arg_value>",
        "None",
        "07",
        "{1}",
        "**a",
    }
)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(
    chunks=st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=6)), max_size=12),
    cuts=st.lists(st.integers(0, 3000), max_size=10),
)
def test_hostile_outputs_raise_nothing_however_they_are_cut(
    name: str, chunks: list[str], cuts: list[int]
) -> None:
    tool_parser = tool_parsers.get(name)
    assert tool_parser is not None
    plan, text = (
        OutputParserConfig(tools=partial(tool_parser, (FUNCTION, WEATHER))),
        "".join(chunks),
    )
    positions = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    parts = [text[a:b] for a, b in pairwise(positions)] or [""]
    full = read(plan, [text])
    assert shape(read(plan, parts)) == shape(full)
    json.dumps(build_message(full))
