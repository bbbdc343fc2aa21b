"""Background responses as streams: told while they are made, resumed, gone on with by others."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from engine.text.tokenizer import Tokenizer
from inference import work as queue
from inference.api.responses.event_store import KEEP_ENDED_S, ResponseEventStore
from inference.api.responses.output_items import DeliveredItemFilter, ResumeMismatch
from inference.api.responses.runner import run_response
from inference.parsers.state_machine import Part
from storage.models import StoredResponse
from tests.inference.asgi_client import parse_events
from tests.inference.conftest import Gateway, until
from tests.inference.scripted import byte_by_byte, says
from tests.inference.strangers import stranger
from tests.inference.test_responses import CALL, EVENT, URL, WEATHER

BODY = {"model": "fake", "input": "hello", "background": True, "stream": True}


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids that workers were told of."""
    job_ids: list[str] = []
    monkeypatch.setattr(queue, "send_job", lambda kind, public_id: job_ids.append(public_id))
    monkeypatch.setattr("inference.api.responses.runner.EVENT_FLUSH_S", 0.01)
    return job_ids


async def begin(gateway: Gateway, sent: list[str], **fields: Any) -> tuple[str, asyncio.Task[Any]]:
    """The response's id and its stream, under way."""
    stream = asyncio.create_task(gateway.client.post(URL, BODY | fields))
    await until(lambda: sent)
    return sent[-1], stream


async def events_of(gateway: Gateway, public_id: str, query: str = "") -> list[dict[str, Any]]:
    reply = await gateway.client.get(f"{URL}/{public_id}?stream=true{query}")
    assert reply.headers["content-type"].startswith("text/event-stream")
    return parse_events(reply.body)


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")


async def test_it_waits_for_its_tenants_turn_to_be_rendered(
    gateway: Gateway, sent: list[str], rendered_for: set[str]
) -> None:
    async with gateway.serving(gateway.fake(eos_after=5)):
        response_id, stream = await begin(gateway, sent)
        rendered_for.clear()
        await run_response(response_id, "worker")
        await stream
    assert rendered_for == {gateway.rows.tenant.slug}


async def test_it_is_told_while_it_is_made(
    gateway: Gateway, tokenizer: Tokenizer, sent: list[str]
) -> None:
    script = byte_by_byte(tokenizer, f"Let me see.\n{CALL}")
    async with gateway.serving(gateway.scripted(script, token_delay=0.002)):
        response_id, stream = await begin(gateway, sent, tools=[WEATHER])
        await run_response(response_id, "worker")
        raw = parse_events((await asyncio.wait_for(stream, 60)).body)
    events = [EVENT.validate_python(event) for event in raw]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [item.type for item in events[-1].response.output] == ["message", "function_call"]
    stored = (await gateway.client.get(f"{URL}/{response_id}")).json()
    assert raw[-1]["response"] == stored
    assert stored["status"] == "completed"
    assert 0 < await gateway.redis.ttl(f"{gateway.prefix}:response:{response_id}") <= KEEP_ENDED_S
    # From wherever a client was, the rest is the same.
    assert await events_of(gateway, response_id) == raw
    for number in (0, 4, len(raw) - 2, len(raw) - 1):
        assert (
            await events_of(gateway, response_id, f"&starting_after={number}") == raw[number + 1 :]
        )


