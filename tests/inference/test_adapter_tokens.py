"""Adapters that bring tokens and a tokenizer: whose texts they are, and where outputs end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.db import run_in_db_thread
from engine.contract.lora import ADDED_TOKENS_FILE
from engine.text.tokenizer import load_tokenizer
from tests.inference.adapter_requests import ask, cancelled_midway, chat, newcomer
from tests.inference.asgi_client import AsgiClient
from tests.inference.conftest import VOCAB, Gateway
from tests.inference.tokenizer_folder import with_added_tokens

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("adapter_store")]


def free_id(gateway: Gateway) -> int:
    """The first id behind those of the model's tokenizer."""
    return load_tokenizer(gateway.model_folder).vocab_size


def bringing(gateway: Gateway, text: str) -> dict[str, Any]:
    """Of a version with this token and a row more than the model has."""
    files = {ADDED_TOKENS_FILE: json.dumps({text: free_id(gateway)}).encode()}
    return {"extra_files": files, "vocab_size": VOCAB + 1}


def ending(gateway: Gateway, folder: Path, text: str) -> dict[str, Any]:
    """Of a version whose tokenizer has another EOS."""
    with_added_tokens(gateway.model_folder, folder, [text])
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    settings = json.loads(files["tokenizer_config.json"]) | {"eos_token": text}
    return {"extra_files": files | {"tokenizer_config.json": json.dumps(settings).encode()}}


async def chat_text(client: AsgiClient, model: str, **fields: Any) -> str:
    reply = await ask(client, model, **fields)
    assert reply.status == 200, reply.body
    return str(reply.json()["choices"][0]["message"]["content"] or "")


async def test_tenants_equal_weights_with_other_tokens_never_meet(
    gateway: Gateway, live: Any
) -> None:
    rival, theirs = await run_in_db_thread(newcomer)
    one = await live(gateway.rows.tenant, **bringing(gateway, "<one>"))
    two = await live(rival, **bringing(gateway, "<two>"))
    assert one.digest != two.digest
    hello = [{"role": "user", "content": "<one> <two>"}]
    token_id, prompt = free_id(gateway), {"prompt": "<one>"}
    replica = gateway.fake(low=token_id, high=token_id + 1)
    async with gateway.serving(replica):
        assert await chat_text(gateway.client, "tone", messages=hello) == "<one>" * 3
        assert await chat_text(theirs, "tone", messages=hello) == "<two>" * 3
        assert await chat_text(gateway.client, "fake", messages=hello) == ""
        mine = await gateway.client.post("/tokenize", {"model": "tone", **prompt})
        assert mine.json()["tokens"] == [token_id]
        for client, model in ((theirs, "tone"), (gateway.client, "fake")):
            other = await client.post("/tokenize", {"model": model, **prompt})
            assert token_id not in other.json()["tokens"]
        for model, status in (("tone", 200), ("fake", 400)):
            body = {"model": model, "prompt": [VOCAB], "max_tokens": 1}
            assert (await gateway.client.post("/v1/completions", body)).status == status
            asked = await ask(gateway.client, model, logit_bias={str(VOCAB): 1})
            assert asked.status == status
    assert [token_id in request.prompt_token_ids for request in replica.received[:3]] == [
        True,
        True,
        False,
    ]
    assert replica.received[0].adapter != replica.received[1].adapter


async def test_forms_of_answers_go_on_with_them(gateway: Gateway, live: Any) -> None:
    await live(gateway.rows.tenant, **bringing(gateway, "<one>"))
    form = {"type": "json_object"}
    async with gateway.serving(gateway.fake()) as replica:
        for name, value in (("response_format", form), ("guided_choice", ["a"])):
            assert (await ask(gateway.client, "tone", **{name: value})).status == 200
    asked = [request.sampling.structured_outputs for request in replica.received]
    assert [structured.kind for structured in asked if structured is not None] == [
        "json_object",
        "choice",
    ]
    assert all(request.adapter is not None for request in replica.received)


async def test_outputs_end_on_the_eos_of_its_tokenizer(
    gateway: Gateway, live: Any, tmp_path: Path
) -> None:
    await live(gateway.rows.tenant, **ending(gateway, tmp_path, "<end>"))
    token_id = free_id(gateway)
    async with gateway.serving(gateway.fake()) as replica:
        for fields in ({}, {"stop_token_ids": [7]}, {"ignore_eos": True}):
            assert (await ask(gateway.client, "tone", **fields)).status == 200
    ends = [request.sampling.stop_token_ids for request in replica.received]
    assert ends == [[token_id], [7, token_id], None]


async def test_a_stream_that_goes_on_keeps_the_tokenizer_it_began_with(
    gateway: Gateway, live: Any
) -> None:
    await live(gateway.rows.tenant, **bringing(gateway, "<one>"))
    token_id = free_id(gateway)
    slow = gateway.fake(token_delay=0.02, low=token_id, high=token_id + 1)
    async with gateway.serving(slow) as replica:
        hello = [{"role": "user", "content": "<one> <two>"}]
        body = chat("tone", stream=True, messages=hello, logit_bias={"7": 1}) | {"max_tokens": 90}
        last = await cancelled_midway(gateway, body)
        await live(gateway.rows.tenant, **bringing(gateway, "<two>"))
        after = {"last-event-id": last}
        path = "/v1/chat/completions"
        rest = await gateway.client.open("POST", path, body, headers=after).reply()
        assert rest.status == 200, rest.body
        assert b"<one>" in rest.body
        assert b"<two>" not in rest.body
        assert await chat_text(gateway.client, "tone") == "<two>" * 3
        first, second, _ = replica.received
        assert second.prompt_token_ids == first.prompt_token_ids
        assert second.adapter == first.adapter
