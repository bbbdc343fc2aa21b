"""The rate of what doesn't generate, and what clients that loop on it do to others."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import pytest
from django.urls import URLPattern

from common import db as db_threads
from common.db import run_in_db_thread
from inference.api import organization as organization
from inference.loop import offload
from inference.urls import urlpatterns
from inference.web.views import LIST_COST
from metering import calls
from metering.access import UsageQuery
from metering.redis_scripts import close_redis_link
from tenants import actions, authentication
from tenants.actors import SYSTEM_ACTOR
from tenants.api_keys import ALL
from tests.inference.asgi_client import Reply
from tests.inference.conftest import Gateway, until
from tests.inference.strangers import stranger

REPORT = "/v1/organization/usage/completions?start_time=0"


def methods_of(pattern: URLPattern) -> list[tuple[str, str]]:
    """The methods and the path of an endpoint that asks for a key and doesn't generate."""
    view = pattern.callback.view_class  # type: ignore[attr-defined]
    if view.public:
        return []
    path = "/" + re.sub(r"<.*?>", "x", str(pattern.pattern))
    methods = [name.upper() for name in ("get", "post", "delete") if hasattr(view, name)]
    return [(name, path) for name in methods if not (view.generates and name == "POST")]


ENDPOINTS = [method for pattern in urlpatterns for method in methods_of(pattern)]


async def with_every_scope(gateway: Gateway) -> dict[str, str]:
    tenant = gateway.rows.tenant
    key = await run_in_db_thread(
        actions.create_key, actor=SYSTEM_ACTOR, tenant=tenant, scopes=tuple(ALL)
    )
    return {"authorization": f"Bearer {key.secret}"}


async def test_fault_71_every_endpoint_that_does_not_generate_has_a_rate(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(ENDPOINTS) > 50
    monkeypatch.setattr(calls, "CALLS_PER_MINUTE", {"tenant": 1, "key": 1})
    headers = await with_every_scope(gateway)
    assert (await gateway.client.get("/v1/models", headers=headers)).status == 200
    for method, path in ENDPOINTS:
        reply = await gateway.client.request(method, path, {}, headers=headers)
        assert reply.status == 429, (method, path, reply.body)
        assert 1 <= int(reply.headers["retry-after"]) <= 60


async def test_fault_71_reports_and_lists_take_more_of_the_rate_and_generating_takes_none(
    served: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "CALLS_PER_MINUTE", {"tenant": 10_000, "key": 3 * LIST_COST})
    for path in (REPORT, "/v1/files", "/v1/chat/completions?metadata[a]=b"):
        assert (await served.client.get(path)).status == 200
    reply = await served.client.get(REPORT)
    assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
    assert set(reply.error) == {"message", "type", "param", "code"}
    assert "This key" in reply.error["message"]
    assert (await served.client.chat()).status == 200
    # Another key of the tenant has calls of its own; the tenant's are those of all keys.
    headers = await with_every_scope(served)
    assert (await served.client.get(REPORT, headers=headers)).status == 200
    monkeypatch.setattr(calls, "CALLS_PER_MINUTE", {"tenant": 1, "key": 10_000})
    headers = await with_every_scope(served)
    await served.client.get("/v1/models", headers=headers)
    reply = await served.client.get("/v1/models", headers=headers)
    assert "This tenant" in reply.error["message"]


async def test_fault_71_64_clients_that_loop_on_reports_hold_up_neither_keys_nor_first_tokens(
    served: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, started_event = threading.Event(), threading.Event()
    report = organization.report

    def slow(*args: Any, **kwargs: Any) -> Any:
        started_event.set()
        assert free.wait(60)
        return report(*args, **kwargs)

    monkeypatch.setattr(organization, "report", slow)
    monkeypatch.setattr(calls, "CALLS_PER_MINUTE", {"tenant": 10_000, "key": 64 * LIST_COST + 1})

    async def loop() -> list[Reply]:
        return [await served.client.get(REPORT), await served.client.get(REPORT)]

    clients = [asyncio.create_task(loop()) for _ in range(64)]
    try:
        await asyncio.to_thread(started_event.wait, 60)
        for _ in range(3):
            authentication.clear_cache()  # the key is looked up anew
            assert (await served.client.chat(store=True)).status == 200
        assert not any(client.done() for client in clients)
    finally:
        free.set()
    replies = [reply for client in clients for reply in await client]
    statuses = [reply.status for reply in replies]
    assert statuses.count(200) >= 64
    assert set(statuses) == {200, 429}


async def test_fault_71_one_tenants_reports_do_not_stand_before_anothers(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, asked = threading.Semaphore(0), list[int]()
    report = organization.report

    def slow(question: UsageQuery) -> Any:
        asked.extend(question.tenants or ())
        assert turns.acquire(timeout=60)
        return report(question)

    def waiting() -> int:
        return sum(offload._report_threads._jobs.values())

    monkeypatch.setattr(organization, "report", slow)
    other = await run_in_db_thread(stranger)
    mine = [gateway.client.open("GET", REPORT) for _ in range(64)]
    try:
        await until(lambda: len(asked) == 2)  # all threads are busy
        await until(lambda: waiting() == 64)
        for exchange in mine[32:]:
            await exchange.leave()
        theirs = asyncio.create_task(other.get(REPORT))
        await until(lambda: waiting() == 65)
        turns.release(2)
        await until(lambda: len(asked) == 4)
        assert set(asked[2:]) != {gateway.rows.tenant.pk}, "theirs is among the next two"
    finally:
        turns.release(100)
    assert (await theirs).status == 200
    assert {(await exchange.reply()).status for exchange in mine[:32]} == {200}
    assert len(asked) == 33, "what nobody waits for any more is not begun"


async def test_fault_71_a_report_that_takes_too_long_is_refused(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db_threads, "REPORT_LIMIT_S", -1.0)  # over before it begins
    monkeypatch.setattr(db_threads, "_STEPS", 1)
    for path in (REPORT, "/v1/files", "/v1/batches", "/v1/chat/completions"):
        reply = await gateway.client.get(path)
        assert (reply.status, reply.error["code"]) == (400, "query_timeout"), path
    monkeypatch.undo()
    assert (await gateway.client.get(REPORT)).status == 200


async def test_calls_are_let_through_while_redis_is_away(
    gateway: Gateway, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "CALLS_PER_MINUTE", {"tenant": 1, "key": 1})
    await close_redis_link()
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    for _ in range(3):
        assert (await gateway.client.get("/v1/models")).status == 200
