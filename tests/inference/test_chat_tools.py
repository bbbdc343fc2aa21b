"""Tool calls in answers and streams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.text.tokenizer import Tokenizer
from tests.inference.conftest import Gateway
from tests.inference.scripted import byte_by_byte, says
from tests.inference.tokenizer_folder import with_template

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


async def test_a_call_is_the_answer(gateway: Gateway, tokenizer: Tokenizer) -> None:
    replica = gateway.scripted(byte_by_byte(tokenizer, CALL))
    async with gateway.serving(replica):
        reply = await gateway.client.chat(tools=[TOOL], tool_choice="auto")
    choice = reply.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Köln"}
    prompt = tokenizer.decode(replica.received[0].prompt_token_ids, skip_special_tokens=False)
    assert '"name": "weather"' in prompt


def assembled(events: list[Any]) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls of a stream, put together as clients do."""
    content, calls = "", {}
    for event in events[:-1]:
        for choice in event["choices"]:
            content += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls", []):
                name, arguments = calls.get(part["index"], ("", ""))
                function = part["function"]
                calls[part["index"]] = (
                    name + (function.get("name") or ""),
                    arguments + (function.get("arguments") or ""),
                )
    return content, [calls[index] for index in sorted(calls)]


async def test_a_stream_adds_up_to_the_whole_answer(gateway: Gateway, tokenizer: Tokenizer) -> None:
    text = f"Let me see.\n{CALL}\n{CALL}\n"
    async with gateway.serving(gateway.scripted(byte_by_byte(tokenizer, text))):
        full_choice = (await gateway.client.chat(tools=[TOOL])).json()["choices"][0]
        events = (await gateway.client.chat(tools=[TOOL], stream=True)).events
    content, calls = assembled(events)
    message = full_choice["message"]
    assert content == message["content"] == "Let me see."
    assert calls == [
        (c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]
    ]
    assert len(calls) == 2
    assert events[-2]["choices"][0]["finish_reason"] == full_choice["finish_reason"] == "tool_calls"


async def test_one_call_at_a_time_on_request(gateway: Gateway, tokenizer: Tokenizer) -> None:
    replica = gateway.scripted(byte_by_byte(tokenizer, CALL + "\n" + CALL))
    async with gateway.serving(replica):
        full_outputs = await gateway.client.chat(tools=[TOOL], parallel_tool_calls=False)
        stream = await gateway.client.chat(tools=[TOOL], parallel_tool_calls=False, stream=True)
    assert len(full_outputs.json()["choices"][0]["message"]["tool_calls"]) == 1
    assert len(assembled(stream.events)[1]) == 1


async def test_without_a_call_the_text_is_the_text(gateway: Gateway, tokenizer: Tokenizer) -> None:
    text = "No tool needed: 1 < 2. \n"
    async with gateway.serving(gateway.scripted(says(tokenizer, text))):
        full_outputs = await gateway.client.chat(tools=[TOOL])
        stream = await gateway.client.chat(tools=[TOOL], stream=True)
    choice = full_outputs.json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert choice["message"]["tool_calls"] == []
    assert assembled(stream.events) == (text, [])


