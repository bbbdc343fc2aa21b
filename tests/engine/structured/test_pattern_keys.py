"""Patterns that only named keys match lead no document into a dead end."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLTokenizer

from engine.contract.structured_outputs import StructuredOutputsParams
from engine.structured_output.backend_llguidance import (
    BadGrammar,
    Vocabulary,
    build,
    load_tokenizer,
)
from engine.structured_output.grammar_spec import grammar_text, make_grammar_spec
from engine.text.tokenizer import load_tokenizer as load_text_tokenizer
from tests.e2e.product import ROOT

DEMO = ROOT / "demo" / "model"
CLOSED = {"type": "object", "additionalProperties": False}
INTEGER, SMALL = {"type": "integer"}, {"maximum": 9}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    text_tokenizer = load_text_tokenizer(str(DEMO))
    return load_tokenizer(
        Vocabulary(
            text_tokenizer.to_json(), text_tokenizer.vocab_size, (text_tokenizer.eos_token_id,)
        )
    )


def possible(tokenizer: LLTokenizer, schema: dict[str, Any], text: str) -> bool:
    """Whether a document under the schema may begin with `text`."""
    params = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    matcher = build(tokenizer, grammar_text(make_grammar_spec(params).data, tokenizer))
    tokens = tokenizer.tokenize_str(text)
    return bool(matcher.validate_tokens(tokens) == len(tokens))


@pytest.mark.parametrize(
    "schema",
    [
        {**CLOSED, "properties": {"a": INTEGER}, "patternProperties": {"^a$": SMALL}},
        {**CLOSED, "required": ["a"], "patternProperties": {"^a$": {**INTEGER, **SMALL}}},
        {
            "type": "object",
            "allOf": [
                {"properties": {"a": INTEGER}},
                {"patternProperties": {"^a$": SMALL}, "additionalProperties": False},
            ],
        },
    ],
    ids=["properties", "required", "allOf"],
)
def test_nothing_is_begun_that_no_key_can_follow(
    tokenizer: LLTokenizer, schema: dict[str, Any]
) -> None:
    assert possible(tokenizer, schema, '{"a":7}')
    assert not possible(tokenizer, schema, '{"a":7,')
    assert not possible(tokenizer, schema, '{"a":70')
    assert not possible(tokenizer, schema, '{"b')


def test_other_patterns_stay(tokenizer: LLTokenizer) -> None:
    named = {"properties": {"a": INTEGER, "b": INTEGER}}
    inner = {**CLOSED, **named, "patternProperties": {"^(a|b)$": SMALL, "^c[0-9]$": INTEGER}}
    schema = {**CLOSED, "properties": {"a": inner}, "required": ["a"]}
    assert possible(tokenizer, schema, '{"a":{"a":1,"b":2,"c3":44}}')
    assert not possible(tokenizer, schema, '{"a":{"a":11')
    assert not possible(tokenizer, schema, '{"a":{"a":1,"c3":44,"d')
    assert not possible(tokenizer, schema, '{"a":{"a":1},')


def test_a_pattern_that_is_none_is_refused(tokenizer: LLTokenizer) -> None:
    schema = {**CLOSED, "properties": {"a": INTEGER}, "patternProperties": {"(?!x)": SMALL}}
    with pytest.raises(BadGrammar, match="look-around"):
        possible(tokenizer, schema, "{")
