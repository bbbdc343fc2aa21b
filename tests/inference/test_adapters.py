"""The data plane with adapters: whose name is whose, and which content answers."""

from __future__ import annotations

from typing import Any

import pytest

from adapters import actions as adapter_actions
from adapters import cards
from catalog.models import ServedModel
from common.db import run_in_db_thread
from engine.contract import redis_keys
from metering import actions as metering
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tests.inference.adapter_requests import (
    ask,
    cancelled_midway,
    chat,
    client_of,
    digest_of,
    newcomer,
)
from tests.inference.conftest import Gateway, until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("adapter_store")]


async def test_an_adapter_is_asked_by_either_name(gateway: Gateway, live: Any) -> None:
    version = await live(gateway.rows.tenant)
    async with gateway.serving(gateway.fake()) as replica:
        for name in ("tone", "fake:tone"):
            reply = await ask(gateway.client, name)
            assert reply.status == 200
            assert reply.json()["model"] == name
            assert reply.headers["x-quire-adapter"] == version.digest
        baseline_response = await ask(gateway.client, "fake")
    assert "x-quire-adapter" not in baseline_response.headers
    adapter = replica.received[0].adapter
    assert adapter is not None
    assert replica.received[2].adapter is None
    assert (adapter.digest, adapter.name) == (version.digest, "tone")
    assert adapter.owner == gateway.rows.tenant.slug
    assert version.digest in adapter.path
    records = await gateway.usage()
    assert [(r.model, r.adapter, r.adapter_digest) for r in records] == [
        ("fake", "tone", version.digest),
        ("fake", "tone", version.digest),
        ("fake", "", ""),
    ]


async def test_two_tenants_equal_names_never_meet(gateway: Gateway, live: Any) -> None:
    rival, theirs = await run_in_db_thread(newcomer)
    mine = await live(gateway.rows.tenant, seed=1)
    other = await live(rival, seed=2)
    shared = await live(None, seed=3)
    _, third = await run_in_db_thread(newcomer, "Third")
    async with gateway.serving(gateway.fake()):
        for name in ("tone", "fake:tone"):
            assert await digest_of(gateway.client, name) == mine.digest
            assert await digest_of(theirs, name) == other.digest
            assert await digest_of(third, name) == shared.digest


