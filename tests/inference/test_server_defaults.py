"""What the operator sets for requests that don't say: vLLM's flags of the server."""

from __future__ import annotations

from typing import Any

import pytest

from engine.text.tokenizer import Tokenizer
from tests.inference.conftest import Gateway

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
TEXT = {"model": "fake", "prompt": "x", "max_tokens": 3}
BOTH = (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT))
TEMPLATE = "{% if enable_thinking %}on{% else %}off{% endif %}{{ mood }}{{ reasoning_effort }}"


@pytest.mark.parametrize("forced", [True, False])
async def test_streams_end_with_their_usage(gateway: Gateway, settings: Any, forced: bool) -> None:
    settings.QUIRE = settings.QUIRE.replace(force_include_usage=forced)
    async with gateway.serving(gateway.fake()):
        for path, body in BOTH:
            for options in (None, {"include_usage": False}):
                streamed = await gateway.client.post(
                    path, body | {"stream": True, "stream_options": options}
                )
                counts = [chunk.get("usage") is not None for chunk in streamed.events[:-1]]
                assert counts == [False] * (len(counts) - 1) + [forced]
            continuous = {"continuous_usage_stats": True}
            streamed = await gateway.client.post(
                path, body | {"stream": True, "stream_options": continuous}
            )
            assert all(chunk.get("usage") for chunk in streamed.events[:-1]) is forced


async def test_tokens_are_named_by_id_unless_a_request_says_otherwise(
    gateway: Gateway, settings: Any
) -> None:
    settings.QUIRE = settings.QUIRE.replace(return_tokens_as_token_ids=True)
    fields: dict[str, Any] = {"logprobs": 0}
    async with gateway.serving(gateway.fake()):
        named = await gateway.client.complete("x", **fields)
        spelt = await gateway.client.complete("x", **fields, return_tokens_as_token_ids=False)
    ids, texts = (
        response.json()["choices"][0]["logprobs"]["tokens"] for response in (named, spelt)
    )
    assert all(name.startswith("token_id:") for name in ids)
    assert not any(text.startswith("token_id:") for text in texts)


async def test_a_chats_own_template_variables_go_before_the_servers(
    gateway: Gateway, settings: Any, tokenizer: Tokenizer
) -> None:
    template_kwargs = {"enable_thinking": True, "mood": "calm", "reasoning_effort": "high"}
    settings.QUIRE = settings.QUIRE.replace(default_chat_template_kwargs=template_kwargs)
    settings.QUIRE = settings.QUIRE.replace(request_chat_templates=True)
    request_fields = {"chat_template_kwargs": {"enable_thinking": False}}
    async with gateway.serving(replica := gateway.fake(eos_after=5)):
        await gateway.client.chat(chat_template=TEMPLATE)
        await gateway.client.chat(chat_template=TEMPLATE, **request_fields)
        await gateway.client.chat(chat_template=TEMPLATE, reasoning_effort="low")
    prompts = [tokenizer.decode(request.prompt_token_ids, False) for request in replica.received]
    assert prompts == ["oncalmhigh", "offcalmhigh", "oncalmlow"]
