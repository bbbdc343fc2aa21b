"""Calls whose values stand between tags: grammar and reader agree, arguments follow the schema."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from

from engine.contract.errors import InvalidRequest
from engine.text.tokenizer import Tokenizer, load_tokenizer
from inference.chat.parsers import OutputParserConfig, grammar_token_ids
from inference.chat.turn import build_message
from inference.parsers.registry import tool_parsers
from inference.parsers.tool_grammar import ToolFunction
from tests.inference.parsers import read, shape
from tests.inference.test_tool_grammar import follow

DEMO_MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
#: One parser of each way of writing values.
PARSERS = ("qwen3_coder", "glm47", "deepseek_v32", "gemma4", "pythonic")
DEFS = {
    "size": {"enum": ["S", "M", "L"]},
    "point": {
        "type": "object",
        "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["x"],
        "additionalProperties": False,
    },
    "tree": {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/tree"}, "n": {"type": "boolean"}},
        "required": ["n"],
        "additionalProperties": False,
    },
}
INTEGER = {"type": "integer", "minimum": 1, "maximum": 99}
VALUES: dict[str, Any] = {
    "enum_without_type": {"enum": ["red", "green"]},
    "enum_of_several_types": {"enum": ["red", 7, None, True]},
    "const_without_type": {"const": "only"},
    "constant_number": {"const": 5},
    "reference": {"$ref": "#/$defs/size"},
    "reference_to_an_object": {"$ref": "#/$defs/point"},
    "recursive": {"$ref": "#/$defs/tree"},
    "nullable": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
    "types": {"type": ["integer", "null"], "minimum": 3, "maximum": 5},
    "union": {"anyOf": [INTEGER, {"enum": ["all", "none"]}]},
    "one_of": {"oneOf": [{"$ref": "#/$defs/point"}, INTEGER]},
    "union_of_constants": {"anyOf": [{"const": "a"}, {"const": "b"}]},
    "all_of": {"allOf": [{"type": "string"}, {"enum": ["x", "y"]}]},
    "all_of_a_reference": {"allOf": [{"$ref": "#/$defs/size"}], "description": "d"},
    "length": {"type": "string", "minLength": 2, "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[a-f]{3}[0-9]/$"},
    "pattern_inside": {"type": "string", "pattern": "[xy]{2}", "maxLength": 5},
    "list": {"type": "array", "items": {"$ref": "#/$defs/size"}, "maxItems": 2},
    "list_of_unions": {"type": "array", "items": {"anyOf": [INTEGER, {"const": "q"}]}},
}


def function_of(schema: Any, **fields: Any) -> ToolFunction:
    parameters = {
        "type": "object",
        "properties": {"v": schema},
        "required": ["v"],
        "additionalProperties": False,
        "$defs": DEFS,
    }
    return ToolFunction("f", {**parameters, **fields})


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return load_tokenizer(DEMO_MODEL)


@pytest.fixture(scope="module")
def backend(demo: Tokenizer) -> LLTokenizer:
    return LLTokenizer(demo.to_json(), eos_token=[demo.eos_token_id or 0])


def arguments_of(name: str, function: ToolFunction | None, text: str) -> Any:
    """The arguments of the one call in a text, the same whole and character by character."""
    functions = () if function is None else (function,)
    plan = OutputParserConfig(tools=partial(parser_of(name), functions))
    full = read(plan, [text])
    assert shape(read(plan, list(text))) == shape(full)
    message = build_message(full)
    assert not message["content"], message
    (call,) = message["tool_calls"]
    return json.loads(call["function"]["arguments"])


def parser_of(name: str) -> Any:
    parser = tool_parsers.get(name)
    assert parser is not None
    return parser


def grammar_of(name: str, function: ToolFunction, demo: Tokenizer) -> str:
    layout = parser_of(name).layout
    return layout.grammar([function], grammar_token_ids(demo), parallel=False)


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("kind", VALUES)
def test_fault_83_arguments_of_forced_calls_follow_any_schema(
    name: str, kind: str, demo: Tokenizer, backend: LLTokenizer
) -> None:
    function = function_of(VALUES[kind])
    grammar = grammar_of(name, function, demo)
    for seed in range(3):
        text = follow(backend, demo, grammar, seed, limit=400)
        if text is not None:  # a list may go on for longer
            jsonschema.validate(arguments_of(name, function, text), function.parameters)


#: Forms of a function's arguments that stand elsewhere than in `properties`.
FORMS = {
    "reference": {"$ref": "#/$defs/point", "$defs": DEFS},
    "all_of": {
        "allOf": [
            {"$ref": "#/$defs/point"},
            {"properties": {"s": {"enum": ["a"]}}, "required": ["s"]},
        ],
        "$defs": {"point": {k: v for k, v in DEFS["point"].items() if k != "additionalProperties"}},
    },
    "discriminated": {
        "oneOf": [
            {
                "properties": {"kind": {"const": "number"}, "value": {"const": 1}},
                "required": ["kind", "value"],
            },
            {
                "properties": {"kind": {"const": "text"}, "value": {"enum": ["one", "two"]}},
                "required": ["kind", "value"],
            },
        ]
    },
}


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("form", FORMS)
def test_fault_83_the_arguments_themselves_may_be_a_reference_or_a_union(
    name: str, form: str, demo: Tokenizer, backend: LLTokenizer
) -> None:
    function = ToolFunction("f", FORMS[form])
    grammar = grammar_of(name, function, demo)
    for seed in range(3):
        text = follow(backend, demo, grammar, seed, limit=400)
        assert text is not None
        jsonschema.validate(arguments_of(name, function, text), function.parameters)


@pytest.mark.parametrize("name", PARSERS)
def test_fault_83_what_the_schema_excludes_the_grammar_excludes(
    name: str, demo: Tokenizer, backend: LLTokenizer
) -> None:
    red = function_of({"enum": ["red"]})
    text = follow(backend, demo, grammar_of(name, red, demo), 0)
    assert text is not None
    for schema, allowed in (
        ({"enum": ["red", 7]}, None),
        ({"enum": ["rot"]}, False),
        ({"type": "string", "maxLength": 2}, False),
        ({"type": "string", "pattern": "^[a-q]*$"}, False),
        ({"type": "string", "pattern": "^[a-z]*$"}, True),
    ):
        matcher = LLMatcher(
            backend, grammar_from("grammar", grammar_of(name, function_of(schema), demo))
        )
        tokens = demo.encode(text, add_special_tokens=False)
        if allowed is not None:
            assert (matcher.try_consume_tokens(tokens) == len(tokens)) is allowed, schema


def test_fault_83_a_strict_pattern_that_text_cant_follow_is_refused(demo: Tokenizer) -> None:
    schema = {"type": "string", "pattern": "^(?=.*a).*$"}
    parameters = function_of(schema).parameters
    assert grammar_of("glm45", ToolFunction("f", parameters), demo)
    with pytest.raises(InvalidRequest, match="pattern"):
        grammar_of("glm45", ToolFunction("f", parameters, strict=True), demo)


#: A call of `f` with the parameter `v` in each way of writing that has a tag for it.
CALLS = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=v>\nVALUE\n</parameter>\nMORE"
    "</function>\n</tool_call>",
    "mimo": "<tool_call>\n<function=f>\n<parameter=v>VALUE</parameter>\nMORE</function>\n"
    "</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=f>\n<parameter=v>VALUE</parameter>\nMORE</function>\n"
    "</seed:tool_call>",
    "glm45": "<tool_call>f\n<arg_key>v</arg_key>\n<arg_value>VALUE</arg_value>\nMORE</tool_call>",
    "glm47": "<tool_call>f<arg_key>v</arg_key><arg_value>VALUE</arg_value>MORE</tool_call>",
    "hy_v3": "<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>v</arg_key>\n<arg_value>VALUE"
    "</arg_value>\nMORE</tool_call>\n</tool_calls>",
    "k2_horizon": "<ifm|tool_calls><ifm|tool_call>f<ifm|arg_key>v</ifm|arg_key><ifm|arg_value>VALUE"
    "</ifm|arg_value>MORE</ifm|tool_call></ifm|tool_calls>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="v">VALUE</parameter>\n'
    "MORE</invoke>\n</minimax:tool_call>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="v">VALUE</｜DSML｜parameter>\n'
    "MORE</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "step3": "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="f"><steptml:parameter name="v">VALUE</steptml:parameter>MORE'
    "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
    "gemma4": "<|tool_call>call:f{v:VALUE}<tool_call|>",
    "functiongemma": "<start_function_call>call:f{v:VALUE}<end_function_call>",
}  # fmt: skip
TAGGED = [name for name in CALLS if "gemma" not in name]
#: What closes a value in each.
CLOSING = {name: parser_of(name).value_ends[0] for name in TAGGED}

#: Where a schema may hide a type; what a model writes; what that is.
TYPES = [
    ({"$ref": "#/$defs/n"}, "5", 5),
    ({"allOf": [{"$ref": "#/$defs/n"}]}, "5", 5),
    ({"allOf": [{"description": "d"}, {"type": "string"}]}, "5", "5"),
    ({"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}, "5", 5),
    ({"anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}]}, "5", "5"),
    ({"anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}]}, "null", None),
    ({"type": ["string", "null"]}, "5", "5"),
    ({"type": "string", "nullable": True}, "null", None),
    ({"oneOf": [{"type": "boolean"}, {"type": "integer"}]}, "true", True),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"const": "1"}, "1", "1"),
    ({"enum": [1, 2]}, "1", 1),
    ({"properties": {"a": {}}}, '{"a": "1"}', {"a": "1"}),
    ({"items": {}}, "['1', True]", ["1", True]),
    ({"$ref": "#/properties/w"}, "5", 5),
    ({"type": "integer"}, "5.0", 5),
    ({"type": "integer"}, "1_000", "1_000"),
    ({"type": "integer"}, "0x10", "0x10"),
    ({"type": "integer"}, "+5", "+5"),
    ({"type": "integer"}, "٣", "٣"),
    ({"type": "number"}, "1_0.5", "1_0.5"),
    ({"type": "number"}, "inf", "inf"),
    ({"type": "number"}, "1e3", 1000.0),
    ({"type": "number"}, ".5", ".5"),
    ({"type": ["integer", "string"]}, "1_000", "1_000"),
    ({"type": ["integer", "string"]}, "12345678901234567890123", 12345678901234567890123),
    ({}, "1_000", "1_000"),
    ({"type": "integer"}, '"5"', 5),
    ({"type": "boolean"}, "True", True),
]  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("schema", "written", "value"), TYPES)
def test_fault_84_a_value_has_the_type_of_its_schema_wherever_that_stands(
    name: str, schema: Any, written: str, value: Any
) -> None:
    properties = {"v": schema, "w": {"type": "integer"}}
    defs = {"n": {"type": "integer"}, "t": {"type": "string"}}
    function = ToolFunction("f", {"properties": properties, "$defs": defs})
    text = CALLS[name].replace("VALUE", written).replace("MORE", "")
    read_value = arguments_of(name, function, text)["v"]
    assert (read_value, type(read_value)) == (value, type(value))


@pytest.mark.parametrize(
    "parameters",
    [
        {"allOf": [{"properties": {"v": {"type": "integer"}}}, {"properties": {"w": {}}}]},
        {"oneOf": [{"properties": {"w": {}}}, {"properties": {"v": {"type": "integer"}}}]},
        {"$ref": "#/$defs/all", "$defs": {"all": {"properties": {"v": {"type": "integer"}}}}},
        {"patternProperties": {"^v": {"type": "integer"}}},
        {"additionalProperties": {"type": "integer"}},
        {"if": {}, "then": {"properties": {"v": {"type": "integer"}}}, "properties": {"w": {}}},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"properties": {"v": {"type": "integer"}}}}},
    ],
)
@pytest.mark.parametrize("name", CALLS)
def test_fault_84_parameters_stand_in_any_part_of_the_functions_schema(
    name: str, parameters: Any
) -> None:
    text = CALLS[name].replace("VALUE", "5").replace("MORE", "")
    assert arguments_of(name, ToolFunction("f", parameters), text) == {"v": 5}


def test_fault_84_recursive_and_branching_schemas_are_read_once() -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}
    defs = {"a": {"allOf": [loop, loop]}, "b": {"oneOf": [{"$ref": "#/$defs/a"}] * 50}}
    for length in range(3000):
        defs[f"c{length}"] = {"$ref": f"#/$defs/c{length + 1}"}
    for schema in (loop, {"$ref": "#/$defs/c0"}):
        function = ToolFunction("f", {"properties": {"v": schema}, "$defs": defs})
        assert arguments_of("glm47", function, CALLS["glm47"].replace("VALUE", "5")
                            .replace("MORE", "")) == {"v": 5}  # fmt: skip


TEXT = {"properties": {"v": {"type": "string"}, "w": {"type": "string"}}}


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    "value",
    [
        "use CLOSE to end it",
        "CLOSE at the start",
        "twice CLOSE and CLOSE.",
        "<b>CLOSE</b>",
        'CLOSE"',
    ],
)
def test_fault_85_a_value_may_hold_its_own_closing_tag(name: str, value: str) -> None:
    value = value.replace("CLOSE", CLOSING[name])
    text = CALLS[name].replace("VALUE", value).replace("MORE", "")
    for parameters in (TEXT, {}):
        assert arguments_of(name, ToolFunction("f", parameters), text) == {"v": value}


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": ["object", "string"]}])
def test_fault_85_a_closing_tag_may_come_twice(name: str, schema: Any) -> None:
    function = ToolFunction("f", {"properties": {"v": schema}})
    for times in (2, 3, 2000):
        more = CLOSING[name] * (times - 1)
        text = CALLS[name].replace("VALUE", "word").replace("MORE", more)
        assert arguments_of(name, function, text) == {"v": "word"}


@pytest.mark.parametrize("name", TAGGED)
def test_fault_85_a_closing_tag_in_a_json_string_is_part_of_it(name: str) -> None:
    _, _, rest = CALLS[name].replace("MORE", "").partition("VALUE")
    value = {"text": f"a{rest}b", "list": [rest]}
    text = CALLS[name].replace("VALUE", json.dumps(value, ensure_ascii=False)).replace("MORE", "")
    function = ToolFunction("f", {"properties": {"v": {"type": "object"}}})
    assert arguments_of(name, function, text) == {"v": value}


@pytest.mark.parametrize("name", ["gemma4", "functiongemma"])
@pytest.mark.parametrize(
    ("written", "value"),
    [("MaMbM", "aMb"), ("MaMM", "a"), ("MM", ""), ("MM inside M", "M inside ")],
)
def test_fault_85_a_string_may_hold_its_mark(name: str, written: str, value: str) -> None:
    mark = parser_of(name).mark
    text = CALLS[name].replace("VALUE", written.replace("M", mark))
    function = ToolFunction("f", TEXT)
    assert arguments_of(name, function, text) == {"v": value.replace("M", mark)}


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    "value", ["CALL", "so: CALL.", "CALL and CALL, then CALL", "OPENING to begin", "OPENING"]
)
@pytest.mark.parametrize("parameters", [TEXT, {}], ids=["text", "any"])
def test_fault_85_a_value_may_hold_calls_and_their_openings(
    name: str, value: str, parameters: Any
) -> None:
    call = CALLS[name].replace("MORE", "")
    value = value.replace("CALL", call.replace("VALUE", "1"))
    value = value.replace("OPENING", call.partition("VALUE")[0].strip())
    function = ToolFunction("f", parameters)
    assert arguments_of(name, function, call.replace("VALUE", value)) == {"v": value}


@pytest.mark.parametrize("name", TAGGED)
def test_fault_85_a_value_may_hold_calls_in_json_strings(name: str) -> None:
    call = CALLS[name].replace("MORE", "")
    value = {"text": f"a{call.replace('VALUE', '1')}b", "list": [call.replace("VALUE", "2")]}
    text = call.replace("VALUE", json.dumps(value, ensure_ascii=False))
    function = ToolFunction("f", {"properties": {"v": {"type": "object"}}})
    assert arguments_of(name, function, text) == {"v": value}


@pytest.mark.parametrize("name", TAGGED)
def test_fault_85_the_next_call_is_one_whatever_the_value_before_it_holds(name: str) -> None:
    call = CALLS[name].replace("MORE", "")
    opening = call.partition("VALUE")[0].strip()
    for value in (call.replace("VALUE", "1"), f"{opening} to begin"):
        text = f"{call.replace('VALUE', value)}\n{call.replace('VALUE', 'next')}"
        plan = OutputParserConfig(tools=partial(parser_of(name), (ToolFunction("f", TEXT),)))
        full = read(plan, [text])
        assert shape(read(plan, list(text))) == shape(full)
        calls = build_message(full)["tool_calls"]
        values = [json.loads(call["function"]["arguments"])["v"] for call in calls]
        assert values == [value, "next"]


@pytest.mark.parametrize("name", TAGGED)
def test_fault_85_no_number_of_calls_in_values_costs_too_much(name: str) -> None:
    call = CALLS[name].replace("MORE", "")
    opening, _, rest = call.partition("VALUE")
    text = f"{opening}{opening}x{rest}" * 300
    plan = OutputParserConfig(tools=partial(parser_of(name), (ToolFunction("f", TEXT),)))
    assert build_message(read(plan, [text]))["tool_calls"]
