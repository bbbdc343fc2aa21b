"""`Idempotency-Key`: the same request runs once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from inference.web import idempotency
from inference.web.idempotency import IdempotencyKey
from tests.inference.asgi_client import Reply, chat_body
from tests.inference.conftest import Gateway, until
from tests.inference.forms import HEADERS, form
from tests.inference.strangers import stranger

CHAT = "/v1/chat/completions"


async def ask(gateway: Gateway, key: str = "k1", text: str = "hello", **fields: Any) -> Reply:
    headers = {"idempotency-key": key}
    return await gateway.client.post(CHAT, chat_body(text, **fields), headers=headers)


async def test_the_same_request_has_the_same_answer_and_runs_once(gateway: Gateway) -> None:
    async with gateway.serving(gateway.fake(eos_after=5)) as replica:
        first, second = await ask(gateway), await ask(gateway)
        other = await ask(gateway, "k2")
        assert len(replica.received) == 2
    assert first.body == second.body
    assert "idempotent-replayed" not in first.headers
    assert second.headers["idempotent-replayed"] == "true"
    assert other.json()["id"] != first.json()["id"]
    assert len(await gateway.usage()) == 2


async def test_a_stream_is_replayed_as_it_was(gateway: Gateway) -> None:
    async with gateway.serving(gateway.fake(eos_after=5)) as replica:
        first, second = await ask(gateway, stream=True), await ask(gateway, stream=True)
        assert len(replica.received) == 1
    assert first.body == second.body
    assert second.headers["content-type"].startswith("text/event-stream")
    assert first.events[-1] == "[DONE]"


async def test_fault_49_an_answer_is_kept_before_it_is_billed(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a gateway killed in between would have billed what its client pays for again."""
    billed: list[int] = []
    store = IdempotencyKey._save

    async def save_and_repeat(self: IdempotencyKey, *args: Any) -> None:
        await asyncio.sleep(0.2)  # whatever settles by then
        billed.append(await gateway.redis.xlen(f"{gateway.prefix}:usage"))
        await store(self, *args)

    monkeypatch.setattr(IdempotencyKey, "_save", save_and_repeat)
    async with gateway.serving(gateway.fake(eos_after=5)):
        answer = (await ask(gateway)).json()
    assert billed == [0]
    (row,) = await gateway.usage()
    assert row.request_id == answer["id"]
    # Whoever settles what a killed gateway left finds that the client can have this one.
    assert await gateway.redis.exists(f"{gateway.prefix}:answered:{row.request_id}")


async def test_what_is_not_kept_is_billed_too(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "MAX_BYTES", 10)
    async with gateway.serving(gateway.fake(eos_after=5)):
        assert (await ask(gateway)).status == 200
    (row,) = await gateway.usage()
    assert not await gateway.redis.exists(f"{gateway.prefix}:answered:{row.request_id}")


async def test_another_request_with_the_key_is_refused(served: Gateway) -> None:
    assert (await ask(served)).status == 200
    refused = await ask(served, text="other")
    assert (refused.status, refused.error["code"]) == (422, "idempotency_key_reused")
    listed = await served.client.get("/v1/models", headers={"idempotency-key": "k1"})
    assert listed.status == 200  # only what changes something needs a key


async def test_while_the_first_runs_the_second_is_told_so(gateway: Gateway) -> None:
    async with gateway.serving(gateway.fake(token_delay=0.02, eos_after=20)) as replica:
        first = asyncio.create_task(ask(gateway))
        await until(lambda: replica.running)
        second = await ask(gateway)
        assert (second.status, second.error["code"]) == (409, "idempotency_key_in_use")
        assert second.headers["retry-after"] == "1"
        assert (await first).status == 200
        assert (await ask(gateway)).body == (await first).body


async def test_a_hold_that_ran_out_is_anothers(gateway: Gateway) -> None:
    async with gateway.serving(gateway.fake(token_delay=0.02, eos_after=10)) as replica:
        first = asyncio.create_task(ask(gateway))
        await until(lambda: replica.running)
        (name,) = await gateway.redis.keys(f"{gateway.prefix}:idempotency:*")
        await gateway.redis.set(name, b"another's")
        assert (await first).status == 200
        assert await gateway.redis.get(name) == b"another's"


