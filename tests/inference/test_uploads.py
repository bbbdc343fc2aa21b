"""`/v1/uploads`: files in parts; what doesn't fit, what is another's, what is left behind."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone
from openai.types import Upload
from openai.types.uploads import UploadPart as Part

from storage.actions import remove_ended_uploads, remove_expired
from storage.models import StoredUpload, UploadPart
from tests.inference.asgi_client import AsgiClient, Reply
from tests.inference.conftest import Gateway
from tests.inference.forms import HEADERS, form
from tests.inference.strangers import stranger

URL = "/v1/uploads"


@pytest.fixture(autouse=True)
def files_dir(tmp_path: Path, settings: Any) -> Path:
    settings.QUIRE = settings.QUIRE.replace(storage_dir=tmp_path)
    return tmp_path / "files"


def blobs(folder: Path) -> list[str]:
    return sorted(path.name.partition("_")[0].partition("-")[0] for path in folder.glob("*/*"))


async def announce(client: AsgiClient, size: int, **fields: Any) -> Reply:
    body = {"bytes": size, "filename": "in.jsonl", "mime_type": "text/jsonl", "purpose": "batch"}
    return await client.post(URL, body | fields)


async def send(client: AsgiClient, upload_id: str, data: bytes) -> Reply:
    return await client.post(
        f"{URL}/{upload_id}/parts", form({}, {"data": ("part", data)}), headers=HEADERS
    )


async def test_parts_become_a_file_in_the_order_that_is_named(
    gateway: Gateway, files_dir: Path
) -> None:
    client = gateway.client
    response = Upload.model_validate((await announce(client, 6)).json())
    assert (response.status, response.bytes, response.file) == ("pending", 6, None)
    second = Part.model_validate((await send(client, response.id, b"def")).json())
    first = Part.model_validate((await send(client, response.id, b"abc")).json())
    md5 = hashlib.md5(b"abcdef", usedforsecurity=False).hexdigest()
    named = {"part_ids": [first.id, second.id], "md5": md5}
    done = Upload.model_validate((await client.post(f"{URL}/{response.id}/complete", named)).json())
    assert done.status == "completed"
    assert done.file is not None
    content = await client.get(f"/v1/files/{done.file.id}/content")
    assert content.body == b"abcdef"
    assert blobs(files_dir) == ["file"]
    again = await client.post(f"{URL}/{response.id}/complete", named)
    assert (again.status, (await send(client, response.id, b"x")).status) == (409, 409)
    assert (await client.post(f"{URL}/{response.id}/cancel", {})).status == 409


async def test_one_that_dies_while_it_is_completed_is_still_pending(
    gateway: Gateway, files_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = (await announce(gateway.client, 3)).json()
    part = (await send(gateway.client, payload["id"], b"abc")).json()
    named, path = {"part_ids": [part["id"]]}, f"{URL}/{payload['id']}/complete"

    def dies(*_: Any, **__: Any) -> None:
        raise OSError

    with monkeypatch.context() as patch:
        patch.setattr("storage.actions.files.log_action", dies)
        assert (await gateway.client.post(path, named)).status == 500
    row = await asyncio.to_thread(StoredUpload.objects.get)
    assert (row.status, blobs(files_dir)) == ("pending", ["part"])
    assert (await gateway.client.post(path, named)).json()["status"] == "completed"


async def test_a_cancelled_upload_leaves_nothing(gateway: Gateway, files_dir: Path) -> None:
    payload = (await announce(gateway.client, 6)).json()
    await send(gateway.client, payload["id"], b"abc")
    assert blobs(files_dir) == ["part"]
    reply = await gateway.client.post(f"{URL}/{payload['id']}/cancel", {})
    assert reply.json()["status"] == "cancelled"
    assert blobs(files_dir) == []


async def test_one_that_is_forgotten_goes_and_one_that_runs_stays(
    gateway: Gateway, files_dir: Path
) -> None:
    payload = (await announce(gateway.client, 6)).json()
    assert payload["expires_at"] - payload["created_at"] in (3600, 3601)
    await send(gateway.client, payload["id"], b"abc")
    await asyncio.to_thread(remove_expired)
    assert blobs(files_dir) == ["part"]
    past = timezone.now() - timedelta(seconds=1)
    await asyncio.to_thread(StoredUpload.objects.update, expires_at=past)
    assert await asyncio.to_thread(remove_ended_uploads) == 1
    assert blobs(files_dir) == []
    assert await asyncio.to_thread(UploadPart.objects.count) == 0


async def test_what_is_not_as_announced_is_refused(gateway: Gateway) -> None:
    client = gateway.client
    payload = (await announce(client, 6)).json()
    part = (await send(client, payload["id"], b"abcd")).json()
    exceeding_response = await send(client, payload["id"], b"efg")
    assert (exceeding_response.status, exceeding_response.error["param"]) == (400, "data")
    other = (await announce(client, 6)).json()
    foreign = (await send(client, other["id"], b"abcdef")).json()
    full = {"part_ids": [foreign["id"]], "md5": "0" * 32}
    for upload_id, body, param in (
        (payload["id"], {"part_ids": [part["id"]]}, "part_ids"),
        (payload["id"], {"part_ids": [foreign["id"]]}, "part_ids"),
        (payload["id"], {"part_ids": [part["id"], part["id"]]}, "part_ids"),
        (payload["id"], {"part_ids": []}, "part_ids"),
        (other["id"], full, "md5"),
    ):
        reply = await client.post(f"{URL}/{upload_id}/complete", body)
        assert (reply.status, reply.error["param"]) == (400, param), body


async def test_a_tenants_bytes_are_bounded_parts_among_them(
    gateway: Gateway, settings: Any
) -> None:
    settings.QUIRE = settings.QUIRE.replace(max_file_bytes=1000, tenant_quotas={"file_bytes": 10})
    client = gateway.client
    assert (await announce(client, 11)).error["code"] == "storage_full"
    ids = [(await announce(client, 8)).json()["id"] for _ in range(2)]
    assert (await send(client, ids[0], b"x" * 8)).status == 200
    reply = await send(client, ids[1], b"x" * 8)
    assert (reply.status, reply.error["code"]) == (413, "storage_full")
    assert (await announce(client, 1001)).status == 413
    parts = await asyncio.to_thread(lambda: [part.public_id for part in UploadPart.objects.all()])
    done = await client.post(f"{URL}/{ids[0]}/complete", {"part_ids": parts})
    assert done.json()["status"] == "completed"  # its parts make room for it


async def test_nobody_else_reaches_it(gateway: Gateway) -> None:
    payload = (await announce(gateway.client, 3)).json()
    part = (await send(gateway.client, payload["id"], b"abc")).json()
    other = await asyncio.to_thread(stranger)
    assert (await send(other, payload["id"], b"abc")).status == 404
    named = {"part_ids": [part["id"]]}
    assert (await other.post(f"{URL}/{payload['id']}/complete", named)).status == 404
    assert (await other.post(f"{URL}/{payload['id']}/cancel", {})).status == 404
    assert (await gateway.client.post(f"{URL}/{payload['id']}/complete", named)).status == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bytes": 0}, "bytes"),
        ({"purpose": "evals"}, "purpose"),
        ({"filename": ""}, "filename"),
        ({"mime_type": "a\0b"}, "mime_type"),
        ({"expires_after": {"anchor": "created_at", "seconds": 1}}, "expires_after.seconds"),
    ],
)
async def test_bad_announcements(gateway: Gateway, fields: Any, param: str) -> None:
    reply = await announce(gateway.client, 3, **fields)
    assert (reply.status, reply.error["param"]) == (400, param)
