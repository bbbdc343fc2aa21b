"""Batches in the test's own loop: the worker's part is called by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from inference import work as queue
from inference.api.batches.runner import run_batch
from tests.inference.conftest import Gateway
from tests.inference.forms import upload

CHAT = "/v1/chat/completions"


def request_line(number: int, **changes: Any) -> dict[str, Any]:
    """One request of a batch."""
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": f"number {number}"}],
        "max_tokens": 5,
    }
    line = {"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": body}
    line["body"] = body | changes.pop("body", {})
    return line | changes


def as_lines(lines: list[Any]) -> bytes:
    """JSON lines."""
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@dataclass
class Batches:
    """What tests do with batches."""

    gateway: Gateway
    sent: list[tuple[str, str]]

    async def create(self, lines: list[Any] | bytes, **fields: Any) -> dict[str, Any]:
        """Upload the lines and make a batch of them."""
        data = lines if isinstance(lines, bytes) else as_lines(lines)
        file_id = (await upload(self.gateway.client, data)).json()["id"]
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        reply = await self.gateway.client.post("/v1/batches", body | fields)
        assert reply.status == 200, reply.body
        return reply.json()

    async def get(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch as it is."""
        return (await self.gateway.client.get(f"/v1/batches/{batch['id']}")).json()

    async def run(self, batch: dict[str, Any], owner: str = "worker") -> dict[str, Any]:
        """Do what a worker does, to the end."""
        await run_batch(batch["id"], owner)
        return await self.get(batch)

    async def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        """A result file's lines."""
        if file_id is None:
            return []
        content = await self.gateway.client.get(f"/v1/files/{file_id}/content")
        return [json.loads(line) for line in content.body.splitlines()]


@pytest.fixture
def batches(
    gateway: Gateway, tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> Batches:
    """The gateway with a folder for files; messages to workers are noted and not sent."""
    settings.QUIRE = settings.QUIRE.replace(storage_dir=tmp_path)
    sent: list[tuple[str, str]] = []
    monkeypatch.setattr(queue, "send_job", lambda kind, public_id: sent.append((kind, public_id)))
    return Batches(gateway, sent)