async def test_an_error_frees_the_key(gateway: Gateway) -> None:
    assert (await ask(gateway, model="nobody")).status == 404
    assert (await ask(gateway)).status == 503  # no replica
    async with gateway.serving(gateway.fake(eos_after=2)):
        assert (await ask(gateway)).status == 200


async def test_a_client_that_leaves_its_stream_frees_the_key(gateway: Gateway) -> None:
    async with gateway.serving(gateway.fake(token_delay=0.01)) as replica:
        headers = {"idempotency-key": "k1"}
        exchange = gateway.client.open("POST", CHAT, chat_body(stream=True), headers=headers)
        await exchange.head()
        await until(lambda: replica.running)
        await exchange.leave()
        await until(lambda: not replica.running)
    async with gateway.serving(gateway.fake(eos_after=2)):
        assert (await ask(gateway, stream=True)).status == 200


async def test_a_key_is_its_tenants(gateway: Gateway) -> None:
    other = await asyncio.to_thread(stranger)
    async with gateway.serving(gateway.fake(eos_after=3)):
        mine = await ask(gateway)
        theirs = await other.post(CHAT, chat_body("x"), headers={"idempotency-key": "k1"})
    assert theirs.status == 200
    assert mine.json()["id"] != theirs.json()["id"]


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb", "é"])
async def test_fault_32_what_is_no_key_is_refused(gateway: Gateway, key: str) -> None:
    refused = await ask(gateway, key)
    assert (refused.status, refused.error["param"]) == (400, "Idempotency-Key")


async def test_uploads_take_no_key(gateway: Gateway) -> None:
    body = form({"purpose": "batch"}, {"file": ("x", b"x")})
    refused = await gateway.client.post(
        "/v1/files", body, headers=HEADERS | {"idempotency-key": "k"}
    )
    assert (refused.status, refused.error["param"]) == (400, "Idempotency-Key")


async def test_large_answers_are_not_kept(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.web.idempotency.MAX_BYTES", 10)
    async with gateway.serving(gateway.fake(eos_after=3)) as replica:
        for stream in (False, True):
            await ask(gateway, stream=stream)
            await ask(gateway, stream=stream)
        assert len(replica.received) == 4


async def test_fault_55_what_is_kept_is_bounded_by_tenant_and_the_oldest_gives_way(
    gateway: Gateway, settings: Any
) -> None:
    max_bytes = 6000
    settings.QUIRE = settings.QUIRE.replace(tenant_quotas={"idempotency_bytes": max_bytes})
    prefix = f"{gateway.prefix}:idempotency:{gateway.rows.tenant.pk}:"
    async with gateway.serving(gateway.fake(eos_after=5)) as replica:
        for number in range(20):
            assert (await ask(gateway, f"k{number}")).status == 200
        assert len(replica.received) == 20
        retained_names = [name async for name in gateway.redis.scan_iter(match=f"{prefix}*")]
        sizes = [
            len(await gateway.redis.get(n))
            for n in retained_names
            if not n.endswith((b"index", b"sum"))
        ]
        assert 3 <= len(sizes) < 10
        assert (
            sum(sizes) + 400 * len(sizes)
            == int(await gateway.redis.get(f"{prefix}sum"))
            <= max_bytes
        )
        assert "idempotent-replayed" in (await ask(gateway, "k19")).headers
        assert "idempotent-replayed" not in (await ask(gateway, "k0")).headers


async def test_fault_55_an_answer_beyond_the_tenants_room_is_not_kept(
    gateway: Gateway, settings: Any
) -> None:
    settings.QUIRE = settings.QUIRE.replace(tenant_quotas={"idempotency_bytes": 300})
    async with gateway.serving(gateway.fake(eos_after=5)) as replica:
        assert (await ask(gateway)).status == (await ask(gateway)).status == 200
        assert len(replica.received) == 2
