"""Outputs in every model's way of writing calls, and what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from inference.chat.output_parser import OutputParser, ParserPlan
from inference.parsing.parts import Part, joined
from inference.tools import ToolFunction

WEATHER = ToolFunction(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["city"],
    },
)
CLOCK = ToolFunction("clock", {"type": "object", "properties": {}})
FUNCTIONS = (WEATHER, CLOCK)

ARGUMENTS = '{"city": "Köln \\"]}) ☂", "days": [1, 2]}'


@dataclass(frozen=True)
class Sample:
    """An output of a model and what it means: content and (name, arguments) of its calls."""

    parser: str
    text: str
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    marks: tuple[str, ...] = field(default=())


BOTH = (("get_weather", ARGUMENTS), ("clock", "{}"))
_W = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
_C = '{"name": "clock", "arguments": {}}'
_LIST = f"[{_W}, {_C}]"
_DS = "<｜tool▁call▁begin｜>"

SAMPLES = [
    Sample(
        "hermes",
        f"Hm.\n<tool_call>\n{_W}\n</tool_call>\n<tool_call>{_C}</tool_call>",
        "Hm.",
        BOTH,
    ),
    Sample("mistral", f"Hm. [TOOL_CALLS] {_LIST}", "Hm.", BOTH),
    Sample(
        "mistral",
        f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]clock[CALL_ID]a1[ARGS]{{}}",
        "",
        BOTH,
    ),
    Sample("mistral_named", f"[TOOL_CALLS]get_weather{ARGUMENTS}[TOOL_CALLS]clock{{}}", "", BOTH),
    Sample("granite", f"<|tool_call|>{_LIST}", "", BOTH),
    Sample("json", f" {_LIST}\n", "", BOTH),
    Sample("json", _W, "", BOTH[:1]),
    Sample(
        "llama3_json",
        f"{_W.replace('arguments', 'parameters')}; {_C.replace('arguments', 'parameters')}",
        "",
        BOTH,
    ),
    Sample("llama3_json", f"<|python_tag|>{_W}", "", BOTH[:1]),
    Sample(
        "deepseek_v3",
        f"Hm.<｜tool▁calls▁begin｜>{_DS}function<｜tool▁sep｜>get_weather\n```json\n{ARGUMENTS}\n```"
        f"<｜tool▁call▁end｜>\n{_DS}function<｜tool▁sep｜>clock\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Hm.",
        BOTH,
    ),
    Sample(
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜>{_DS}get_weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
        f"{_DS}clock<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        BOTH,
    ),
    Sample(
        "qwen3_coder",
        'Hm.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln "]}) ☂\n</parameter>\n'
        "<parameter=days>\n[1, 2]\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=clock>\n</function>\n</tool_call>",
        "Hm.",
        BOTH,
    ),
    Sample("pythonic", '[get_weather(city="Köln \\"]}) ☂", days=[1, 2]), clock()]', "", BOTH),
]

#: Texts without a call, or with something that only begins like one: all of it is content.
NO_CALLS = [
    "plain text",
    " white space \n ",
    "a < b and <tool",
    "[1] Smith, 2020. {braces}",
    '{"answer": {"name": "x", "arguments": {}}}',
    "<tool_call>not json</tool_call>",
    "[TOOL_CALLS] none",
    "<|tool_call|>oops",
    "<|python_tag|>print(1)",
    "<｜tool▁calls▁begin｜>?",
    "<function=>",
    "[f",
    "",
]


def read(plan: ParserPlan, pieces: Sequence[str]) -> list[Part]:
    """All parts of an output that came in these pieces."""
    parser = OutputParser(plan)
    parts: list[Part] = []
    for place, piece in enumerate(pieces):
        parts += parser.push(piece, ended=place == len(pieces) - 1)
    return joined(parts)


def shape(parts: Sequence[Part]) -> list[tuple[str, str, int]]:
    """Parts without their random ids."""
    return [(part.kind, part.text, part.call) for part in parts]
