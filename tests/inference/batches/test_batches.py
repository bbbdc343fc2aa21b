"""Batches from their making to their end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from inference.api.batches import files as lines
from inference.api.batches import runner
from inference.engine_client.queue_limit import Load
from storage.blobs import files_dir
from storage.models import Batch, StoredFile
from tenants import actions, authentication
from tenants.actors import SYSTEM_ACTOR
from tests.inference.batches.conftest import CHAT, Batches, as_lines, request_line
from tests.inference.conftest import generated_tokens, until
from tests.inference.forms import upload
from tests.inference.strangers import stranger


async def test_every_request_has_its_answer(batches: Batches) -> None:
    lines = [request_line(number) for number in range(20)]
    lines[3]["body"]["temperature"] = -1
    async with batches.gateway.serving(batches.gateway.fake()):
        batch = await batches.create(lines, metadata={"who": "me"})
        assert (batch["status"], batch["metadata"]) == ("validating", {"who": "me"})
        assert batches.sent == [("batch", batch["id"])]
        done = await batches.run(batch)
    assert done["status"] == "completed"
    assert done["request_counts"] == {"total": 20, "completed": 19, "failed": 1}
    output = await batches.lines(done["output_file_id"])
    assert {line["custom_id"] for line in output} == {f"r{n}" for n in range(20) if n != 3}
    for line in output:
        assert (line["response"]["status_code"], line["error"]) == (200, None)
        assert line["response"]["body"]["usage"]["completion_tokens"] == 5
    (error,) = await batches.lines(done["error_file_id"])
    assert (error["custom_id"], error["response"]["status_code"]) == ("r3", 400)
    assert error["response"]["body"]["error"]["param"] == "temperature"
    assert done["usage"]["output_tokens"] == 95
    assert done["created_at"] <= done["in_progress_at"] <= done["completed_at"]
    assert len(await batches.gateway.usage()) == 19


async def test_answers_are_those_of_the_endpoint_and_run_behind_others(batches: Batches) -> None:
    gateway = batches.gateway
    async with gateway.serving(gateway.fake()) as replica:
        isolated_payload = (await gateway.client.post(CHAT, request_line(1)["body"])).json()
        done = await batches.run(await batches.create([request_line(1)]))
        (line,) = await batches.lines(done["output_file_id"])
        assert line["response"]["body"]["choices"] == isolated_payload["choices"]
        assert [request.priority for request in replica.received] == [0, 100]
        assert replica.received[0].cache_namespace == replica.received[1].cache_namespace


async def test_completions_run_in_batches_too(batches: Batches) -> None:
    line = {
        "custom_id": "one",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "fake", "prompt": [10, 11], "max_tokens": 3, "return_token_ids": True},
    }
    async with batches.gateway.serving(batches.gateway.fake()):
        done = await batches.run(await batches.create([line], endpoint="/v1/completions"))
    (answer,) = await batches.lines(done["output_file_id"])
    assert answer["response"]["body"]["choices"][0]["token_ids"] == generated_tokens([10, 11], 3)


async def test_a_batch_waits_for_its_tenants_turn_to_be_rendered(
    batches: Batches, rendered_for: set[str]
) -> None:
    async with batches.gateway.serving(batches.gateway.fake()):
        await batches.run(await batches.create([request_line(1)]))
    assert rendered_for == {batches.gateway.rows.tenant.slug}


BAD_LINES: list[tuple[Any, str | None]] = [
    (b"{", None),
    (b"[1]", None),
    (b'{"a": 1, "a": 2}', "a"),
    (b"[" * 10_000, None),
    (as_lines([request_line(1) | {"custom_id": 5}]), "custom_id"),
    (as_lines([request_line(1) | {"method": "GET"}]), "method"),
    (as_lines([request_line(1) | {"url": "/v1/files"}]), "url"),
    (as_lines([request_line(1) | {"body": []}]), "body"),
    (as_lines([request_line(1) | {"tenant": "x"}]), "tenant"),
    (as_lines([request_line(1, body={"stream": True})]), "body.stream"),
    (as_lines([request_line(1), request_line(1)]), "custom_id"),
    (b"\n\n", None),
]


@pytest.mark.parametrize(("data", "param"), BAD_LINES)
async def test_fault_01_a_bad_file_fails_the_batch_and_runs_nothing(
    batches: Batches, data: bytes, param: str | None
) -> None:
    failed = await batches.run(await batches.create(data))
    assert failed["status"] == "failed"
    (error,) = failed["errors"]["data"]
    assert error["param"] == param
    assert error["message"]
    assert (failed["output_file_id"], failed["error_file_id"]) == (None, None)


async def test_fault_36_a_line_without_an_end_is_not_read_to_its_end(
    batches: Batches, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.QUIRE = settings.QUIRE.replace(max_body_bytes=1000)
    sizes: list[int] = []

    def parse(raw: bytes) -> Any:
        sizes.append(len(raw))
        return lines.parse_line(raw)

    monkeypatch.setattr(
        "inference.api.batches.files._check", lambda raw, *_: parse(raw)["custom_id"]
    )
    data = as_lines([request_line(1)]) + b" " * 100_000 + as_lines([request_line(2)])
    path = Path(str(settings.QUIRE.files_dir)).with_name("huge.jsonl")
    path.write_bytes(data)
    with path.open("rb") as file:
        requests, errors = lines.index_lines(file, CHAT)
    assert [line.custom_id for line in requests] == ["r1"]
    assert [error["line"] for error in errors] == [2]
    assert max(sizes) <= 1002


async def test_a_file_with_wrong_lines_runs_none_and_names_the_first_fifty(
    batches: Batches,
) -> None:
    invalid = [request_line(number) | {"url": "/metrics"} for number in range(60)]
    failed = await batches.run(await batches.create([request_line(99), *invalid]))
    assert (failed["status"], failed["output_file_id"]) == ("failed", None)
    assert [error["line"] for error in failed["errors"]["data"]] == list(range(2, 52))


async def test_one_that_is_cancelled_before_it_begins_runs_nothing(batches: Batches) -> None:
    gateway = batches.gateway
    async with gateway.serving(gateway.fake()) as replica:
        batch = await batches.create([request_line(n) for n in range(3)])
        await gateway.client.post(f"/v1/batches/{batch['id']}/cancel")
        done = await batches.run(batch)
    assert (done["status"], done["output_file_id"]) == ("cancelled", None)
    assert done["request_counts"] == {"total": 3, "completed": 0, "failed": 0}
    assert replica.received == []


async def test_a_batch_has_only_so_many_requests(batches: Batches, settings: Any) -> None:
    settings.QUIRE = settings.QUIRE.replace(max_batch_requests=2)
    failed = await batches.run(await batches.create([request_line(n) for n in range(3)]))
    assert "at most 2" in failed["errors"]["data"][0]["message"]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"endpoint": "/v1/files"}, 400, "endpoint"),
        ({"completion_window": "1y"}, 400, "completion_window"),
        ({"completion_window": "15d"}, 400, "completion_window"),
        ({"completion_window": "0h"}, 400, "completion_window"),
        ({"input_file_id": "file-" + "0" * 32}, 404, "input_file_id"),
        ({"input_file_id": "../../x"}, 404, "input_file_id"),
        ({"metadata": {"a": 1}}, 400, "metadata.a"),
        ({"metadata": {f"k{n}": "x" for n in range(17)}}, 400, "metadata"),
        ({"priority": -5}, 400, "priority"),
    ],
)
async def test_what_is_no_batch_is_refused(
    batches: Batches, fields: dict[str, Any], status: int, param: str | None
) -> None:
    file_id = (await upload(batches.gateway.client, b"{}\n")).json()["id"]
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"} | fields
    reply = await batches.gateway.client.post("/v1/batches", body)
    assert (reply.status, reply.error["param"]) == (status, param), reply.body
    assert batches.sent == []


async def test_fault_23_a_strangers_batch_is_404_on_every_verb(batches: Batches) -> None:
    batch = await batches.create([request_line(1)])
    other = await asyncio.to_thread(stranger)
    for method, path in (
        ("GET", f"/v1/batches/{batch['id']}"),
        ("POST", f"/v1/batches/{batch['id']}/cancel"),
        ("GET", f"/v1/batches?after={batch['id']}"),
    ):
        assert (await other.request(method, path)).status == 404, path
    body = {"input_file_id": batch["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
    assert (await other.post("/v1/batches", body)).status == 404
    assert (await other.get("/v1/batches")).json()["data"] == []
    assert (await batches.get(batch))["status"] == "validating"


async def test_batches_are_listed_in_pages(batches: Batches) -> None:
    ids = [(await batches.create([request_line(1)]))["id"] for _ in range(3)]
    first = (await batches.gateway.client.get("/v1/batches?limit=2")).json()
    assert [item["id"] for item in first["data"]] == [ids[2], ids[1]]
    assert first["has_more"]
    rest = (await batches.gateway.client.get(f"/v1/batches?limit=2&after={ids[1]}")).json()
    assert ([item["id"] for item in rest["data"]], rest["has_more"]) == ([ids[0]], False)


async def test_a_cancelled_batch_keeps_what_is_done(batches: Batches, settings: Any) -> None:
    settings.QUIRE = settings.QUIRE.replace(batch_concurrency=1)
    requests = [request_line(n, body={"max_tokens": 3}) for n in range(3)]
    requests.append(request_line(9, body={"max_tokens": 2000}))
    gateway = batches.gateway
    async with gateway.serving(gateway.fake(token_delay=0.01)) as replica:
        batch = await batches.create(requests)
        running = asyncio.create_task(batches.run(batch))
        await until(lambda: len(replica.received) == 4)
        answer = await gateway.client.post(f"/v1/batches/{batch['id']}/cancel")
        assert answer.json()["status"] == "cancelling"
        assert (await gateway.client.post(f"/v1/batches/{batch['id']}/cancel")).status == 200
        done = await asyncio.wait_for(running, 60)
        await until(lambda: replica.aborted)  # fault 25: nobody wants the rest
    assert done["status"] == "cancelled"
    assert done["request_counts"] == {"total": 4, "completed": 3, "failed": 0}
    output = await batches.lines(done["output_file_id"])
    assert [line["custom_id"] for line in output] == ["r0", "r1", "r2"]
    refused = await gateway.client.post(f"/v1/batches/{batch['id']}/cancel")
    assert (refused.status, refused.error["code"]) == (409, "conflict")


async def test_at_the_end_of_its_window_a_batch_expires(batches: Batches) -> None:
    gateway = batches.gateway
    async with gateway.serving(gateway.fake()):
        batch = await batches.create([request_line(n) for n in range(3)])
        await Batch.objects.aupdate(expires_at=timezone.now() - timedelta(seconds=1))
        done = await batches.run(batch)
    assert done["status"] == "expired"
    errors = await batches.lines(done["error_file_id"])
    assert {line["custom_id"] for line in errors} == {"r0", "r1", "r2"}
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}


async def test_its_files_expire_when_it_was_asked_for(batches: Batches) -> None:
    gateway = batches.gateway
    async with gateway.serving(gateway.fake()):
        batch = await batches.create(
            [request_line(1)], output_expires_after={"anchor": "created_at", "seconds": 3600}
        )
        done = await batches.run(batch)
    path = f"/v1/files/{done['output_file_id']}"
    file = (await gateway.client.get(path)).json()
    assert 3590 <= file["expires_at"] - file["created_at"] <= 3610
    past = timezone.now() - timedelta(seconds=1)
    await StoredFile.objects.filter(public_id=done["output_file_id"]).aupdate(expires_at=past)
    assert (await gateway.client.get(f"{path}/content")).status == 404
    assert (await batches.get(batch))["status"] == "completed"


async def test_a_killed_workers_successor_neither_repeats_nor_loses_a_request(
    batches: Batches, settings: Any
) -> None:
    settings.QUIRE = settings.QUIRE.replace(batch_concurrency=3, lease_seconds=1)
    gateway = batches.gateway
    async with gateway.serving(gateway.fake(token_delay=0.002)) as replica:
        batch = await batches.create([request_line(n) for n in range(30)])
        first = asyncio.create_task(batches.run(batch, "first"))
        await until(lambda: len(replica.received) >= 12)
        assert await asyncio.wait_for(batches.run(batch, "second"), 60)  # leaves it alone
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        done = await batches.run(batch, "third")
        assert len(replica.received) <= 30 + 3  # those that were under way ran again
    assert done["status"] == "completed"
    output = await batches.lines(done["output_file_id"])
    assert sorted(line["custom_id"] for line in output) == sorted(f"r{n}" for n in range(30))


async def test_a_lease_that_ran_out_is_anothers(batches: Batches, settings: Any) -> None:
    batch = await batches.create([request_line(1)])
    past, future = timezone.now() - timedelta(seconds=1), timezone.now() + timedelta(seconds=60)
    await Batch.objects.aupdate(lease_owner="dead", lease_until=future)
    async with batches.gateway.serving(batches.gateway.fake()):
        assert (await batches.run(batch))["status"] == "validating"
        await Batch.objects.aupdate(lease_until=past)
        assert (await batches.run(batch))["status"] == "completed"


async def test_fault_22_a_revoked_key_ends_its_batch(batches: Batches) -> None:
    batch = await batches.create([request_line(1)])
    key = batches.gateway.rows.key
    await asyncio.to_thread(lambda: actions.revoke_key(actor=SYSTEM_ACTOR, key=key))
    async with batches.gateway.serving(batches.gateway.fake()) as replica:
        from inference.api.batches.runner import run_batch

        await run_batch(batch["id"], "worker")
        assert replica.received == []
    row = await Batch.objects.aget()
    assert (row.status, row.errors[0]["code"]) == ("failed", "invalid_api_key")
    authentication.clear_cache()


async def test_requests_over_the_limit_wait_for_their_minute(batches: Batches) -> None:
    gateway = batches.gateway
    tenant = gateway.rows.tenant
    await asyncio.to_thread(
        lambda: actions.update_tenant(actor=SYSTEM_ACTOR, tenant=tenant, requests_per_minute=240)
    )
    async with gateway.serving(gateway.fake()):
        for _ in range(238):
            await gateway.client.post(
                "/v1/completions", {"model": "fake", "prompt": "x", "max_tokens": 1}
            )
        done = await batches.run(await batches.create([request_line(n) for n in range(5)]))
    assert done["request_counts"] == {"total": 5, "completed": 5, "failed": 0}


async def test_a_queue_that_is_full_for_long_is_waited_for(
    batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch is refused first; its day is hardly over when others have had a busy minute."""
    probes = itertools.count()
    loads = {True: Load(running=1, waiting=5000, per_second=9.0), False: Load()}
    monkeypatch.setattr(
        Load, "of", lambda replicas: loads[next(probes) < 10 * runner.MAX_SERVER_ERRORS]
    )
    monkeypatch.setattr(runner, "MAX_PAUSE_S", 0.01)
    async with batches.gateway.serving(batches.gateway.fake()):
        done = await batches.run(await batches.create([request_line(1)]))
    assert next(probes) > 10 * runner.MAX_SERVER_ERRORS
    assert done["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


async def test_the_input_file_may_be_gone(batches: Batches) -> None:
    batch = await batches.create([request_line(1)])
    path = f"/v1/files/{batch['input_file_id']}"
    refused = await batches.gateway.client.request("DELETE", path)
    assert (refused.status, refused.error["code"]) == (409, "conflict")
    for blob in files_dir().glob("*/*"):
        blob.unlink()
    failed = await batches.run(batch)
    assert failed["errors"]["data"][0]["code"] == "file_not_found"
    assert (await batches.gateway.client.request("DELETE", path)).status == 200
