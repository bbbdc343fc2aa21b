"""What a schema leaves open is decided: no unnamed property, no endless number or white space."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from engine.contract.json_schema import MAX_INTEGER, InexactNumber, enforced_schema
from engine.contract.structured_outputs import JSON_WHITESPACE, StructuredOutputsParams
from engine.structured_output.backend_llguidance import BadGrammar, build
from engine.structured_output.grammar_spec import grammar_text, make_grammar_spec
from engine.text.tokenizer import Tokenizer, load_tokenizer

DEMO_MODEL = Path(__file__).resolve().parents[3] / "demo" / "model"


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return load_tokenizer(DEMO_MODEL)


@pytest.fixture(scope="module")
def backend(demo: Tokenizer) -> LLTokenizer:
    return LLTokenizer(demo.to_json(), eos_token=[demo.eos_token_id or 0])


@pytest.fixture(scope="module")
def accepts(demo: Tokenizer, backend: LLTokenizer) -> Any:
    """Whether a text follows a schema's grammar."""

    def check(schema: Any, text: str, **options: Any) -> bool:
        spec = make_grammar_spec(StructuredOutputsParams(json=schema, **options))
        matcher = LLMatcher(backend, grammar_text(spec.data, backend), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens = demo.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return check


A = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"properties": {"b": {"type": "integer"}}, "required": ["b"]}
DEFS = {"$defs": {"A": A, "B": B, "R": {"$ref": "#/$defs/A"}}}
AB = '{"a":1,"b":2}'
#: A schema, a document that it asks for, and one with a property more.
CLOSED = [
    ({"type": "object", **A}, '{"a":1}', '{"a":1,"c":3}'),
    ({"type": "object", "properties": {}}, "{}", '{"c":3}'),
    ({"properties": {"a": {"properties": {"b": {}}}}}, '{"a":{"b":1}}', '{"a":{"b":1,"c":3}}'),
    ({"type": "array", "items": A}, '[{"a":1}]', '[{"a":1,"c":3}]'),
    ({"allOf": [A, B]}, AB, '{"a":1,"b":2,"c":3}'),
    ({**A, "allOf": [B]}, AB, '{"a":1,"b":2,"c":3}'),
    ({"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], **DEFS}, AB, '{"a":1,"b":2,"c":3}'),
    ({"allOf": [{"$ref": "#/$defs/R"}, B], **DEFS}, AB, '{"a":1,"b":2,"c":3}'),
    ({"$ref": "#/$defs/A", **B, **DEFS}, AB, '{"a":1,"b":2,"c":3}'),
    ({"$ref": "#/$defs/A", **DEFS}, '{"a":1}', '{"a":1,"c":3}'),
    ({"anyOf": [A, B]}, '{"b":1}', '{"b":1,"c":3}'),
    ({**A, "anyOf": [B, {"properties": {"d": {"const": 1}}, "required": ["d"]}]}, AB,
     '{"a":1,"b":2,"c":3}'),
    ({"allOf": [{"anyOf": [A, B]}, {"properties": {"d": {}}}]}, '{"b":1,"d":2}', '{"b":1,"c":3}'),
    ({"properties": {"x": {"$ref": "#/$defs/A"}, "y": {"allOf": [{"$ref": "#/$defs/A"}, B]}},
      **DEFS}, '{"x":{"a":1},"y":{"a":1,"b":2}}', '{"x":{"a":1,"b":2}}'),
    ({"properties": {"a": {}}, "patternProperties": {"^x": {}}}, '{"a":1,"xy":2}', '{"c":3}'),
    ({"type": "object", "properties": {"a": {}}, "required": ["z"]}, '{"a":1,"z":2}',
     '{"z":1,"c":3}'),
    ({"properties": {"properties": {"type": "object", "properties": {"a": {}}}}},
     '{"properties":{"a":1}}', '{"properties":{"c":3}}'),
    ({"properties": {"v": {"enum": [{"properties": {}}]}}}, '{"v":{"properties":{}}}', '{"c":3}'),
]  # fmt: skip
#: Schemas that say what else there may be, or nothing of properties at all.
OPEN = [
    ({**A, "additionalProperties": True}, '{"a":1,"c":3}'),
    ({**A, "additionalProperties": {"type": "integer"}}, '{"a":1,"c":3}'),
    ({"allOf": [{**A, "additionalProperties": True}, B]}, '{"a":1,"b":2,"c":3}'),
    ({"type": "object"}, '{"c":3}'),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, '{"c":3}'),
    ({"type": "object", "properties": {}, "minProperties": 1}, '{"c":3}'),
    ({}, '{"c":3}'),
]


@pytest.mark.parametrize(("schema", "named", "unnamed"), CLOSED)
def test_fault_97_a_property_that_nobody_named_cant_come(
    accepts: Any, schema: Any, named: str, unnamed: str
) -> None:
    jsonschema.validate(json.loads(named), schema)
    assert accepts(schema, named)
    assert not accepts(schema, unnamed)
    assert accepts(schema, named, disable_additional_properties=True)


@pytest.mark.parametrize(("schema", "text"), OPEN)
def test_fault_97_other_properties_come_where_the_schema_has_them(
    accepts: Any, schema: Any, text: str
) -> None:
    assert accepts(schema, text)


def test_fault_97_a_schema_stays_as_it_was_and_may_be_recursive(accepts: Any) -> None:
    tree = {"properties": {"next": {"$ref": "#"}, "n": {"type": "integer"}}, "required": ["n"]}
    initial = json.dumps(tree)
    assert accepts(tree, '{"next":{"n":1},"n":2}')
    assert not accepts(tree, '{"next":{"n":1,"c":3},"n":2}')
    assert json.dumps(tree) == initial
    loop = {"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"allOf": [{"$ref": "#/$defs/x"}]}}}
    assert enforced_schema(loop)


#: Keywords of schemas that popular libraries write, which the backend doesn't have.
NUMBER = {"type": "number"}
REWRITTEN = [
    ({"type": "array", "items": NUMBER, "uniqueItems": False}, "[1,1]", '["x"]'),
    ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": NUMBER},
     '{"c":3}', '{"c":"x"}'),
    ({"type": "object", "propertyNames": {"type": "string", "enum": ["a", "b"]},
      "additionalProperties": NUMBER, "required": ["a"]}, '{"a":3}', '{"a":3,"c":3}'),
    ({"propertyNames": {"$ref": "#/$defs/N"}, "additionalProperties": NUMBER, "type": "object",
      "$defs": {"N": {"enum": ["a", "b"], "title": "N", "type": "string"}}}, AB, '{"c":3}'),
    ({**A, "type": "object", "propertyNames": {"type": "string"}}, '{"a":1}', '{"a":1.5}'),
    ({"type": "object", "propertyNames": {"pattern": "^x"}}, '{"xy":2}', '{"c":3}'),
    ({**A, "type": "object", "unevaluatedProperties": False}, '{"a":1}', '{"a":1,"c":3}'),
    ({"allOf": [A, B], "unevaluatedProperties": False}, AB, '{"a":1,"b":2,"c":3}'),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "valid", "invalid"), REWRITTEN)
