"""FAULT 56: what can't be kept right now is told as such, and done when it can be."""

from __future__ import annotations

import errno
import json
from typing import Any

import pytest
from django.db import OperationalError

from engine.contract.errors import EngineUnavailable
from inference.errors import error_response
from inference.responses import runner
from inference.work import queue
from tests.inference.conftest import Gateway
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
    served: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "send", lambda kind, public_id: None)
    body = {"model": "fake", "input": "hello", "background": True}
    made = (await served.client.post(URL, body)).json()
    update, full = runner.update_response, [True]

    def updated(**given: Any) -> bool:
        if full and given["status"] != "in_progress":
            raise OperationalError("database or disk is full")
        return update(**given)

    monkeypatch.setattr(runner, "update_response", updated)
    with pytest.raises(OperationalError):
        await runner.run_response(made["id"], "worker")
    full.clear()
    await runner.run_response(made["id"], "worker")
    found = (await served.client.get(f"{URL}/{made['id']}")).json()
    assert found["status"] in ("completed", "incomplete")


async def test_a_background_response_is_made_again_when_its_replicas_were_away_for_long(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait of a request that was placed ends before a model's slowest start."""
    monkeypatch.setattr(queue, "send", lambda kind, public_id: None)
    collect, tries = runner._Run._collect, []

    async def collected(self: Any, *given: Any) -> bool:
        tries.append(self)
        if len(tries) == 1:
            raise EngineUnavailable("The model is loading (29%). Waited 30 s.")
        return await collect(self, *given)

    monkeypatch.setattr(runner._Run, "_collect", collected)
    async with gateway.serving(gateway.fake()):
        made = (
            await gateway.client.post(URL, {"model": "fake", "input": "hello", "background": True})
        ).json()
        await runner.run_response(made["id"], "worker")
        found = (await gateway.client.get(f"{URL}/{made['id']}")).json()
    assert len(tries) == 2
    assert found["status"] in ("completed", "incomplete")
