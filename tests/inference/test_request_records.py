"""What became of a request can be found by any id that its client saw, served or refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from django.utils import timezone

from common.db import run_in_db_thread
from engine.contract.messages import FlightRecord
from engine.text.tokenizer import Tokenizer
from inference.generation import background
from inference.generation.output import TokenTimeline
from metering import request_log_writer as writer
from metering import rules
from metering.models import RequestContent, RequestEntry
from metering.request_log import RequestTrace, access_request_entry, called, decode_trace
from metering.request_log_writer import MAX_LOGGED_PER_WINDOW
from metering.retention import remove_old_requests, trim_requests
from tenants import actions, authentication
from tenants.actors import SYSTEM_ACTOR
from tests.inference.asgi_client import Reply, chat_body
from tests.inference.conftest import Gateway, until
from tests.inference.scripted import says

pytestmark = pytest.mark.usefixtures("no_record_waits")


async def ask(gateway: Gateway, headers: dict[str, str], **fields: Any) -> Reply:
    body = chat_body(**fields)
    return await gateway.client.post("/v1/chat/completions", body, headers=headers)


async def written() -> list[RequestEntry]:
    """All records, by when they came, after what runs was settled and written."""
    await background.drain(10)
    await run_in_db_thread(writer.write_waiting, at_once=True)
    return await run_in_db_thread(lambda: list(RequestEntry.objects.order_by("started_at")))


async def test_a_request_is_found_by_every_id_that_its_client_saw(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    async with gateway.serving(gateway.scripted(says(tokenizer, "one two"))):
        ours = await gateway.client.chat()
        theirs = await ask(gateway, {"x-request-id": "theirs-1"}, stream=True)
        body = {"model": "fake", "input": "hello", "store": False}
        response = await gateway.client.post("/v1/responses", body)
        streamed = await gateway.client.post("/v1/responses", body | {"stream": True})
    assert {ours.status, theirs.status, response.status, streamed.status} == {200}
    first, second, third, fourth = await written()

    def find_ids(name: str) -> list[str]:
        return [entry.request_id for entry in RequestEntry.objects.filter(called(name))]

    assert ours.headers["x-request-id"].startswith("req-")
    for name in (ours.headers["x-request-id"], ours.json()["id"], f"{first.request_id}~2"):
        assert await run_in_db_thread(find_ids, name) == [first.request_id]
    for name in ("theirs-1", theirs.events[0]["id"]):
        assert await run_in_db_thread(find_ids, name) == [second.request_id]
    assert response.json()["id"].startswith("resp_")
    for name in (response.json()["id"], response.headers["x-request-id"]):
        assert await run_in_db_thread(find_ids, name) == [third.request_id]
    assert await run_in_db_thread(find_ids, streamed.events[0]["response"]["id"]) == [
        fourth.request_id
    ]
    assert (second.stream, second.status, second.endpoint) == (True, 200, "chat.completions")
    trace = decode_trace(second.detail)
    assert trace.replica == second.replica != ""
    assert [hop.reason for hop in trace.hops] == [""]
    assert trace.tokens[-1][1] == second.completion_tokens == trace.outputs[0].tokens
    assert trace.outputs[0].steps > 0


async def test_the_engines_record_is_there_though_a_stop_string_ended_the_output_here(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    replica = gateway.scripted(says(tokenizer, "one two three four " * 20))
    original = replica._advance

    def advance(request: Any, sequence: Any) -> Any:
        delta = original(request, sequence)
        if delta.finish_reason:
            delta.flight = FlightRecord(num_steps=7, cold_reason="evicted")
        return delta

    replica._advance = advance  # type: ignore[method-assign]
    async with gateway.serving(replica):
        reply = await gateway.client.chat(stop="three", max_tokens=400)
    assert reply.json()["choices"][0]["finish_reason"] == "stop"
    (entry,) = await written()
    assert entry.finish_reason == "stop"
    assert decode_trace(entry.detail).outputs[0].reason == "stop"


async def test_refusals_are_kept_with_their_reason_but_not_of_strangers(served: Gateway) -> None:
    tenant = served.rows.tenant
    assert (await served.client.chat(top_p=99)).status == 400
    assert (await served.client.chat(model="nowhere")).status == 404
    assert (await served.client.get("/v1/models/nowhere")).status == 404
    assert (await ask(served, {"authorization": "Bearer sk-quire-no"})).status == 401
    await run_in_db_thread(
        lambda: actions.update_tenant(actor=SYSTEM_ACTOR, tenant=tenant, requests_per_minute=1)
    )
    authentication.clear_cache()
    rules.forget()
    assert (await served.client.chat()).status == 200
    assert (await ask(served, {"x-request-id": "late-1"})).status == 429
    entries = await written()
    refused = [entry for entry in entries if entry.request_id.startswith("refused-")]
    assert len(entries) == len(refused) + 1
    assert {(entry.status, entry.model) for entry in refused} == {
        (429, "fake"),
        (400, "fake"),
        (404, "nowhere"),
    }
    by_status = {entry.status: entry for entry in refused}
    assert by_status[429].header_id == "late-1"
    assert by_status[429].code == "rate_limit_exceeded"
    assert "Rate limit" in decode_trace(by_status[429].detail).message
    assert decode_trace(by_status[400].detail).message.startswith("top_p")


async def test_a_flood_of_refusals_takes_few_rows_and_says_how_many_it_was(
    served: Gateway,
) -> None:
    for _ in range(30):
        assert (await served.client.chat(top_p=99)).status == 400
    entries = await written()
    assert len(entries) == MAX_LOGGED_PER_WINDOW + 1
    assert sum(entry.times for entry in entries) == 30


async def test_an_engine_that_is_gone_leaves_a_record_with_its_hops(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    slow = gateway.fake(eos_after=20, token_delay=0.02, die_after=5)
    async with gateway.serving(slow):
        task = asyncio.create_task(gateway.client.chat(max_tokens=50))
        await until(lambda: slow.steps >= 5)
        async with gateway.serving(gateway.fake(eos_after=20)):
            reply = await task
    assert reply.status == 200
    (entry,) = await written()
    trace = decode_trace(entry.detail)
    assert len({hop.replica for hop in trace.hops}) == 2
    assert trace.hops[0].replica == slow.replica_id
    assert any(hop.reason for hop in trace.hops)
    assert entry.replica == trace.hops[-1].replica != slow.replica_id


async def test_contents_are_kept_only_where_the_tenant_wants_it(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    tenant = gateway.rows.tenant
    replica = gateway.scripted(says(tokenizer, "a quiet answer"))
    async with gateway.serving(replica):
        await gateway.client.chat("unwanted words")
        await written()
        assert await run_in_db_thread(RequestContent.objects.count) == 0
        await run_in_db_thread(
            lambda: actions.update_tenant(actor=SYSTEM_ACTOR, tenant=tenant, store_prompts=True)
        )
        authentication.clear_cache()
        await gateway.client.chat("wanted words")
    _, entry = await written()
    content = await run_in_db_thread(RequestContent.objects.get)
    assert content.request_id == entry.request_id
    assert "wanted words" in content.prompt
    assert content.answer.startswith("a quiet answer")
    assert [request.log_prompt for request in replica.received] == [False, True]


@pytest.mark.django_db
def test_records_are_bounded_in_age_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    tenant = actions.create_tenant(actor=SYSTEM_ACTOR, name="Many")
    now = timezone.now()

    def make(number: int, days: float) -> None:
        RequestEntry.objects.create(
            request_id=f"r{number}",
            tenant=tenant,
            endpoint="e",
            status=200,
            started_at=now - timezone.timedelta(days=days),
            duration_ms=1,
        )

    for number in range(8):
        make(number, number * 0.1)
    make(8, 31)
    assert remove_old_requests() == 1
    monkeypatch.setattr("metering.retention.MAX_RETAINED_REQUESTS", 5)
    assert trim_requests(tenant.pk) == 3
    remaining_values_list = RequestEntry.objects.order_by("pk").values_list("request_id", flat=True)
    assert list(remaining_values_list) == ["r0", "r1", "r2", "r3", "r4"]
    assert access_request_entry(SYSTEM_ACTOR, "r0").tenant == tenant


def test_a_pace_has_few_points_and_ends_where_it_ended() -> None:
    pace = TokenTimeline()
    for number in range(1000):
        pace.add(number / 100, 2)
    points = pace.since(0.0)
    assert len(points) <= 65
    assert points[-1] == (9990, 2000)
    assert points == sorted(points)


def test_an_empty_note_reads_as_one() -> None:
    assert decode_trace("") == RequestTrace()