def test_fault_83_keywords_that_the_backend_lacks_are_written_by_others(
    accepts: Any, schema: Any, valid: str, invalid: str
) -> None:
    jsonschema.validate(json.loads(valid), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(invalid), schema)
    assert accepts(schema, valid)
    assert not accepts(schema, invalid)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "propertyNames": {"maxLength": 3}},
        {**A, "type": "object", "propertyNames": {"enum": ["a"]}},
        {"type": "array", "uniqueItems": True},
        {"type": "object", "unevaluatedProperties": False},
        {**A, "anyOf": [B, {"required": ["a"]}], "unevaluatedProperties": False},
    ],
)
def test_a_keyword_that_cant_be_written_by_others_stays(schema: Any) -> None:
    assert {"propertyNames", "uniqueItems", "unevaluatedProperties"} & enforced_schema(
        schema
    ).keys()


@pytest.mark.parametrize("gap", ["", " ", "\n", "\n  ", "\n" + " " * 24, "\n\t\t"])
def test_fault_98_white_space_is_as_serializers_write_it(accepts: Any, gap: str) -> None:
    assert accepts(A, f'{{{gap}"a":{gap}1{gap}}}')
    assert re.fullmatch(JSON_WHITESPACE, gap)


@pytest.mark.parametrize("gap", ["  ", "\n\n", "\t", " \n", "\n \t", "\r", "\n" + " " * 25])
def test_fault_98_other_white_space_needs_a_pattern(accepts: Any, gap: str) -> None:
    assert not accepts(A, f'{{{gap}"a":1}}')
    assert accepts(A, f'{{{gap}"a":1}}', whitespace_pattern=r"[ \t\r\n]*")


