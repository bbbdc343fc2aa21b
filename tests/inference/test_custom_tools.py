"""OpenAI's custom tools: a text instead of arguments, free or held to a grammar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from engine.contract.errors import InvalidRequest
from engine.text.tokenizer import Tokenizer, load_tokenizer
from inference.chat.parsers import OutputParserConfig, grammar_token_ids
from inference.chat.turn import build_message
from inference.parsers.custom_tools import parameters
from inference.parsers.registry import tool_parsers
from inference.parsers.tool_grammar import ToolFunction, escape_lark_for_json, regex_to_lark
from tests.inference.conftest import Gateway
from tests.inference.parsers import read
from tests.inference.scripted import byte_by_byte
from tests.inference.test_tool_grammar import DEMO_MODEL, NAMES, follow

CODE = 'print("Köln")\n# 🦊\\'
TOOL = {"type": "custom", "custom": {"name": "run", "description": "Runs Python."}}
LARK = 'start: "add " /\\d+/ "\\n"'


def call_of(text: str, name: str = "run") -> str:
    body = json.dumps({"name": name, "arguments": {"input": text}})
    return f"<tool_call>\n{body}\n</tool_call>"


async def test_a_call_holds_the_text_whole_and_streamed(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    replica = gateway.scripted(byte_by_byte(tokenizer, call_of(CODE)))
    async with gateway.serving(replica):
        full_outputs = await gateway.client.chat(tools=[TOOL])
        stream = await gateway.client.chat(tools=[TOOL], stream=True)
    choice = full_outputs.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "run", "input": CODE})
    parts = [
        part
        for event in stream.events[:-1]
        for choice in event["choices"]
        for part in choice["delta"].get("tool_calls", [])
    ]
    assert (parts[0]["type"], parts[0]["custom"]["name"]) == ("custom", "run")
    assert "".join(part["custom"]["input"] for part in parts) == CODE
    assert len(parts) > 5  # it doesn't wait for the end
    prompt = tokenizer.decode(replica.received[0].prompt_token_ids, skip_special_tokens=False)
    assert "Runs Python." in prompt


async def test_earlier_calls_reach_the_model(gateway: Gateway, tokenizer: Tokenizer) -> None:
    initial = {"id": "c1", "type": "custom", "custom": {"name": "run", "input": "1 + 1"}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [initial]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    replica = gateway.scripted(byte_by_byte(tokenizer, "two"))
    async with gateway.serving(replica):
        assert (await gateway.client.chat(messages=messages, tools=[TOOL])).status == 200
    prompt = tokenizer.decode(replica.received[0].prompt_token_ids, skip_special_tokens=False)
    assert '"input": "1 + 1"' in prompt


async def test_responses_have_items_and_events_of_their_own(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    tool = {"type": "custom", "name": "run"}
    body = {"model": "fake", "input": "?", "tools": [tool]}
    async with gateway.serving(gateway.scripted(byte_by_byte(tokenizer, call_of(CODE)))):
        reply = await gateway.client.post("/v1/responses", body)
        stream = await gateway.client.post("/v1/responses", {**body, "stream": True})
        output = {"type": "custom_tool_call_output", "call_id": "x", "output": "ok"}
        more = {"model": "fake", "input": [output], "previous_response_id": reply.json()["id"]}
        assert (await gateway.client.post("/v1/responses", more)).status == 200
    (item,) = Response.model_validate(reply.json()).output
    assert item.type == "custom_tool_call"
    assert item.input == CODE
    events: list[Any] = [
        TypeAdapter(ResponseStreamEvent).validate_python(event) for event in stream.events
    ]
    deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    (done,) = [e for e in events if e.type == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done.input == CODE


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ({"name": "run", "arguments": {"code": "1"}}, "1"),
        ({"name": "run", "arguments": {"a": 1, "b": "2"}}, '{"a": 1, "b": "2"}'),
        ({"name": "run", "arguments": {}}, "{}"),
        ({"name": "run", "arguments": {"input": ""}}, ""),
    ],
)
async def test_arguments_of_another_shape_are_not_lost(
    gateway: Gateway, tokenizer: Tokenizer, written: Any, text: str
) -> None:
    call_text = f"<tool_call>\n{json.dumps(written)}\n</tool_call>"
    async with gateway.serving(gateway.scripted(byte_by_byte(tokenizer, call_text))):
        reply = await gateway.client.chat(tools=[TOOL])
    (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
    assert call["custom"]["input"] == text


async def test_a_grammar_reaches_the_engine(gateway: Gateway, tokenizer: Tokenizer) -> None:
    form = {"type": "grammar", "grammar": {"syntax": "lark", "definition": LARK}}
    tool = {"type": "custom", "custom": {"name": "run", "format": form}}
    flat = {"type": "grammar", "syntax": "regex", "definition": "a+"}
    replica = gateway.scripted(byte_by_byte(tokenizer, call_of("add 1\n")))
    choice = {"type": "custom", "custom": {"name": "run"}}
    body = {"model": "fake", "input": "?", "tools": [{"type": "custom", "name": "run"}]}
    body["tools"][0]["format"] = flat  # type: ignore[index]
    async with gateway.serving(replica):
        for more in ({}, {"tool_choice": choice}, {"tool_choice": "required"}):
            assert (await gateway.client.chat(tools=[tool], **more)).status == 200
        named = {"tool_choice": {"type": "custom", "name": "run"}}
        assert (await gateway.client.post("/v1/responses", body | named)).status == 200
    for request, chunk in zip(replica.received, ["add "] * 3 + ["start: /a+/"], strict=True):
        allocated_structured_outputs = request.sampling.structured_outputs
        assert chunk in (
            allocated_structured_outputs.grammar or "" if allocated_structured_outputs else ""
        )


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "custom"}, "tools[0].custom"),
        ({"type": "custom", "custom": {"name": "a b"}}, "tools[0].custom.name"),
        ({"type": "odd", "custom": {"name": "a"}}, "tools[0]"),
        ({"type": "custom", "custom": {"name": "a", "format": {"type": "grammar"}}}, "tools[0]"),
        (
            {
                "type": "custom",
                "custom": {
                    "name": "a",
                    "format": {
                        "type": "grammar",
                        "grammar": {"syntax": "lark", "definition": "start: %json {}"},
                    },
                },
            },
            "tools",
        ),
    ],
)
async def test_bad_tools_are_refused_by_field(served: Gateway, tool: Any, param: str) -> None:
    reply = await served.client.chat(tools=[tool])
    assert reply.status == 400
    assert reply.error["param"].startswith(param)


async def test_a_choice_names_the_kind_too(served: Gateway) -> None:
    choice = {"type": "function", "function": {"name": "run"}}
    reply = await served.client.chat(tools=[TOOL], tool_choice=choice)
    assert (reply.status, reply.error["param"]) == (400, "tool_choice")


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return load_tokenizer(Path(DEMO_MODEL))


@pytest.fixture(scope="module")
def backend(demo: Tokenizer) -> LLTokenizer:
    return LLTokenizer(demo.to_json(), eos_token=[demo.eos_token_id or 0])


@pytest.mark.parametrize("name", NAMES)
def test_every_way_of_writing_calls_keeps_to_the_grammar(
    name: str, demo: Tokenizer, backend: LLTokenizer
) -> None:
    parser = tool_parsers.get(name)
    assert parser is not None
    tool = ToolFunction(
        "run", parameters(), strict=True, grammar='start: "say \\"" /[a-c\\n]/ "\\""'
    )
    grammar = parser.layout.grammar([tool], grammar_token_ids(demo), parallel=False)
    plan = OutputParserConfig(tools=lambda: parser([tool]), custom=frozenset({"run"}))
    for seed in range(3):
        text = follow(backend, demo, grammar, seed)
        assert text is not None
        for cut in ([text], list(text)):
            (call,) = build_message(read(plan, cut))["tool_calls"]
            assert call["custom"]["input"] in [f'say "{char}"' for char in "abc\n"]


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        ("start: /a.*b/", ["acb", 'a"\\b', "a\nb"]),
        ("start: /a.*b/s", ["a\nb"]),
        (r"start: /[^x]+/", ['ab"\n\\\r', "x"]),
        ('start: "say \\"" WORD "\\"\\n" // "c\n%import common.WORD', ['say "hi"\n', "say hi"]),
        (
            'start: N ("+" N)*\n%import common.NUMBER -> N\n%ignore WS\n%import common.WS',
            ["1 +\n2.5", "1+", '1 + "2'],
        ),
        ('start: C\nC: "!".."~"', ['"', "\\", "\n"]),
        (r"start: /\S+\s\W\}/", ['a" "}', "a\n\\}", "a b}"]),
        (regex_to_lark('\\d{4}"/[\\n\\t]?'), ['2024"/\n', "2024/"]),
        (regex_to_lark("a\nb"), ["a\nb", "ab"]),
    ],
)
def test_an_escaped_grammar_takes_what_the_plain_one_does(grammar: str, texts: list[str]) -> None:
    backend = LLTokenizer("byte")

    def takes(source: str, text: str) -> bool:
        matcher = LLMatcher(backend, source, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens = backend.tokenize_str(text)
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())

    verdicts = [takes(grammar_from("lark", grammar), text) for text in texts]
    inside = [json.dumps(text, ensure_ascii=False)[1:-1] for text in texts]
    assert [takes(escape_lark_for_json(grammar), text) for text in inside] == verdicts
    assert any(verdicts)


@pytest.mark.parametrize(
    "grammar",
    [
        "start: %regex {}",
        "start: <|im_end|>",
        "start: /a(?=b)/",
        "start: /\\p{L}/",
        'start: "\\q"',
        "start: /(?s)a/",
        "%import python.NAME",
        'start: "a\\n"i',
    ],
)
def test_what_cant_be_told_inside_json_is_refused(grammar: str) -> None:
    with pytest.raises(InvalidRequest, match="grammar"):
        escape_lark_for_json(grammar)
