"""Reasoning in the Responses API and in Anthropic's Messages."""

from __future__ import annotations

from typing import Any

import pytest

from tests.inference.asgi_client import parse_events
from tests.inference.conftest import Gateway
from tests.inference.test_reasoning import thinker  # noqa: F401 - a fixture


@pytest.mark.usefixtures("gateway")
async def test_a_response_has_it_as_an_item(gateway: Gateway, thinker: Any) -> None:  # noqa: F811
    body = {"model": "fake", "input": "x"}
    async with gateway.serving(thinker()):
        full_payload = (await gateway.client.post("/v1/responses", body)).json()
        stream = await gateway.client.post("/v1/responses", body | {"stream": True})
        reasoning, message = full_payload["output"]
        again = await gateway.client.post(
            "/v1/responses", {"model": "fake", "input": [reasoning, message, {**USER}]}
        )
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm, {a}."}]
    assert message["content"][0]["text"] == "Yes."
    usage = full_payload["usage"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    events = parse_events(stream.body)
    assert "".join(texts_of(events, "response.reasoning_text.delta")) == "Hm, {a}."
    assert "".join(texts_of(events, "response.output_text.delta")) == "Yes."
    assert again.status == 200


USER = {"role": "user", "content": "and now?"}


def texts_of(events: list[Any], kind: str) -> list[str]:
    return [event["delta"] for event in events if event["type"] == kind]


THINKING_BLOCK = {"type": "thinking", "thinking": "Hm, {a}.", "signature": ""}


@pytest.mark.parametrize(
    ("asked", "thoughts"),
    [
        ({"thinking": {"type": "adaptive"}}, [THINKING_BLOCK]),
        (
            {"thinking": {"type": "adaptive", "display": "omitted"}},
            [THINKING_BLOCK | {"thinking": ""}],
        ),
        ({}, []),
    ],
)
async def test_a_message_shows_it_as_it_was_asked_to(
    gateway: Gateway,
    thinker: Any,  # noqa: F811
    asked: dict[str, Any],
    thoughts: list[dict[str, str]],
) -> None:
    body = {"model": "fake", "max_tokens": 200, "messages": [USER], **asked}
    async with gateway.serving(thinker()):
        full_payload = (await gateway.client.post("/v1/messages", body)).json()
        stream = await gateway.client.post("/v1/messages", body | {"stream": True})
        messages = [USER, {"role": "assistant", "content": full_payload["content"]}, USER]
        again = await gateway.client.post("/v1/messages", body | {"messages": messages})
    assert full_payload["content"] == [*thoughts, {"type": "text", "text": "Yes."}]
    deltas = [event["delta"] for event in parse_events(stream.body) if "index" in event
              and "delta" in event]  # fmt: skip
    streamed = "".join(delta.get("thinking", "") for delta in deltas)
    assert streamed == "".join(block["thinking"] for block in thoughts)
    assert "".join(delta.get("text", "") for delta in deltas) == "Yes."
    assert again.status == 200