async def test_another_worker_goes_on_where_the_first_one_died(
    gateway: Gateway, sent: list[str]
) -> None:
    async with gateway.serving(gateway.fake(token_delay=0.05)):  # it must not end before it dies
        response_id, stream = await begin(gateway, sent, max_output_tokens=60)
        retained_store = ResponseEventStore(response_id)
        first = asyncio.create_task(run_response(response_id, "first"))
        while len(await retained_store.read_after(-1)) < 10:  # noqa: ASYNC110 - written by another process
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        started_count = len(await retained_store.read_after(-1))
        await run_response(response_id, "second")
        events = parse_events((await asyncio.wait_for(stream, 60)).body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert len(events) > started_count
    final = events[-1]["response"]
    assert final["status"] == "incomplete"
    (item,) = final["output"]
    assert text_of(events) == item["content"][0]["text"]
    assert len(item["content"][0]["text"]) == final["usage"]["output_tokens"] == 60
    assert [e["type"] for e in events].count("response.output_item.added") == 1


async def test_a_worker_that_slept_through_its_lease_spoils_nothing(
    gateway: Gateway, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.api.responses.runner.CANCEL_POLL_INTERVAL_S", 60.0)
    async with gateway.serving(gateway.fake(token_delay=0.05)):
        response_id, stream = await begin(gateway, sent, max_output_tokens=60)
        retained_store = ResponseEventStore(response_id)
        first = asyncio.create_task(run_response(response_id, "first"))
        while len(await retained_store.read_after(-1)) < 10:  # noqa: ASYNC110 - written by another process
            await asyncio.sleep(0.01)
        # It is taken for dead: another has the lease, and tells on.
        past = timezone.now() - timedelta(seconds=1)
        await StoredResponse.objects.aupdate(lease_owner="", lease_until=past)
        await asyncio.gather(run_response(response_id, "second"), first, return_exceptions=True)
        events = parse_events((await asyncio.wait_for(stream, 60)).body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    final = (await gateway.client.get(f"{URL}/{response_id}")).json()
    assert final["status"] == "incomplete"
    assert text_of(events) == final["output"][0]["content"][0]["text"]
    assert len(text_of(events)) == 60


async def test_an_answer_that_turns_out_another_fails(
    gateway: Gateway, tokenizer: Tokenizer, sent: list[str]
) -> None:
    async with gateway.serving(gateway.scripted(says(tokenizer, "a fox"))):
        response_id, stream = await begin(gateway, sent)
        retained_store = ResponseEventStore(response_id, "first")
        await retained_store.acquire()
        item = {"type": "message", "status": "in_progress", "content": [], "id": "msg_1"}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        await retained_store.add(
            [
                {"type": "response.output_item.added", "output_index": 0, "item": item},
                {"type": "response.content_part.added", "output_index": 0, "part": part},
                {"type": "response.output_text.delta", "output_index": 0, "delta": "a dog"},
            ]
        )
        await run_response(response_id, "second")
        last = parse_events((await asyncio.wait_for(stream, 60)).body)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == "server_error"


async def test_once_the_events_are_gone_there_is_the_end(
    gateway: Gateway, tokenizer: Tokenizer, sent: list[str]
) -> None:
    async with gateway.serving(gateway.scripted(says(tokenizer, "fox"))):
        response_id, stream = await begin(gateway, sent)
        await run_response(response_id, "worker")
        await asyncio.wait_for(stream, 60)
    await ResponseEventStore(response_id).forget()
    (event,) = await events_of(gateway, response_id, "&starting_after=7")
    assert (event["type"], event["sequence_number"]) == ("response.completed", 8)


async def test_a_cancelled_one_ends_its_stream(gateway: Gateway, sent: list[str]) -> None:
    response_id, stream = await begin(gateway, sent)
    assert (await gateway.client.post(f"{URL}/{response_id}/cancel")).status == 200
    await run_response(response_id, "worker")  # which has nothing to do
    kinds = [event["type"] for event in parse_events((await asyncio.wait_for(stream, 60)).body)]
    assert kinds == ["response.created", "response.queued"]


async def test_fault_23_a_strangers_stream_is_404(
    gateway: Gateway, tokenizer: Tokenizer, sent: list[str]
) -> None:
    async with gateway.serving(gateway.scripted(says(tokenizer, "fox"))):
        response_id, stream = await begin(gateway, sent)
        other = await asyncio.to_thread(stranger)
        for query in ("", "?stream=true", "?stream=true&starting_after=0"):
            assert (await other.get(f"{URL}/{response_id}{query}")).status == 404
        await run_response(response_id, "worker")
        await asyncio.wait_for(stream, 60)
        assert (await gateway.client.request("DELETE", f"{URL}/{response_id}")).status == 200
    assert await ResponseEventStore(response_id).read_after(-1) == []


async def test_what_is_no_stream_is_refused(gateway: Gateway, sent: list[str]) -> None:
    reply = await gateway.client.post(URL, {**BODY, "stream": False})
    response_id = reply.json()["id"]
    for query, param in (
        ("stream=true", "stream"),
        ("stream=1", "stream"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("stream=true&starting_after=x", "starting_after"),
    ):
        refused = await gateway.client.get(f"{URL}/{response_id}?{query}")
        assert (refused.status, refused.error["param"]) == (400, param)


def test_what_was_told_is_passed_over_wherever_it_was_cut() -> None:
    full = [
        Part("reasoning", "hm, so"),
        Part("content", "Let me see."),
        Part("call", "f", 0, "id"),
        Part("arguments", '{"a": 1}', 0),
        Part("content", "Done."),
    ]
    items = [
        {"type": "reasoning", "content": [{"text": "hm, so"}]},
        {"type": "message", "content": [{"text": "Let me"}]},
    ]
    rest = DeliveredItemFilter(items).skip_delivered(full)
    assert (rest[0].kind, rest[0].text) == ("content", " see.")
    assert rest[1:] == full[2:]
    items[1]["content"][0]["text"] = "Let me see."
    items.append({"type": "function_call", "name": "f", "arguments": '{"a"'})
    assert [part.text for part in DeliveredItemFilter(items).skip_delivered(full)] == [
        ": 1}",
        "Done.",
    ]
    items[2]["name"] = "g"
    with pytest.raises(ResumeMismatch):
        DeliveredItemFilter(items).skip_delivered(full)
