"""FAULT 56: what can't be kept right now is told as such, and done when it can be."""

from __future__ import annotations

import asyncio
import errno
import functools
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError

from engine.contract.errors import EngineUnavailable
from inference import work as queue
from inference.api.batches.files import ResultJournal
from inference.api.responses import runner
from inference.engine_client.client import get_engine_client
from inference.errors import error_response
from inference.request.context import RequestContext
from tests.inference.asgi_client import chat_body
from tests.inference.conftest import Gateway, until
from tests.inference.test_responses import URL


@pytest.mark.parametrize(
    "trouble",
    [
        OperationalError("database or disk is full"),
        OSError(errno.ENOSPC, "No space left on device"),
    ],
)
def test_fault_56_a_full_disk_is_told_as_something_that_passes(trouble: Exception) -> None:
    answer = error_response(trouble, "r")
    assert answer.status_code == 503
    assert json.loads(answer.content)["error"]["code"] == "storage_unavailable"
    assert answer["Retry-After"] == "2"
    assert error_response(OSError(errno.EIO, "bad"), "r").status_code == 500


async def test_fault_56_a_background_response_outlives_a_disk_that_is_full_for_a_while(
    served: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(queue, "send_job", lambda kind, public_id: None)
    body = {"model": "fake", "input": "hello", "background": True}
    payload = (await served.client.post(URL, body)).json()
    update, tries = runner.update_response, []

    def updated(**fields: Any) -> bool:
        if fields["status"] != "in_progress":
            tries.append(fields)
            if len(tries) == 1:
                raise OperationalError("database or disk is full")
        return update(**fields)

    monkeypatch.setattr(runner, "update_response", updated)
    await runner.run_response(payload["id"], "worker")
    assert len(tries) == 2
    assert "ResponseRun._update is retried" in caplog.text
    assert "hello" not in caplog.text
    response = (await served.client.get(f"{URL}/{payload['id']}")).json()
    assert response["status"] in ("completed", "incomplete")


async def test_a_background_response_is_made_again_when_its_replicas_were_away_for_long(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait of a request that was placed ends before a model's slowest start."""
    monkeypatch.setattr(queue, "send_job", lambda kind, public_id: None)
    collect, tries = runner.ResponseRun._collect, []

    async def collected(self: Any, *arguments: Any) -> bool:
        tries.append(self)
        if len(tries) == 1:
            raise EngineUnavailable("The model is loading (29%). Waited 30 s.")
        return await collect(self, *arguments)

    monkeypatch.setattr(runner.ResponseRun, "_collect", collected)
    async with gateway.serving(gateway.fake()):
        payload = (
            await gateway.client.post(URL, {"model": "fake", "input": "hello", "background": True})
        ).json()
        await runner.run_response(payload["id"], "worker")
        response = (await gateway.client.get(f"{URL}/{payload['id']}")).json()
    assert len(tries) == 2
    assert response["status"] in ("completed", "incomplete")


def test_fault_56_of_a_line_that_the_disk_did_not_take_nothing_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = ResultJournal(tmp_path / "j", lambda line: None)
    journal.append({"custom_id": "a"})
    write = os.write

    def full(handle: int, data: Any) -> int:
        write(handle, bytes(data)[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            journal.append({"custom_id": "b"})
    journal.append({"custom_id": "b"})
    journal.close()
    lines = (tmp_path / "j").read_text().splitlines()
    assert [json.loads(line)["custom_id"] for line in lines] == ["a", "b"]


@pytest.mark.parametrize("anew", [True, False])
async def test_what_a_worker_makes_anew_costs_nothing_unless_it_ends(
    gateway: Gateway, anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway.serving(gateway.fake(token_delay=0.01)):
        of_worker = functools.partial(RequestContext, bill_partial=not anew)
        monkeypatch.setattr("inference.web.views.RequestContext", of_worker)
        body = chat_body(max_tokens=500)
        exchange = gateway.client.open("POST", "/v1/chat/completions", body)
        client = get_engine_client()
        await until(lambda: client.flights and client.flights[0].ran)
        await exchange.leave()
        assert (await gateway.client.chat(max_tokens=3)).status == 200
        async with asyncio.timeout(60):
            for _ in itertools.count():
                if len(usage := await gateway.usage()) == 2:
                    break
                await asyncio.sleep(0.02)
    billed = sorted((record.status, record.completion_tokens > 0) for record in usage)
    assert billed == [(200, True), (499, not anew)]