@pytest.mark.parametrize("kind", ["integer", ["integer", "null"]])
def test_fault_98_an_integer_has_no_more_digits_than_64_bits(accepts: Any, kind: Any) -> None:
    schema = {"type": kind}
    for value in (0, -1, 2**53 + 1, 1234567890123456789, MAX_INTEGER, -MAX_INTEGER):
        assert accepts(schema, str(value))
    for value in (MAX_INTEGER + 1, 10**19, int("1" * 55), -(10**30)):
        assert not accepts(schema, str(value))
    assert accepts({"type": kind, "maximum": 5}, "-1234567890123456789")
    assert not accepts({"type": kind, "maximum": 5}, "-" + "1" * 55)


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "integer", "maximum": 2**63 - 1}, "5", "9" * 20),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, "1" * 19, "-1"),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "-5", "9" * 20),
        ({"type": "integer", "exclusiveMaximum": 10**19}, "5", "5.5"),
        ({"type": "integer", "minimum": 2**53 + 2}, str(2**53 + 2), str(2**53 + 1)),
        ({"type": "number", "maximum": 10**19}, "5", "x"),
        ({"type": "integer", "maximum": 2**53}, str(2**53), str(2**53 + 1)),
    ],
)
def test_fault_93_bounds_beyond_a_float_are_exact(
    accepts: Any, schema: Any, valid: str, invalid: str
) -> None:
    assert accepts(schema, valid)
    assert not accepts(schema, invalid)


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ({"type": "integer", "minimum": 2**53 + 1}, "minimum 9007199254740993"),
        ({"type": "integer", "maximum": -(2**53) - 1}, "maximum -9007199254740993"),
        ({"type": "integer", "minimum": 2**64}, "minimum 18446744073709551616"),
        ({"const": 2**53 + 1}, "const 9007199254740993"),
        ({"enum": [1, 2**64]}, "enum 18446744073709551616"),
        ({"const": {"a": [10**50]}}, "const a number"),
        ({"type": "integer", "multipleOf": 2**60 + 1}, "multipleOf"),
    ],
)
def test_fault_93_what_would_be_rounded_is_refused_by_name(schema: Any, name: str) -> None:
    for wrapped in (schema, {"properties": {"a": schema}}, {"anyOf": [{"items": schema}]}):
        with pytest.raises(InexactNumber, match=re.escape(name)):
            enforced_schema(wrapped)


@pytest.mark.parametrize("schema", [entry[0] for entry in CLOSED if "allOf" in str(entry[0])])
def test_fault_93_strict_over_all_of_is_satisfiable(accepts: Any, schema: Any) -> None:
    named = next(named for candidate, named, _ in CLOSED if candidate is schema)
    assert accepts(schema, named, disable_additional_properties=True)


@pytest.mark.parametrize("name", ["path", "password", "binary", "file-path", "json-string"])
def test_formats_that_say_nothing_of_the_text_are_no_obstacle(accepts: Any, name: str) -> None:
    assert accepts({"type": "string", "format": name}, '"a/b"')
    assert not accepts({"type": "string", "format": "uuid"}, '"a/b"')


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": {}}, "the schema's not can't be enforced"),
        ({"if": {}, "then": {}}, "the schema's if and then can't be enforced"),
        ({"type": "string", "format": "iri"}, "the schema's format 'iri' can't be enforced"),
        ({"type": "strin"}, "the schema's type 'strin' is none of JSON's"),
        ({"$ref": "#/$defs/x"}, "the schema's $ref '#/$defs/x' names nothing in it"),
        ({"$ref": "http://a/b"}, "the schema's $ref 'http://a/b' leads out of it"),
        ({"type": "string", "pattern": "("}, "the pattern can't be read: unclosed group"),
        (
            {"type": "integer", "minimum": 3, "maximum": 2},
            "no document can follow the schema: minimum (3) is greater than maximum (2)",
        ),
        (
            {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
            "oneOf needs branches that exclude each other by type or constant; use anyOf",
        ),
    ],
)
def test_a_refused_schema_is_told_in_the_words_of_json_schema(
    backend: LLTokenizer, schema: Any, words: str
) -> None:
    spec = make_grammar_spec(StructuredOutputsParams(json=schema))
    with pytest.raises(BadGrammar) as error:
        build(backend, grammar_text(spec.data, backend))
    assert str(error.value) == words