async def test_a_strangers_adapter_is_not_there(gateway: Gateway, live: Any) -> None:
    await live(gateway.rows.tenant, name="secret-tone")
    _, theirs = await run_in_db_thread(newcomer)
    async with gateway.serving(gateway.fake()):
        for name in ("secret-tone", "fake:secret-tone", "fake:", ":secret-tone", "x:secret-tone"):
            reply = await ask(theirs, name)
            assert (reply.status, reply.error["code"]) == (404, "model_not_found")
        unknown = await ask(theirs, "no-such-thing")
        assert unknown.error["message"].replace("no-such-thing", "") == (
            (await ask(theirs, "secret-tone")).error["message"].replace("secret-tone", "")
        )
        assert (await theirs.get("/v1/models/secret-tone")).status == 404
        listed = (await theirs.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["fake"]


async def test_models_are_listed_with_their_adapters(gateway: Gateway, live: Any) -> None:
    mine = await live(gateway.rows.tenant, name="mine")
    shared = await live(None, name="ours", seed=1)
    await live(gateway.rows.tenant, name="waits", seed=2, promote=False)
    async with gateway.serving(gateway.fake()):
        listed = (await gateway.client.get("/v1/models")).json()["data"]
        one = (await gateway.client.get("/v1/models/fake:mine")).json()
    assert [model["id"] for model in listed] == ["fake", "mine", "ours"]
    assert [model["parent"] for model in listed] == [None, "fake", "fake"]
    assert [model["root"] for model in listed] == ["fake", "fake", "fake"]
    assert [client.get("digest") for client in listed] == [None, mine.digest, shared.digest]
    assert listed[1]["owned_by"] == gateway.rows.tenant.slug
    assert (one["id"], one["digest"]) == ("fake:mine", mine.digest)


async def test_keys_are_narrowed_to_adapters_and_away_from_them(
    gateway: Gateway, live: Any
) -> None:
    tenant = gateway.rows.tenant
    await live(tenant)
    only = await run_in_db_thread(client_of, tenant, allowed_models=["tone"])
    full = await run_in_db_thread(client_of, tenant, allowed_models=["fake:tone"])
    base = await run_in_db_thread(client_of, tenant, allowed_models=["fake"])
    async with gateway.serving(gateway.fake()):
        for client in (only, full):
            assert (await ask(client, "tone")).status == 200
            assert (await ask(client, "fake")).status == 404
            listed = (await client.get("/v1/models")).json()["data"]
            assert [model["id"] for model in listed] == ["tone"]
        assert (await ask(base, "fake")).status == 200
        assert (await ask(base, "tone")).status == 404
        await run_in_db_thread(
            lambda: actions.update_tenant(
                actor=SYSTEM_ACTOR, tenant=tenant, allowed_models=["fake"]
            )
        )
        assert (await ask(gateway.client, "tone")).status == 200
        await run_in_db_thread(
            lambda: actions.update_tenant(
                actor=SYSTEM_ACTOR, tenant=tenant, allowed_models=["other"]
            )
        )
        assert (await ask(gateway.client, "tone")).status == 404


async def test_one_name_of_two_models_must_be_told_apart(gateway: Gateway, live: Any) -> None:
    def second_model() -> None:
        ServedModel.objects.create(name="big", source="fake", desired_state="loaded", managed=False)

    await run_in_db_thread(second_model)
    tenant = gateway.rows.tenant
    small, _ = await live(tenant, seed=1), await live(tenant, seed=2, model="big")
    async with gateway.serving(gateway.fake()):
        reply = await ask(gateway.client, "tone")
        assert reply.status == 400
        assert "big:tone, fake:tone" in reply.error["message"]
        assert await digest_of(gateway.client, "fake:tone") == small.digest
        listed = (await gateway.client.get("/v1/models")).json()["data"]
    assert {model["id"] for model in listed} == {"fake", "big", "fake:tone", "big:tone"}


async def test_a_canary_gets_its_share_and_each_user_one_version(
    gateway: Gateway, live: Any
) -> None:
    first = await live(gateway.rows.tenant)
    second = await live(gateway.rows.tenant, seed=2, promote=False)
    await run_in_db_thread(
        lambda: adapter_actions.promote(actor=SYSTEM_ACTOR, version=second, percent=30)
    )
    cards.forget()
    async with gateway.serving(gateway.fake()):
        users = {n: await digest_of(gateway.client, "tone", user=f"u{n}") for n in range(60)}
        again = {n: await digest_of(gateway.client, "tone", user=f"u{n}") for n in range(60)}
    assert users == again
    assert set(users.values()) == {first.digest, second.digest}
    assert 6 <= list(users.values()).count(second.digest) <= 30


async def test_a_promotion_turns_new_requests_and_leaves_running_ones(
    gateway: Gateway, live: Any
) -> None:
    first = await live(gateway.rows.tenant)
    second = await live(gateway.rows.tenant, seed=2, promote=False)
    async with gateway.serving(gateway.fake()):
        running = gateway.client.open(
            "POST", "/v1/chat/completions", chat("tone", stream=True, max_tokens=40)
        )
        _, headers = await running.head()
        assert headers["x-quire-adapter"] == first.digest
        await run_in_db_thread(lambda: adapter_actions.promote(actor=SYSTEM_ACTOR, version=second))
        assert await digest_of(gateway.client, "tone") == second.digest
        assert [chunk async for chunk in running.chunks()][-1].endswith(b"[DONE]\n\n")
        await running.leave()
        await run_in_db_thread(
            lambda: adapter_actions.take_offline(actor=SYSTEM_ACTOR, adapter=second.adapter)
        )
        assert (await ask(gateway.client, "tone")).status == 404
    digests = {record.adapter_digest for record in await gateway.usage()}
    assert digests == {first.digest, second.digest}


async def test_a_stream_that_moves_to_another_replica_keeps_its_digest(
    gateway: Gateway, live: Any
) -> None:
    first = await live(gateway.rows.tenant)
    second = await live(gateway.rows.tenant, seed=2, promote=False)
    one, two = gateway.fake(die_after=5), gateway.fake()
    async with gateway.serving(one):
        running = gateway.client.open(
            "POST", "/v1/chat/completions", chat("tone", stream=True, max_tokens=60)
        )
        await running.head()
        await run_in_db_thread(lambda: adapter_actions.promote(actor=SYSTEM_ACTOR, version=second))
        await until(lambda: one.state == "dead")
        async with gateway.serving(two):
            await gateway.redis.delete(redis_keys.replica_key(one.replica_id, gateway.prefix))
            assert [chunk async for chunk in running.chunks()][-1].endswith(b"[DONE]\n\n")
            await running.leave()
    resumed = [request for request in two.received if request.resume_token_ids]
    assert [request.adapter.digest for request in resumed if request.adapter] == [first.digest]


async def test_prices_and_budgets_of_adapters(gateway: Gateway, live: Any) -> None:
    tenant = gateway.rows.tenant
    await live(tenant)
    await live(None, name="shared", seed=1)

    def price(model: str, amount: str) -> None:
        metering.set_price(
            actor=SYSTEM_ACTOR, model=model, input_per_million=amount, output_per_million=amount
        )

    def prices() -> None:
        price("fake", "8")
        price("tone", "1")  # some other thing that the tenant named its adapter after
        price("fake:tone", "1")
        price("shared", "3")

    await run_in_db_thread(prices)
    async with gateway.serving(gateway.fake()):
        for name in ("tone", "shared", "fake"):
            assert (await ask(gateway.client, name)).status == 200
    tone, shared, fake = await gateway.usage()
    assert tone.cost_nanos == fake.cost_nanos > shared.cost_nanos > 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello", "max_tokens": 3}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 16}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
        ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}}),
        ("/generate", {"prompt": "hello", "max_tokens": 3}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_endpoint_answers_through_an_adapter(
    gateway: Gateway, live: Any, path: str, body: dict[str, Any], stream: bool
) -> None:
    version = await live(gateway.rows.tenant)
    async with gateway.serving(gateway.fake()) as replica:
        reply = await gateway.client.post(path, {"model": "tone", "stream": stream, **body})
    assert reply.status == 200, reply.body
    assert reply.headers["x-quire-adapter"] == version.digest
    assert [request.adapter.digest for request in replica.received if request.adapter] == [
        version.digest
    ]


async def test_fault_59_a_stream_goes_on_at_another_gateway_with_the_weights_that_it_began_with(
    gateway: Gateway, live: Any
) -> None:
    """Its name leads elsewhere by then: neither what is computed nor header and ledger follow."""
    first = await live(gateway.rows.tenant, seed=1)
    async with gateway.serving(gateway.fake(token_delay=0.02)) as replica:
        body = chat("tone", stream=True) | {"max_tokens": 200}
        last = await cancelled_midway(gateway, body)
        second = await live(gateway.rows.tenant, seed=2)
        after = {"last-event-id": last}
        rest = await gateway.client.open(
            "POST", "/v1/chat/completions", body, headers=after
        ).reply()
        assert rest.status == 200, rest.body
        assert b"[DONE]" in rest.body
        assert rest.headers["x-quire-adapter"] == first.digest
        assert await digest_of(gateway.client, "tone") == second.digest
        digests = [request.adapter and request.adapter.digest for request in replica.received]
        assert digests == [first.digest, first.digest, second.digest]
        records = await gateway.usage()
    assert {r.adapter_digest for r in records[:-1]} == {first.digest}


async def test_an_answer_in_one_piece_goes_on_with_no_stream(gateway: Gateway, live: Any) -> None:
    """An old `Last-Event-ID` of the same caller is no reason for the weights of then."""
    await live(gateway.rows.tenant, seed=1)
    async with gateway.serving(gateway.fake(token_delay=0.02)):
        last = await cancelled_midway(gateway, chat("tone", stream=True) | {"max_tokens": 200})
        second = await live(gateway.rows.tenant, seed=2)
        for after in (last, "none of ours"):
            full_reply = await gateway.client.open(
                "POST", "/v1/chat/completions", chat("tone"), headers={"last-event-id": after}
            ).reply()
            assert full_reply.status == 200, full_reply.body
            assert full_reply.headers["x-quire-adapter"] == second.digest
