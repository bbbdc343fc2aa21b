"""Several conversations in one request."""

from __future__ import annotations

import json
from typing import Any

from engine.text.tokenizer import Tokenizer
from tests.inference.conftest import Gateway
from tests.inference.scripted import ScriptedReplica

PATH = "/v1/chat/completions/batch"


def conversations(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": text}] for text in texts]


def body(*texts: str, **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": conversations(*texts), **fields}


def parrot(gateway: Gateway, tokenizer: Tokenizer) -> ScriptedReplica:
    """Says what the user said."""

    def script(request: Any, index: int) -> list[int]:
        prompt = tokenizer.decode(request.prompt_token_ids)
        question = prompt.partition("user\n")[2].partition("\n")[0]
        return tokenizer.encode(question, add_special_tokens=False)

    return gateway.scripted(script)


async def test_each_conversation_has_its_choice(gateway: Gateway, tokenizer: Tokenizer) -> None:
    async with gateway.serving(replica := parrot(gateway, tokenizer)):
        reply = await gateway.client.post(PATH, body("one", "two", "three", temperature=0.5))
    answer = reply.json()
    assert answer["object"] == "chat.completion"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts == ["one", "two", "three"]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    assert [request.sampling.temperature for request in replica.received] == [0.5] * 3
    prompts = sum(len(request.prompt_token_ids) for request in replica.received)
    assert answer["usage"]["prompt_tokens"] == prompts
    (record,) = await gateway.usage()
    assert record.prompt_tokens == prompts


async def test_forms_hold_for_each(gateway: Gateway, tokenizer: Tokenizer) -> None:
    async with gateway.serving(replica := parrot(gateway, tokenizer)):
        form = {"type": "json_object"}
        reply = await gateway.client.post(PATH, body("{}", "{}", response_format=form))
    assert reply.status == 200
    assert all(request.sampling.structured_outputs for request in replica.received)


async def test_what_a_batch_cant_have_is_refused_by_name(served: Gateway) -> None:
    for field, value in (
        ("stream", True),
        ("n", 2),
        ("tools", [{}]),
        ("tool_choice", "auto"),
        ("echo", True),
    ):
        reply = await served.client.post(PATH, body("a", **{field: value}))
        assert (reply.status, reply.error["param"]) == (400, field)


async def test_bad_conversations_are_refused(served: Gateway) -> None:
    for messages, param in (
        ([], "messages"),
        ("hi", "messages"),
        ([{"role": "user", "content": "hi"}], "messages[0]"),
        ([[]], "messages[0]"),
        (conversations("a") * 2049, "messages"),
        ([*conversations("a"), [{"role": "user"}]], "messages[1][0]"),
    ):
        reply = await served.client.post(PATH, {"model": "fake", "messages": messages})
        assert (reply.status, reply.error["param"]) == (400, param), reply.body
    assert json.loads((await served.client.post(PATH, body("a"))).body)["choices"]
