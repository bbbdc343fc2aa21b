"""A slow reader costs a bounded buffer and slows nobody; a silent engine is bridged."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from engine.text.chat_template import render_chat
from engine.text.tokenizer import Tokenizer
from tests.inference.asgi_client import chat_body, parse_events
from tests.inference.conftest import Gateway, generated_tokens, until
from tests.inference.scripted import byte_by_byte

CHAT = "/v1/chat/completions"
TOKENS = 1000


async def test_fault_26_a_reader_that_stands_still_gets_all_of_it_in_few_chunks(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    async with gateway.serving(gateway.fake(token_delay=0.0005)) as replica:
        body = chat_body(stream=True, max_tokens=TOKENS)
        slow = gateway.client.open("POST", CHAT, body)
        await slow.head()
        slow.accept.clear()
        neighbour = await gateway.client.chat("neighbour", max_tokens=50, stream=True)
        assert neighbour.events[-1] == "[DONE]"
        await until(lambda: not replica.running)  # the engine never waited for the reader
        assert slow.sent.qsize() <= 2
        slow.accept.set()
        data = b"".join([chunk async for chunk in slow.chunks()])
        await slow.leave()
    events = parse_events(data)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
    prompt = render_chat(tokenizer, [{"role": "user", "content": "hello"}])
    assert text == tokenizer.decode(generated_tokens(prompt, TOKENS))
    assert len(events) < TOKENS / 4  # what waited came together


async def test_a_silent_engine_is_bridged_by_heartbeats(gateway: Gateway, settings: Any) -> None:
    settings.QUIRE = settings.QUIRE.replace(sse_heartbeat_s=0.05, stream_start_wait_s=0.05)
    async with gateway.serving(gateway.fake(token_delay=0.2, eos_after=2)):
        chat, message, response = await asyncio.gather(
            gateway.client.chat(stream=True),
            gateway.client.post(
                "/v1/messages",
                {
                    "model": "fake",
                    "max_tokens": 5,
                    "stream": True,
                    "messages": [{"role": "user", "content": "x"}],
                },
            ),
            gateway.client.post("/v1/responses", {"model": "fake", "input": "x", "stream": True}),
        )
    assert chat.body.count(b": keep-alive\n") >= 2
    assert response.body.count(b": keep-alive\n") >= 2
    assert message.body.count(b"event: ping\n") >= 3
    assert chat.events[-1] == "[DONE]"
    import anthropic._streaming
    import openai._streaming

    # The SDKs find an event with data in all that they take for one.
    read = openai._streaming.SSEDecoder().iter_bytes
    answer = [event.data for event in read(iter([chat.body]))]
    assert [json.loads(data) for data in answer[:-1]] == chat.events[:-1]
    assert all(json.loads(event.data) for event in read(iter([response.body])))
    read_message = anthropic._streaming.SSEDecoder().iter_bytes
    assert all(json.loads(event.data) for event in read_message(iter([message.body])))


async def test_tokens_that_show_nothing_yet_are_no_silence(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    script = byte_by_byte(tokenizer, "🙂" * 5)
    async with gateway.serving(gateway.scripted(script, token_delay=0.005)):
        reply = await gateway.client.chat(stream=True)
    assert b": keep-alive" not in reply.body
    assert (
        "".join(e["choices"][0]["delta"].get("content", "") for e in reply.events[:-1]) == "🙂" * 5
    )