async def test_tool_choice_none_offers_and_reads_nothing(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    replica = gateway.scripted(says(tokenizer, CALL))
    async with gateway.serving(replica):
        reply = await gateway.client.chat(tools=[TOOL], tool_choice="none")
    assert reply.json()["choices"][0]["message"]["content"] == CALL
    prompt = tokenizer.decode(replica.received[0].prompt_token_ids, skip_special_tokens=False)
    assert "weather" not in prompt


async def test_a_model_that_was_not_trained_on_tools_refuses_them(
    gateway: Gateway, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    default_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = with_template(gateway.model_folder, tmp_path, default_template)
    async with gateway.serving(gateway.scripted(says(tokenizer, "x"), model_path=folder)):
        reply = await gateway.client.chat(tools=[TOOL])
        assert (reply.status, reply.error["param"]) == (400, "tools")
        assert (await gateway.client.chat()).status == 200


async def test_an_operator_names_the_parsers(gateway: Gateway, tokenizer: Tokenizer) -> None:
    text = '<think>Hm.</think>[TOOL_CALLS][{"name": "weather", "arguments": {"city": "X"}}]'
    replica = gateway.scripted(byte_by_byte(tokenizer, text))
    replica.model.tool_call_parser, replica.model.reasoning_parser = "mistral", "deepseek_r1"
    async with gateway.serving(replica):
        message = (await gateway.client.chat(tools=[TOOL])).json()["choices"][0]["message"]
        stream = await gateway.client.chat(tools=[TOOL], stream=True)
    assert message["reasoning"] == message["reasoning_content"] == "Hm."
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "X"}'
    assert assembled(stream.events) == ("", [("weather", '{"city": "X"}')])
    chunks = [
        choice["delta"]["reasoning"]
        for event in stream.events[:-1]
        for choice in event["choices"]
        if "reasoning" in choice["delta"]
    ]
    assert "".join(chunks) == "Hm."
    assert len(chunks) > 1


async def test_parsers_that_the_gateway_lacks_are_named(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    replica = gateway.scripted(says(tokenizer, "x"))
    replica.model.tool_call_parser = "nobody's"
    async with gateway.serving(replica):
        reply = await gateway.client.chat(tools=[TOOL])
        assert (reply.status, reply.error["param"]) == (400, "tools")
        assert "nobody's" in reply.error["message"]
        assert (await gateway.client.chat()).status == 200


async def test_arguments_stream(gateway: Gateway, tokenizer: Tokenizer) -> None:
    async with gateway.serving(gateway.scripted(byte_by_byte(tokenizer, CALL))):
        stream = await gateway.client.chat(tools=[TOOL], stream=True)
    parts = [
        part
        for event in stream.events[:-1]
        for choice in event["choices"]
        for part in choice["delta"].get("tool_calls", [])
    ]
    assert len(parts) > 5
    assert [("id" in part, "name" in part["function"]) for part in parts[:2]] == [
        (True, True),
        (False, False),
    ]


OTHER = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_only_allowed_tools_are_shown_and_called(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    replica = gateway.scripted(says(tokenizer, CALL))
    tools, name = [TOOL, OTHER], TOOL["function"]["name"]
    async with gateway.serving(replica):
        both = await gateway.client.chat(tools=tools)
        isolated_outputs = await gateway.client.chat(tools=[TOOL])
        mine = await gateway.client.chat(tools=tools, tool_choice=allowed(name))
        await gateway.client.chat(tools=tools, tool_choice=allowed("other"))
        forced = await gateway.client.chat(
            tools=tools, tool_choice=allowed("other", mode="required")
        )
        response = await gateway.client.post(
            "/v1/responses",
            {
                "input": "hello",
                "tools": [{"type": "function", **tool["function"]} for tool in tools],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": name}],
                },
            },
        )
    prompts = [request.prompt_token_ids for request in replica.received]
    assert prompts[2] == prompts[1] != prompts[0]
    assert prompts[5] == prompts[1]
    for reply in (both, isolated_outputs, mine):
        (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == name
    assert forced.status == 200
    for request in replica.received[3:5]:
        form = request.sampling.structured_outputs
        assert form is not None
        assert "other" in str(form.grammar)
        assert name not in str(form.grammar)
    assert replica.received[0].sampling.structured_outputs is None
    assert response.json()["output"][0]["type"] == "function_call"


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (allowed("nobody"), "tool_choice.allowed_tools.tools"),
        (allowed(), "tool_choice.allowed_tools.tools"),
        (allowed("other", mode="none"), "tool_choice.allowed_tools.mode"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
    ],
)
async def test_allowed_tools_must_be_among_the_tools(
    served: Gateway, choice: Any, param: str
) -> None:
    reply = await served.client.chat(tools=[TOOL, OTHER], tool_choice=choice)
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_beginning_of_a_forced_call_is_no_text(
    gateway: Gateway, tokenizer: Tokenizer, choice: Any, stream: bool
) -> None:
    async with gateway.serving(gateway.scripted(says(tokenizer, "<tool_c"))):
        reply = await gateway.client.chat(
            tools=[TOOL], tool_choice=choice, stream=stream, max_tokens=50
        )
    if stream:
        assert assembled(reply.events) == ("", [])
        return
    message = reply.json()["choices"][0]["message"]
    assert not message["content"]
    assert not message.get("tool_calls")
