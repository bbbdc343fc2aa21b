"""Valid requests in less common forms: without a model, with older messages, with empty content."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from catalog import access
from catalog.models import DesiredState, ServedModel
from engine.text.tokenizer import Tokenizer
from tests.inference.conftest import Gateway
from tests.inference.scripted import says
from tests.inference.tokenizer_folder import with_template

USER = {"role": "user", "content": "hello"}
WITHOUT_MODEL: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [USER]}),
    ("/v1/chat/completions/batch", {"messages": [[USER]]}),
    ("/v1/completions", {"prompt": "hello"}),
    ("/v1/responses", {"input": "hello"}),
    ("/v1/responses/input_tokens", {"input": "hello"}),
    ("/v1/messages", {"messages": [USER], "max_tokens": 5}),
    ("/v1/messages/count_tokens", {"messages": [USER]}),
    ("/tokenize", {"prompt": "hello"}),
    ("/detokenize", {"tokens": [5]}),
]


@pytest.mark.parametrize(("path", "body"), WITHOUT_MODEL)
async def test_the_only_model_needs_no_name(
    served: Gateway, path: str, body: dict[str, Any]
) -> None:
    reply = await served.client.post(path, body)
    assert reply.status == 200, reply.body
    assert reply.json().get("model", "fake") == "fake"


@pytest.mark.parametrize(("path", "body"), WITHOUT_MODEL)
async def test_of_several_the_one_that_the_server_started_with_needs_no_name(
    served: Gateway, path: str, body: dict[str, Any], settings: Any
) -> None:
    await asyncio.to_thread(
        ServedModel.objects.create,
        name="other",
        source="other",
        desired_state=DesiredState.LOADED,
        managed=False,
    )
    access.clear_cache()
    reply = await served.client.post(path, body)
    assert reply.status == 400, reply.body
    assert "'model'" in str(reply.json()["error"]["message"])
    settings.QUIRE = settings.QUIRE.replace(default_model="fake")
    reply = await served.client.post(path, body)
    assert reply.status == 200, reply.body
    assert reply.json().get("model", "fake") == "fake"


async def test_a_models_folder_is_a_name_of_it_too(served: Gateway) -> None:
    """As vLLM names a model that it was started with by its folder."""
    await asyncio.to_thread(ServedModel.objects.filter(name="fake").update, source="/models/fake")
    access.clear_cache()
    for name, status in (("/models/fake", 200), ("/models/fake/", 200), ("/models", 404)):
        reply = await served.client.post("/v1/completions", {"model": name, "prompt": "hello"})
        assert reply.status == status, reply.body
    listed = (await served.client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["fake"]
    assert "/models" not in str(listed)


async def test_a_key_without_the_first_model_gets_its_own(served: Gateway, settings: Any) -> None:
    await asyncio.to_thread(
        ServedModel.objects.create,
        name="somebody-elses",
        source="/models/somebody-elses",
        desired_state=DesiredState.LOADED,
        managed=False,
        public=False,
    )
    access.clear_cache()
    settings.QUIRE = settings.QUIRE.replace(default_model="somebody-elses")
    for name in ("somebody-elses", "/models/somebody-elses"):
        reply = await served.client.post("/v1/completions", {"model": name, "prompt": "hello"})
        assert reply.status == 404, reply.body
    for unnamed in ({}, {"model": None}, {"model": ""}):
        reply = await served.client.post("/v1/completions", {"prompt": "hello", **unnamed})
        assert (reply.status, reply.json()["model"]) == (200, "fake")


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{{ c.function.arguments.a }}"
    "{% endfor %}{% if m.tool_call_id %}={{ m.tool_call_id }}{% endif %};{% endfor %}"
)
CALL = {"name": "f", "arguments": '{"a": 1}'}
TOOL_CALL = {"id": "c1", "type": "function", "function": CALL}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "assistant", "content": None}, "assistant:"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "assistant:"),
        ({"role": "user", "content": None}, "user:"),
        ({"role": "tool", "content": None, "tool_call_id": "c1"}, "tool:=c1"),
        ({"role": "function", "name": "f", "content": "7"}, "tool:7=f"),
        ({"role": "assistant", "content": None, "function_call": CALL}, "assistant:!f1"),
        ({"role": "assistant", "tool_calls": [TOOL_CALL]}, "assistant:!f1"),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            "assistant:no",
        ),
        ({"role": "user", "content": [{"type": "input_text", "text": "so"}]}, "user:so"),
    ],
)
async def test_less_common_messages_reach_the_template(
    gateway: Gateway, tokenizer: Tokenizer, tmp_path: Any, message: Any, expected: str
) -> None:
    folder = with_template(gateway.model_folder, tmp_path, TEMPLATE)
    replica = gateway.scripted(says(tokenizer, "x"), model_path=folder)
    async with gateway.serving(replica):
        reply = await gateway.client.chat(messages=[USER, message, USER])
    assert reply.status == 200, reply.body
    text = tokenizer.decode(replica.received[0].prompt_token_ids)
    assert text == f"user:hello;{expected};user:hello;"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "tool", "content": "x"},
        {"role": "function", "content": "x"},
        {"role": "assistant", "content": [{"type": "refusal", "text": "no"}]},
        {"role": "assistant", "function_call": {}},
    ],
)
async def test_what_lacks_a_part_is_still_refused(served: Gateway, message: Any) -> None:
    reply = await served.client.chat(messages=[USER, message])
    assert reply.status == 400
    assert reply.error["param"].startswith("messages[1]")


async def test_an_answer_can_be_sent_back_as_it_came(served: Gateway) -> None:
    message = (await served.client.chat()).json()["choices"][0]["message"]
    assert (await served.client.chat(messages=[USER, message, USER])).status == 200


async def test_minus_one_is_no_seed_and_other_negative_ones_are(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    replica = gateway.scripted(says(tokenizer, "x"))
    async with gateway.serving(replica):
        for seed in (-1, -1, -7, -7, -(2**63)):
            assert (await gateway.client.chat(seed=seed)).status == 200
        refused = await gateway.client.chat(seed=-(2**63) - 1)
    assert (refused.status, refused.error["param"]) == (400, "seed")
    seeds = [request.sampling.seed for request in replica.received]
    assert seeds[0] != seeds[1]  # each drawn anew
    assert seeds[2] == seeds[3]
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)
