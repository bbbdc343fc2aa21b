"""What a key is narrowed to, over HTTP: models, endpoints, addresses, context, budgets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asgiref.sync import sync_to_async

from inference.edge.handler import GatewayHandler
from inference.generation import generation
from metering import actions as money
from metering.access import Admission
from metering.gateway_recovery import outputs_of
from metering.redis_scripts import sync_client
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tests.inference.asgi_client import AsgiClient, chat_body
from tests.inference.conftest import Gateway, until

CHAT = "/v1/chat/completions"


async def client_with(gateway: Gateway, **limits: Any) -> AsgiClient:
    """A client whose key has these limits."""
    key = await sync_to_async(actions.create_key)(
        actor=SYSTEM_ACTOR, tenant=gateway.rows.tenant, **limits
    )
    return AsgiClient(GatewayHandler(), key.secret)


async def test_a_key_sees_and_uses_its_models_alone(served: Gateway) -> None:
    narrow = await client_with(served, allowed_models=["other"])
    assert (await narrow.get("/v1/models")).json()["data"] == []
    refused = await narrow.post(CHAT, chat_body("x"))
    assert (refused.status, refused.error["code"]) == (404, "model_not_found")
    wide = await client_with(served, allowed_models=["other", "fake"])
    assert (await wide.post(CHAT, chat_body("x"))).status == 200
    update = sync_to_async(actions.update_tenant)
    await update(actor=SYSTEM_ACTOR, tenant=served.rows.tenant, allowed_models=["other"])
    assert (await wide.post(CHAT, chat_body("x"))).status == 404


async def test_a_key_asks_its_endpoints_alone(served: Gateway) -> None:
    narrow = await client_with(served, endpoints=["/v1/chat"])
    assert (await narrow.post(CHAT, chat_body("x"))).status == 200
    for path in ("/v1/models", "/v1/chatter", "/v1/files"):
        refused = await narrow.get(path)
        if refused.status != 404:
            assert (refused.status, refused.error["code"]) == (403, "endpoint_not_allowed")


@pytest.mark.parametrize(
    ("addresses", "status"),
    [
        (["10.0.0.0/8"], 403),
        (["127.0.0.1"], 200),
        (["::1/128", "127.0.0.0/8"], 200),
        (["::ffff:7f00:1/128"], 403),
    ],
)
async def test_a_key_comes_from_its_addresses_alone(
    served: Gateway, addresses: list[str], status: int
) -> None:
    narrow = await client_with(served, addresses=addresses)
    reply = await narrow.post(CHAT, chat_body("x"))
    assert reply.status == status
    if status == 403:
        assert reply.error["code"] == "address_not_allowed"
        upload = await narrow.post("/v1/files", {})
        assert upload.error["code"] == "address_not_allowed"


@pytest.mark.parametrize(
    ("limits", "param"),
    [
        ({"addresses": ["10.0.0.1/8"]}, "addresses"),
        ({"addresses": ["everywhere"]}, "addresses"),
        ({"endpoints": ["v1/models"]}, "endpoints"),
        ({"allowed_models": [""]}, "allowed_models"),
        ({"allowed_models": ["m"] * 201}, "allowed_models"),
        ({"max_running_requests": -1}, "max_running_requests"),
    ],
)
async def test_limits_that_make_no_sense_are_refused_by_name(
    gateway: Gateway, limits: dict[str, Any], param: str
) -> None:
    from engine.contract.errors import InvalidRequest

    with pytest.raises(InvalidRequest) as caught:
        await client_with(gateway, **limits)
    assert caught.value.param == param


async def test_a_context_limit_refuses_long_prompts_and_ends_long_outputs(
    gateway: Gateway,
) -> None:
    narrow = await client_with(gateway, max_context_tokens=40)
    async with gateway.serving(gateway.fake(max_model_len=200)) as replica:
        refused = await narrow.post(CHAT, chat_body("x" * 60))
        assert (refused.status, refused.error["type"]) == (400, "invalid_request_error")
        assert "40" in refused.error["message"]
        body = {"model": "fake", "prompt": "x" * 10, "max_tokens": 35}
        reply = (await narrow.post("/v1/completions", body)).json()
        assert reply["usage"]["total_tokens"] == 40
        assert replica.received[-1].token_cap == 40 - reply["usage"]["prompt_tokens"]


async def test_a_context_limit_counts_what_an_encoder_reads(gateway: Gateway) -> None:
    narrow = await client_with(gateway, max_context_tokens=40)
    replica = gateway.fake(max_model_len=20)  # outputs' alone
    replica.model.max_encoder_tokens, replica.model.decoder_start_ids = 100, [7]
    async with gateway.serving(replica):
        replies = [await narrow.complete([9] * count, max_tokens=3) for count in (39, 40)]
    assert [reply.status for reply in replies] == [200, 400]
    assert "40" in replies[1].error["message"]


async def test_fault_22_a_budget_cuts_an_answer_and_then_refuses_with_the_time_to_wait(
    gateway: Gateway,
) -> None:
    def prepare() -> None:
        money.set_price(
            actor=SYSTEM_ACTOR, model="fake", input_per_million="1", output_per_million="2"
        )
        tenant = gateway.rows.tenant
        money.set_budget(actor=SYSTEM_ACTOR, tenant=tenant, period="month", tokens=40)

    await sync_to_async(prepare)()
    body = {"model": "fake", "prompt": "x" * 10, "max_tokens": 100}
    async with gateway.serving(gateway.fake(max_model_len=500)):
        reply = (await gateway.client.post("/v1/completions", body)).json()
        usage = reply["usage"]
        assert usage["total_tokens"] == 40
        assert reply["choices"][0]["finish_reason"] == "length"
        (record,) = await gateway.usage()
        prompt, output = usage["prompt_tokens"], usage["completion_tokens"]
        assert record.cost_nanos == 1000 * prompt + 2000 * output
        refused = await gateway.client.post("/v1/completions", body)
    assert (refused.status, refused.error["code"]) == (429, "insufficient_quota")
    assert 0 < int(refused.headers["retry-after"]) <= 31 * 86400
    assert len(await gateway.usage()) == 1


async def test_what_is_running_is_known_outside_the_gateway(gateway: Gateway) -> None:
    """What bills a request whose gateway is killed: tokens read, and those that wait."""
    from inference.engine_client.client import get_engine_client

    make = sync_to_async(money.set_budget)
    await make(actor=SYSTEM_ACTOR, tenant=gateway.rows.tenant, period="day", tokens=10_000)
    body = {"model": "fake", "prompt": "x" * 10, "max_tokens": 60}
    async with gateway.serving(gateway.fake(token_delay=0.02, max_model_len=500)) as replica:
        answer = asyncio.create_task(gateway.client.post("/v1/completions", body))
        await until(lambda: replica.running)
        outbox = get_engine_client().gateway_id
        await until(lambda: any(count > 40 for count in outputs_of(sync_client(), outbox).values()))
        reply = (await answer).json()
    ((_, count),) = outputs_of(sync_client(), outbox).items()
    assert count == reply["usage"]["completion_tokens"] == 60


async def test_who_leaves_while_it_is_let_in_keeps_no_place(
    served: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = await client_with(served, max_running_requests=1)
    let_in, admit = asyncio.Event(), generation.admit

    async def slow(*asked: Any) -> Admission:
        admission = await admit(*asked)
        if not let_in.is_set():
            let_in.set()
            await asyncio.sleep(60)  # Redis has said yes, and the loop is busy
        return admission

    monkeypatch.setattr(generation, "admit", slow)
    asking = narrow.open("POST", CHAT, chat_body("x"))
    await let_in.wait()
    await asking.leave()
    async with asyncio.timeout(60):  # it's given back beside what goes on
        while (await narrow.post(CHAT, chat_body("x"))).status != 200:
            pass
