"""`POST /v1/chat/completions` against a fake replica."""

from __future__ import annotations

from engine.text import Tokenizer
from tests.inference.conftest import Gateway


async def test_a_chat_is_answered_with_the_engines_text(
    served: Gateway, tokenizer: Tokenizer
) -> None:
    reply = await served.client.chat("hello", max_tokens=8)
    assert reply.status == 200, reply.body
    body = reply.json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    print(body)
