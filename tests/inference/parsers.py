"""Outputs in every model's way of writing calls, and what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from inference.chat.parsers import OutputParser, OutputParserConfig
from inference.parsers.state_machine import Part, merge_adjacent
from inference.parsers.tool_grammar import ToolFunction

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
_DSML = "｜DSML｜"
_KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
_DSML_CALLS = (
    f'Hm. <{_DSML}function_calls>\n<{_DSML}invoke name="get_weather">\n'
    f'<{_DSML}parameter name="city" string="true">Köln "]}}) ☂</{_DSML}parameter>\n'
    f'<{_DSML}parameter name="days" string="false">[1, 2]</{_DSML}parameter>\n'
    f'</{_DSML}invoke>\n<{_DSML}invoke name="clock">\n</{_DSML}invoke>\n'
    f"</{_DSML}function_calls>"
)
_PLAMO = (
    "<|plamo:begin_tool_requests:plamo|>",
    "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>",
    "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|>"
    "<|plamo:constrain|>json<|plamo:msg|>",
    "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
    "<|plamo:end_tool_requests:plamo|>",
)
_PY = 'get_weather(city="Köln \\"]}) ☂", days=[1, 2])'

SAMPLES = [
    Sample(
        "hermes",
        f"Hm.\n<tool_call>\n{_W}\n</tool_call>\n<tool_call>{_C}</tool_call>",
        "Hm.",
        BOTH,
    ),
    Sample(
        "longcat",
        f"Hm.\n<longcat_tool_call>\n{_W}\n</longcat_tool_call>\n<longcat_tool_call>{_C}",
        "Hm.",
        BOTH,
    ),
    Sample("granite-20b-fc", f"<function_call> {_W}\n<function_call> {_C}", "", BOTH),
    Sample(
        "gigachat3",
        f"Hm.<|message_sep|>\n\nfunction call<|role_sep|>\n{_W}<|message_sep|>\n\n",
        "Hm.",
        BOTH[:1],
    ),
    Sample("gigachat3", f"Hm.<|function_call|>{_W}", "Hm.", BOTH[:1]),
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
    Sample(
        "seed_oss",
        "Hm.\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>\n"
        'Köln "]}) ☂\n</parameter>\n<parameter=days>[1, 2]</parameter>\n</function>\n'
        "</seed:tool_call>\n<seed:tool_call>\n<function=clock>\n</function>\n</seed:tool_call>",
        "Hm.",
        BOTH,
    ),
    Sample(
        "mimo",
        '<tool_call><function=get_weather><parameter=city>Köln "]}) ☂</parameter>'
        "<parameter=days>[1, 2]</parameter></function></tool_call>"
        "<tool_call><function=clock></function></tool_call>",
        "",
        BOTH,
    ),
    Sample("pythonic", f"[{_PY}, clock()]", "", BOTH),
    Sample("llama4_pythonic", f"<|python_start|>[{_PY}, clock()]<|python_end|>", "", BOTH),
    Sample("llama4_pythonic", f"[{_PY},clock()]", "", BOTH),
    Sample(
        "lfm2",
        f"Hm. <|tool_call_start|>[{_PY}, clock()]<|tool_call_end|>\nDone.",
        "Hm.Done.",
        BOTH,
    ),
    Sample("olmo3", f"Hm.<function_calls>{_PY}\nclock()</function_calls> Done.", "Hm.Done.", BOTH),
    Sample("llama3_json", f"Here: {_W}; {_C} Well?", "Here:Well?", BOTH),
    Sample("hunyuan_a13b", f"Hm. <tool_calls>{_LIST}</tool_calls>\n", "Hm.", BOTH),
    Sample("jamba", f" <tool_calls>[\n    {_W},\n    {_C}\n]</tool_calls>", "", BOTH),
    Sample("phi4_mini_json", f"Hm.\nfunctools{_LIST}\nDone.", "Hm.Done.", BOTH),
    Sample(
        "internlm",
        "Hm. <|action_start|><|plugin|>"
        f"{_W.replace('arguments', 'parameters')}<|action_end|>\nDone.",
        "Hm.Done.",
        BOTH[:1],
    ),
    Sample("xlam", f"Hm.\n```json\n{_LIST}\n```", "Hm.", BOTH),
    Sample("xlam", f"Hm.<tool_call>{_LIST}</tool_call>", "Hm.", BOTH),
    Sample("xlam", f"<think>Hm.</think>{_LIST}", "<think>Hm.</think>", BOTH),
    Sample("ernie45", f"<tool_call>\n{_W}\n</tool_call>\n<tool_call>{_C}", "", BOTH),
    Sample(
        "ernie45",
        f"<response>\nHm.\n</response>\n\n<tool_call>\n{_W}\n</tool_call>\n",
        "Hm.",
        BOTH[:1],
    ),
    Sample(
        "kimi_k2",
        f"Hm. {_KIMI[0]}{_KIMI[1]}functions.get_weather:0{_KIMI[2]}{ARGUMENTS}{_KIMI[3]}"
        f"{_KIMI[1]}clock:1{_KIMI[2]}{{}}{_KIMI[3]}{_KIMI[4]}",
        "Hm.",
        BOTH,
    ),
    Sample(
        "glm45",
        "Hm.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>"
        'Köln "]}) ☂</arg_value>\n<arg_key>days</arg_key>\n<arg_value>[1, 2]</arg_value>\n'
        "</tool_call>\n<tool_call>clock\n</tool_call>",
        "Hm.",
        BOTH,
    ),
    Sample(
        "glm47",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>"
        'Köln "]}) ☂</arg_value><arg_key>days</arg_key><arg_value>[1, 2]</arg_value>'
        "</tool_call><tool_call>clock</tool_call>",
        "",
        BOTH,
    ),
    Sample(
        "hy_v3",
        "Hm.<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>"
        'Köln "]}) ☂</arg_value>\n<arg_key>days</arg_key>\n<arg_value>[1, 2]</arg_value>\n'
        "</tool_call>\n<tool_call>clock<tool_sep>\n</tool_call>\n</tool_calls>",
        "Hm.",
        BOTH,
    ),
    Sample(
        "k2_horizon",
        "Hm.<ifm|tool_calls><ifm|tool_call>get_weather<ifm|arg_key>city</ifm|arg_key>"
        '<ifm|arg_type>string</ifm|arg_type><ifm|arg_value>Köln "]}) ☂</ifm|arg_value>'
        "<ifm|arg_key>days</ifm|arg_key><ifm|arg_value>[1, 2]</ifm|arg_value></ifm|tool_call>\n"
        "<ifm|tool_call>clock</ifm|tool_call></ifm|tool_calls>",
        "Hm.",
        BOTH,
    ),
    Sample(
        "plamo3",
        f"Hm. {_PLAMO[0]}{_PLAMO[1]}get_weather{_PLAMO[2]}{ARGUMENTS}{_PLAMO[3]}"
        f"{_PLAMO[1]}clock{_PLAMO[2]}{{}}{_PLAMO[3]}{_PLAMO[4]}",
        "Hm.",
        BOTH,
    ),
    Sample(
        "minimax_m2",
        'Hm. <minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">'
        'Köln "]}) ☂</parameter>\n<parameter name="days">[1, 2]</parameter>\n</invoke>\n'
        '<invoke name="clock">\n</invoke>\n</minimax:tool_call>\nDone.',
        "Hm.Done.",
        BOTH,
    ),
    Sample("deepseek_v32", _DSML_CALLS, "Hm.", BOTH),
    Sample("deepseek_v4", _DSML_CALLS.replace("function_calls", "tool_calls"), "Hm.", BOTH),
    Sample(
        "deepseek_v41",
        _DSML_CALLS.replace("function_calls", "calls").replace(_DSML, f"{_DSML} "),
        "Hm.",
        BOTH,
    ),
    Sample(
        "step3",
        'Hm.<｜tool_calls_begin｜><｜tool_call_begin｜><steptml:invoke name="get_weather">'
        '<steptml:parameter name="city">Köln "]}) ☂</steptml:parameter>'
        '<steptml:parameter name="days">[1, 2]</steptml:parameter></steptml:invoke>'
        "<｜tool_call_end｜><｜tool_sep｜><｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="clock"></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>',
        "Hm.",
        BOTH,
    ),
    Sample(
        "gemma4",
        'Hm. <|tool_call>call:get_weather{city:<|"|>Köln "]}) ☂<|"|>,days:[1,2]}<tool_call|>'
        "<|tool_call>call:clock{}<tool_call|>",
        "Hm.",
        BOTH,
    ),
    Sample(
        "functiongemma",
        '<start_function_call>call:get_weather{city:<escape>Köln "]}) ☂<escape>,days:[1,2]}'
        "<end_function_call><start_function_call>call:clock{}<end_function_call>",
        "",
        BOTH,
    ),
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
    "<tool_calls>[1, 2]</tool_calls>",
    "functools.partial(f) and functools[0]",
    "<|action_start|><|interpreter|>1 + 1<|action_end|>",
    "<|tool_calls_section_begin|> nothing",
    "<minimax:tool_call>?",
    "<｜DSML｜function_calls>?",
    "<｜tool_calls_begin｜>?",
    "<|tool_call>no<tool_call|>",
    "<start_function_call>call:",
    "<function_call>none",
    "<|plamo:begin_tool_requests:plamo|>none",
    "<ifm|tool_calls>none",
    "<seed:tool_call>none",
    "<tool_call>name<tool_sep",
    "function call<|role_sep|>\nnone",
    "<function_calls>none",
    "<|tool_call_start|>none",
    "<|python_start|>print(1)<|python_end|>",
    'An answer: {"name": "Anna", "parameters": {"age": 3}}',
    "",
]


def read(plan: OutputParserConfig, chunks: Sequence[str]) -> list[Part]:
    """All parts of an output that came in these pieces."""
    parser = OutputParser(plan)
    parts: list[Part] = []
    for index, chunk in enumerate(chunks):
        parts += parser.push(chunk, is_final=index == len(chunks) - 1)
    return merge_adjacent(parts)


def shape(parts: Sequence[Part]) -> list[tuple[str, str, int]]:
    """Parts without their random ids."""
    return [(part.kind, part.text, part.call) for part in parts]
