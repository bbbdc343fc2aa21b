"""`/tokenize` and `/detokenize`: the very tokens that generation sees, spelled as vLLM does."""

from __future__ import annotations

from typing import Any

import pytest

from engine.text.chat_template import render_chat
from engine.text.tokenizer import Tokenizer
from tests.inference.conftest import Gateway

CHAT = [{"role": "user", "content": "hello there"}]


async def test_a_text_is_told_in_the_vocabularys_own_spelling(
    served: Gateway, tokenizer: Tokenizer
) -> None:
    body = {"prompt": "the quick fox", "return_token_strs": True}
    payload = (await served.client.post("/tokenize", body)).json()
    assert payload["tokens"] == tokenizer.encode("the quick fox")
    assert payload["count"] == len(payload["tokens"])
    assert "".join(payload["token_strs"]).replace("\u0120", " ") == "the quick fox"
    assert any(chunk.startswith("\u0120") for chunk in payload["token_strs"])
    back = await served.client.post("/detokenize", {"tokens": payload["tokens"]})
    assert back.json() == {"prompt": "the quick fox"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"tools": []},
    ],
)
async def test_a_chat_is_what_generation_gets(
    served: Gateway, tokenizer: Tokenizer, options: dict[str, Any]
) -> None:
    response = await served.client.post("/tokenize", {"messages": CHAT, **options})
    prompt = options.get("add_generation_prompt", True)
    expected = render_chat(tokenizer, CHAT, add_generation_prompt=prompt)
    assert response.json()["tokens"] == expected
    assert response.json()["token_strs"] is None
    more = await served.client.post(
        "/tokenize", {"messages": CHAT, "add_special_tokens": True, **options}
    )
    assert more.json()["tokens"][-len(expected) :] == expected


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "fake"}, "prompt"),
        ({"prompt": "x", "messages": CHAT}, "prompt"),
        ({"messages": CHAT, "chat_template": "x"}, "chat_template"),  # fault 14
        (
            {"messages": CHAT, "chat_template_kwargs": {"chat_template": "x"}},
            "chat_template_kwargs.chat_template",
        ),
        ({"messages": CHAT, "mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        ({"messages": []}, "messages"),
    ],
)
async def test_what_is_wrong_is_named(served: Gateway, body: dict[str, Any], param: str) -> None:
    reply = await served.client.post("/tokenize", body)
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_unknown_fields_are_named(served: Gateway) -> None:
    reply = await served.client.post("/tokenize", {"prompt": "x", "colour": "red"})
    assert (reply.status, reply.headers["x-quire-ignored-fields"]) == (200, "colour")
