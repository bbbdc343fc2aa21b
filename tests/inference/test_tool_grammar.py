"""Enforced calls: every parser's grammar compiles, and what follows it the parser reads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from

from engine.contract.errors import InvalidRequest
from engine.text.tokenizer import Tokenizer, load_tokenizer
from inference.chat.parsers import OutputParserConfig, grammar_token_ids
from inference.chat.turn import build_message
from inference.parsers.registry import tool_parsers
from inference.parsers.tool_grammar import ToolFunction
from inference.parsers.tool_parser import ToolCallParser
from tests.inference.parsers import read

DEMO_MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"

NAMES = sorted(set(tool_parsers.all()) - {"gpt_oss"})
FUNCTIONS = (
    ToolFunction(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "unit": {"type": "string", "enum": ["C", "F"]},
                "days": {"$ref": "#/$defs/days"},
                "exact": {"type": "boolean"},
            },
            "required": ["unit", "days"],
            "additionalProperties": False,
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    ),
    ToolFunction("clock"),
)


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return load_tokenizer(DEMO_MODEL)


@pytest.fixture(scope="module")
def backend(demo: Tokenizer) -> LLTokenizer:
    return LLTokenizer(demo.to_json(), eos_token=[demo.eos_token_id or 0])


def parser_of(name: str) -> type[ToolCallParser]:
    parser = tool_parsers.get(name)
    assert parser is not None
    return parser


def follow(
    backend: LLTokenizer, demo: Tokenizer, grammar: str, seed: int, limit: int = 3000
) -> str | None:
    """A text that follows the grammar, token by token at random; None if it didn't end in time."""
    matcher = LLMatcher(backend, grammar_from("grammar", grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    eos, pick, tokens = demo.eos_token_id, random.Random(seed), []
    row = np.zeros(-(-backend.vocab_size // 32), dtype=np.int32)
    while not matcher.is_stopped() and len(tokens) < limit:
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        token = eos if eos in allowed else int(allowed[pick.randrange(len(allowed))])
        assert token is not None
        assert matcher.consume_token(token), matcher.get_error()
        tokens.append(token)
        if token == eos:
            return demo.decode(tokens[:-1], skip_special_tokens=False)
    return demo.decode(tokens, skip_special_tokens=False) if matcher.is_stopped() else None


def calls_in(parser: type[ToolCallParser], text: str) -> list[dict[str, Any]]:
    plan = OutputParserConfig(tools=lambda: parser(FUNCTIONS))
    message = build_message(read(plan, [text]))
    assert not message["content"], text
    return [call["function"] for call in message["tool_calls"]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("parallel", [False, True])
def test_what_follows_the_grammar_is_calls(
    name: str, parallel: bool, demo: Tokenizer, backend: LLTokenizer
) -> None:
    parser = parser_of(name)
    grammar = parser.layout.grammar(FUNCTIONS[:1], grammar_token_ids(demo), parallel=parallel)
    for seed in range(3):
        text = follow(backend, demo, grammar, seed)
        assert text is not None
        calls = calls_in(parser, text)
        assert len(calls) == 1 or parallel
        for call in calls:
            arguments = json.loads(call["arguments"])
            assert call["name"] == "get_weather"
            assert arguments["unit"] in ("C", "F")
            assert set(arguments) <= {"unit", "days", "exact"}
            assert isinstance(arguments["days"], int)


@pytest.mark.parametrize("name", NAMES)
def test_all_functions_are_on_offer(name: str, demo: Tokenizer, backend: LLTokenizer) -> None:
    layout = parser_of(name).layout
    every = grammar_from(
        "grammar", layout.grammar(FUNCTIONS, grammar_token_ids(demo), parallel=False)
    )
    for function in FUNCTIONS:
        named = layout.grammar([function], grammar_token_ids(demo), parallel=False)
        text = follow(backend, demo, named, 1)
        assert text is not None
        matcher = LLMatcher(backend, every, log_level=0)
        assert matcher.consume_tokens(demo.encode(text, add_special_tokens=False)), text
        assert [call["name"] for call in calls_in(parser_of(name), text)] == [function.name]


@pytest.mark.parametrize("name", NAMES)
def test_text_or_calls_that_keep_to_their_schema(
    name: str, demo: Tokenizer, backend: LLTokenizer
) -> None:
    parser = parser_of(name)
    grammar = parser.layout.grammar(
        FUNCTIONS[:1], grammar_token_ids(demo), parallel=True, required=False
    )
    compiled = grammar_from("grammar", grammar)

    def accepted(text: str) -> bool:
        matcher = LLMatcher(backend, compiled, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return bool(
            matcher.consume_tokens(demo.encode(text, add_special_tokens=False))
            and matcher.is_accepting()
        )

    assert accepted("It is warm.")
    assert accepted("")
    one = follow(
        backend,
        demo,
        parser.layout.grammar(FUNCTIONS[:1], grammar_token_ids(demo), parallel=False),
        1,
    )
    assert one is not None
    assert accepted(one)
    if parser.layout.trigger:
        assert accepted(f"Well. {one}")
    assert not accepted(one.replace("get_weather", "get_whether"))


def test_an_answer_may_come_instead_of_calls(demo: Tokenizer, backend: LLTokenizer) -> None:
    parser = parser_of("hermes")
    answer = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    grammar = parser.layout.grammar(
        FUNCTIONS, grammar_token_ids(demo), parallel=True, answer={**answer}
    )
    matcher = LLMatcher(backend, grammar_from("grammar", grammar), log_level=0)
    assert matcher.consume_tokens(demo.encode('{"a": 1}', add_special_tokens=False))
    assert matcher.is_accepting()
    matcher.reset()
    assert matcher.consume_tokens(demo.encode("<tool_call>\n", add_special_tokens=False))


@pytest.mark.parametrize(("name", "key"), [("pythonic", "a-b"), ("qwen3_coder", "a>b")])
def test_names_that_a_way_of_writing_cant_hold_are_refused(
    name: str, key: str, demo: Tokenizer
) -> None:
    function = ToolFunction("f", {"type": "object", "properties": {key: {"type": "string"}}})
    with pytest.raises(InvalidRequest) as refusal:
        parser_of(name).layout.grammar([function], grammar_token_ids(demo), parallel=False)
    assert refusal.value.param == "tools"


@pytest.mark.parametrize("name", NAMES)
def test_functions_with_words_from_anywhere(
    name: str, demo: Tokenizer, backend: LLTokenizer
) -> None:
    schema = {"type": "string", "enum": ["Größe", 'a "quote" \\ \n line', "🙂"]}
    if name == "qwen3_coder":  # a line break would end the value there
        schema["enum"] = ["Größe", 'a "quote" \\', "🙂"]
    function = ToolFunction(
        "get_size",
        {"type": "object", "properties": {"größe": schema}, "required": ["größe"]},
    )
    parser = parser_of(name)
    grammar = parser.layout.grammar([function], grammar_token_ids(demo), parallel=False)
    for seed in range(3):
        text = follow(backend, demo, grammar, seed)
        assert text is not None
        plan = OutputParserConfig(tools=lambda: parser([function]))
        (call,) = build_message(read(plan, list(text)))["tool_calls"]
        assert json.loads(call["function"]["arguments"])["größe"] in schema["enum"]
