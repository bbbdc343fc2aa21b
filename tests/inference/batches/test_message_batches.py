"""`/v1/messages/batches`: Anthropic's batches over the machinery of all others."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from inference.api.batches.runner import run_batch
from storage.models import Batch, StoredFile
from tenants.models import ApiKey
from tests.inference.asgi_client import Reply
from tests.inference.batches.conftest import Batches
from tests.inference.conftest import Gateway
from tests.inference.strangers import stranger

URL = "/v1/messages/batches"


def request(number: int, **params: Any) -> dict[str, Any]:
    body = {
        "model": "fake",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": f"number {number}"}],
    }
    return {"custom_id": f"r{number}", "params": body | params}


async def create(gateway: Gateway, requests: list[Any]) -> Reply:
    return await gateway.client.post(URL, {"requests": requests})


async def create_batch(gateway: Gateway, requests: list[Any]) -> dict[str, Any]:
    reply = await create(gateway, requests)
    assert reply.status == 200, reply.body
    return reply.json()


async def get(gateway: Gateway, batch: dict[str, Any]) -> dict[str, Any]:
    import anthropic

    payload = (await gateway.client.get(f"{URL}/{batch['id']}")).json()
    counts = anthropic.types.messages.MessageBatch.model_validate(payload).request_counts
    assert sum(counts.model_dump().values()) == 3
    return payload


async def results(gateway: Gateway, batch: dict[str, Any]) -> dict[str, Any]:
    import anthropic

    reply = await gateway.client.get(
        f"{URL}/{batch['id']}/results", headers={"accept": "application/binary"}
    )
    assert reply.status == 200, reply.body
    lines = [json.loads(line) for line in reply.body.splitlines()]
    for line in lines:
        anthropic.types.messages.MessageBatchIndividualResponse.model_validate(line)
    return {line["custom_id"]: line["result"] for line in lines}


async def test_messages_come_back_a_line_each(batches: Batches, served: Gateway) -> None:
    batch = await create_batch(served, [request(1), request(2), request(3, model="none")])
    assert batches.sent == [("batch", batch["id"])]
    assert (await get(served, batch))["request_counts"]["processing"] == 3
    early = await served.client.get(f"{URL}/{batch['id']}/results")
    assert (early.status, early.json()["type"]) == (400, "error")
    await run_batch(batch["id"], "worker")
    finished = await get(served, batch)
    assert finished["processing_status"] == "ended"
    assert finished["request_counts"]["succeeded"] == 2
    results_by_id = await results(served, finished)
    assert [results_by_id[f"r{number}"]["type"] for number in (1, 2, 3)] == [
        "succeeded",
        "succeeded",
        "errored",
    ]
    assert results_by_id["r1"]["message"]["role"] == "assistant"
    assert results_by_id["r3"]["error"]["error"]["type"] == "not_found_error"
    records = await served.usage()
    assert {record.endpoint for record in records} == {"messages"}


async def test_a_batch_may_be_larger_than_a_request(
    batches: Batches, served: Gateway, settings: Any
) -> None:
    settings.QUIRE = settings.QUIRE.replace(max_body_bytes=4096, max_file_bytes=3 << 20)
    many = [request(number, system='a \\ and "]}" ' * 100) for number in range(1500)]
    batch = await create_batch(served, many)  # on disk, beyond a megabyte
    row = await asyncio.to_thread(Batch.objects.get)
    assert (batch["request_counts"]["processing"], row.total) == (1500, 1500)
    body = {"requests": [request(0), request(1, system="x" * 5000)]}
    refused = await served.client.post(URL, body)
    assert (refused.status, refused.json()["error"]["type"]) == (413, "request_too_large")
    exceeding_response = await served.client.post(
        URL, {"requests": [request(0, system="x" * (5 << 20))]}
    )
    assert exceeding_response.status == 413
    assert await asyncio.to_thread(StoredFile.objects.count) == 1


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"requests": [{"custom_id": "a", "params": {"a": "\\"' + b'\\"' * 50_000, "requests"),
        (b'{"requests": [{"custom_id": "a", "params": {}} {"custom_id"', "JSON"),
        (b'{"requests": [{"custom_id": "a", "params": {}}, 5]}', "requests[1]"),
        (b'{"requests": [{"custom_id": "a", "params": {"a": 1, "a": 2}}]}', "'a' occurs twice"),
        (b'{"requests": [{"custom_id": "a"}]}', "requests[0].params"),
        (b'{"requests": [{"custom_id": "a", "params": {}}], "model": "m"}', "model"),
        (b'{"requests": [[[[]]]]}', "requests[0]"),
    ],
)
async def test_bodies_that_are_no_batch(served: Gateway, body: bytes, text: str) -> None:
    reply = await served.client.request("POST", URL, body)
    assert reply.status == 400
    assert text in reply.json()["error"]["message"]
    assert await asyncio.to_thread(StoredFile.objects.count) == 0


async def test_a_cancelled_batch_says_what_never_ran(batches: Batches, served: Gateway) -> None:
    batch = await create_batch(served, [request(number) for number in range(3)])
    reply = await served.client.post(f"{URL}/{batch['id']}/cancel", {})
    assert reply.json()["processing_status"] == "canceling"
    await run_batch(batch["id"], "worker")
    finished = await get(served, batch)
    assert (finished["processing_status"], finished["request_counts"]["canceled"]) == ("ended", 3)
    results_by_id = await results(served, finished)
    assert [result["type"] for result in results_by_id.values()] == ["canceled"] * 3
    again = await served.client.post(f"{URL}/{batch['id']}/cancel", {})
    assert again.json() == finished


async def test_one_whose_time_is_over_says_so(batches: Batches, served: Gateway) -> None:
    batch = await create_batch(served, [request(number) for number in range(3)])
    past = timezone.now() - timedelta(seconds=1)
    await asyncio.to_thread(Batch.objects.update, expires_at=past)
    await run_batch(batch["id"], "worker")
    finished = await get(served, batch)
    results_by_id = await results(served, finished)
    kinds = [result["type"] for result in results_by_id.values()]
    assert len(kinds) == 3
    assert finished["request_counts"]["expired"] == kinds.count("expired") > 0


async def test_a_revoked_key_errs_what_is_left(batches: Batches, served: Gateway) -> None:
    batch = await create_batch(served, [request(number) for number in range(3)])
    await asyncio.to_thread(ApiKey.objects.update, revoked_at=timezone.now())
    await run_batch(batch["id"], "worker")
    row = await asyncio.to_thread(Batch.objects.get)
    assert (row.status, row.total) == ("failed", 3)


async def test_a_list_comes_in_pages_and_apart(batches: Batches, served: Gateway) -> None:
    ids = [(await create_batch(served, [request(1)]))["id"] for _ in range(4)][::-1]

    async def page(query: str) -> tuple[list[str], bool]:
        listed = (await served.client.get(f"{URL}?limit=2{query}")).json()
        return [row["id"] for row in listed["data"]], listed["has_more"]

    assert await page("") == (ids[:2], True)
    assert await page(f"&after_id={ids[1]}") == (ids[2:], False)
    assert await page(f"&before_id={ids[2]}") == (ids[:2], False)
    assert await page(f"&before_id={ids[3]}") == (ids[1:3], True)
    assert (await served.client.get("/v1/batches")).json()["data"] == []


async def test_deleting_leaves_nothing(batches: Batches, served: Gateway) -> None:
    batch = await create_batch(served, [request(number) for number in range(3)])
    early = await served.client.request("DELETE", f"{URL}/{batch['id']}")
    assert early.status == 409
    await run_batch(batch["id"], "worker")
    gone = await served.client.request("DELETE", f"{URL}/{batch['id']}")
    assert gone.json() == {"id": batch["id"], "type": "message_batch_deleted"}
    counts = await asyncio.to_thread(lambda: (Batch.objects.count(), StoredFile.objects.count()))
    assert counts == (0, 0)


async def test_nobody_else_sees_it(batches: Batches, served: Gateway) -> None:
    batch = await create_batch(served, [request(number) for number in range(3)])
    other = await asyncio.to_thread(stranger)
    path = f"{URL}/{batch['id']}"
    for method, where in (
        ("GET", path),
        ("DELETE", path),
        ("POST", f"{path}/cancel"),
        ("GET", f"{path}/results"),
    ):
        reply = await other.request(method, where, {} if method == "POST" else None)
        assert (reply.status, reply.json()["error"]["type"]) == (404, "not_found_error"), where
    assert (await other.get(URL)).json()["data"] == []
    baseline_batch = await batches.create([{"custom_id": "1"}])
    assert (await served.client.get(f"{URL}/{baseline_batch['id']}")).status == 404


@pytest.mark.parametrize(
    ("requests", "location"),
    [
        ([], "requests"),
        ([request(1), request(1)], "requests.1.custom_id"),
        ([request(1, stream=True)], "requests.0.params.stream"),
        ([{"custom_id": "a b", "params": {}}], "custom_id"),
        ([{"custom_id": "a"}], "params"),
    ],
)
async def test_what_can_only_fail_is_refused_at_once(
    batches: Batches, served: Gateway, requests: list[Any], location: str
) -> None:
    reply = await create(served, requests)
    assert (reply.status, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    assert location in reply.json()["error"]["message"]
    assert await asyncio.to_thread(StoredFile.objects.count) == 0
