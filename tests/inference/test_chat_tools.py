"""Tool calls in answers and streams."""

from __future__ import annotations

import json
from typing import Any

from engine.text import Tokenizer
from tests.inference.conftest import Gateway
from tests.inference.scripted import byte_by_byte, says

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
        whole = (await gateway.client.chat(tools=[TOOL])).json()["choices"][0]
        events = (await gateway.client.chat(tools=[TOOL], stream=True)).events
    content, calls = assembled(events)
    message = whole["message"]
    assert content == message["content"] == "Let me see."
    assert calls == [
        (c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]
    ]
    assert len(calls) == 2
    assert events[-2]["choices"][0]["finish_reason"] == whole["finish_reason"] == "tool_calls"


async def test_one_call_at_a_time_on_request(gateway: Gateway, tokenizer: Tokenizer) -> None:
    replica = gateway.scripted(byte_by_byte(tokenizer, CALL + "\n" + CALL))
    async with gateway.serving(replica):
        whole = await gateway.client.chat(tools=[TOOL], parallel_tool_calls=False)
        stream = await gateway.client.chat(tools=[TOOL], parallel_tool_calls=False, stream=True)
    assert len(whole.json()["choices"][0]["message"]["tool_calls"]) == 1
    assert len(assembled(stream.events)[1]) == 1


async def test_without_a_call_the_text_is_the_text(gateway: Gateway, tokenizer: Tokenizer) -> None:
    text = "No tool needed: 1 < 2. \n"
    async with gateway.serving(gateway.scripted(says(tokenizer, text))):
        whole = await gateway.client.chat(tools=[TOOL])
        stream = await gateway.client.chat(tools=[TOOL], stream=True)
    choice = whole.json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in choice["message"]
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


async def test_what_needs_a_grammar_is_refused_by_name(gateway: Gateway) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        reply = await gateway.client.chat(tools=[TOOL], tool_choice=choice)
        assert (reply.status, reply.error["param"]) == (400, "tool_choice")
    reply = await gateway.client.chat(tool_choice="auto")
    assert (reply.status, reply.error["param"]) == (400, "tool_choice")


async def test_a_model_that_was_not_trained_on_tools_refuses_them(
    gateway: Gateway, tokenizer: Tokenizer, tmp_path: Any
) -> None:
    settings = json.loads((gateway.model_folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer.json").write_bytes(
        (gateway.model_folder / "tokenizer.json").read_bytes()
    )
    replica = gateway.scripted(says(tokenizer, "x"), model_path=str(tmp_path))
    async with gateway.serving(replica):
        reply = await gateway.client.chat(tools=[TOOL])
        assert (reply.status, reply.error["param"]) == (400, "tools")
        assert (await gateway.client.chat()).status == 200
