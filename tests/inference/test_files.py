"""`/v1/files`: keeping, listing, reading and forgetting; limits; strangers."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from storage.actions import remove_expired
from storage.models import StoredFile
from tenants.models import AuditEntry
from tests.inference.conftest import Gateway
from tests.inference.forms import HEADERS, form, upload
from tests.inference.strangers import stranger


@pytest.fixture(autouse=True)
def files_dir(tmp_path: Path, settings: Any) -> Path:
    settings.QUIRE = settings.QUIRE.replace(storage_dir=tmp_path)
    return tmp_path / "files"


def blobs(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*/*"))


async def test_a_file_is_kept_listed_read_and_forgotten(gateway: Gateway, files_dir: Path) -> None:
    client = gateway.client
    payload = (await upload(client, b"{}\n", filename="my batch.jsonl")).json()
    assert payload["object"] == "file"
    assert (payload["bytes"], payload["purpose"], payload["filename"]) == (
        3,
        "batch",
        "my batch.jsonl",
    )
    assert (await client.get(f"/v1/files/{payload['id']}")).json() == payload
    content = await client.get(f"/v1/files/{payload['id']}/content")
    assert content.body == b"{}\n"
    assert content.headers["content-disposition"] == 'attachment; filename="my batch.jsonl"'
    assert content.headers["x-content-type-options"] == "nosniff"
    (path,) = blobs(files_dir)
    assert (path.name, path.stat().st_mode & 0o777) == (payload["id"], 0o600)
    gone = await client.request("DELETE", f"/v1/files/{payload['id']}")
    assert gone.json() == {"id": payload["id"], "object": "file", "deleted": True}
    assert blobs(files_dir) == []
    assert (await client.get(f"/v1/files/{payload['id']}")).status == 404
    actions = await asyncio.to_thread(
        lambda: list(AuditEntry.objects.order_by("pk").values_list("action", flat=True))
    )
    assert actions[-2:] == ["file.create", "file.delete"]


async def test_lists_come_in_pages_that_neither_repeat_nor_skip(gateway: Gateway) -> None:
    ids = [(await upload(gateway.client, b"x\n")).json()["id"] for _ in range(5)]
    for order, expected in (("desc", ids[::-1]), ("asc", ids)):
        result, after = [], ""
        while True:
            query = f"?limit=2&order={order}" + (f"&after={after}" if after else "")
            listed = (await gateway.client.get(f"/v1/files{query}")).json()
            page = [item["id"] for item in listed["data"]]
            assert (listed["first_id"], listed["last_id"]) == (page[0], page[-1])
            result += page
            after = page[-1]
            if not listed["has_more"]:
                break
        assert result == expected
    assert (await gateway.client.get("/v1/files?purpose=batch_output")).json()["data"] == []


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("limit=10001", "limit"),
        ("order=up", "order"),
        ("purpose=%00", "purpose"),
    ],
)
async def test_a_page_out_of_range_is_refused(gateway: Gateway, query: str, param: str) -> None:
    reply = await gateway.client.get(f"/v1/files?{query}")
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_a_clients_file_name_is_no_path(gateway: Gateway, files_dir: Path) -> None:
    for name in ("../../etc/passwd", "..\\..\\x.jsonl", "a\x00b", "x" * 900):
        payload = (await upload(gateway.client, b"x", filename=name)).json()
        assert "/" not in payload["filename"]
        assert "\\" not in payload["filename"]
        assert 1 <= len(payload["filename"]) <= 255
    assert {path.parent.parent for path in blobs(files_dir)} == {files_dir}
    assert {path.name[:5] for path in blobs(files_dir)} == {"file-"}


async def test_fault_23_a_strangers_file_is_404_on_every_verb(gateway: Gateway) -> None:
    file_id = (await upload(gateway.client, b"secret\n")).json()["id"]
    other = await asyncio.to_thread(stranger)
    for method, path in (
        ("GET", f"/v1/files/{file_id}"),
        ("GET", f"/v1/files/{file_id}/content"),
        ("DELETE", f"/v1/files/{file_id}"),
        ("GET", f"/v1/files?after={file_id}"),
    ):
        reply = await other.request(method, path)
        assert reply.status == 404, path
        assert "secret" not in reply.body.decode()
    assert (await other.get("/v1/files")).json()["data"] == []
    assert (await gateway.client.get(f"/v1/files/{file_id}")).status == 200


@pytest.mark.parametrize("file_id", ["..%2f..%2fx", "file-", "file-" + "A" * 32, "x" * 4000])
async def test_fault_31_an_id_that_is_none_is_404(gateway: Gateway, file_id: str) -> None:
    assert (await gateway.client.get(f"/v1/files/{file_id}")).status == 404


async def test_what_is_no_upload_is_refused(gateway: Gateway) -> None:
    client = gateway.client
    file = {"file": ("x.jsonl", b"x")}
    cases: list[tuple[bytes, dict[str, str], int, str | None]] = [
        (b"{}", {"content-type": "application/json"}, 415, None),
        (form({"purpose": "batch"}, {}), HEADERS, 400, "file"),
        (form({}, file), HEADERS, 400, "purpose"),
        (form({"purpose": "fine-tune"}, file), HEADERS, 400, "purpose"),
        (form({"purpose": "nonsense"}, file), HEADERS, 400, "purpose"),
        (form({"purpose": "batch", "tenant": "1"}, file), HEADERS, 400, "tenant"),
        (form({"purpose": "batch"}, {"file": ("x", b"")}), HEADERS, 400, "file"),
        (
            form({"purpose": "batch", "expires_after[anchor]": "never"}, file),
            HEADERS,
            400,
            "expires_after.anchor",
        ),
        (
            form(
                {
                    "purpose": "batch",
                    "expires_after[anchor]": "created_at",
                    "expires_after[seconds]": "1e9",
                },
                file,
            ),
            HEADERS,
            400,
            "expires_after.seconds",
        ),
        (b"no form at all", {"content-type": "multipart/form-data"}, 400, None),
    ]
    for body, headers, status, param in cases:
        reply = await client.post("/v1/files", body, headers=headers)
        assert (reply.status, reply.error["param"]) == (status, param), body[:200]
    assert (await client.get("/v1/files")).json()["data"] == []


async def test_fault_01_a_file_over_the_limit_is_refused_while_it_comes_in(
    gateway: Gateway, settings: Any, files_dir: Path
) -> None:
    settings.QUIRE = settings.QUIRE.replace(max_file_bytes=10_000)
    reply = await upload(gateway.client, b"x" * 20_000)
    assert reply.status == 413
    parts = [b"x" * 500_000 for _ in range(20)]
    exchange = gateway.client.open("POST", "/v1/files", headers=HEADERS, parts=parts)
    reply = await exchange.reply()
    assert reply.status == 413
    assert len(exchange.received) < 20
    assert blobs(files_dir) == []


async def test_a_strangers_upload_is_not_even_read(gateway: Gateway) -> None:
    gateway.client.key = "sk-quire-nobody"
    exchange = gateway.client.open("POST", "/v1/files", headers=HEADERS, parts=[b"x"] * 5)
    assert (await exchange.reply()).status == 401
    assert exchange.received == []


async def test_a_tenant_has_only_so_much_room(gateway: Gateway, settings: Any) -> None:
    settings.QUIRE = settings.QUIRE.replace(tenant_quotas={"file_bytes": 100})
    assert (await upload(gateway.client, b"x" * 60)).status == 200
    refused = await upload(gateway.client, b"x" * 60)
    assert (refused.status, refused.error["code"]) == (413, "storage_full")
    assert (await upload(gateway.client, b"x" * 40)).status == 200


async def test_a_file_expires(gateway: Gateway, files_dir: Path) -> None:
    fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    payload = (await upload(gateway.client, b"x", **fields)).json()
    assert payload["expires_at"] - payload["created_at"] == pytest.approx(3600, abs=2)
    past = timezone.now() - timedelta(seconds=1)
    await StoredFile.objects.aupdate(expires_at=past)
    assert (await gateway.client.get(f"/v1/files/{payload['id']}")).status == 404
    assert await asyncio.to_thread(remove_expired) == 1
    assert blobs(files_dir) == []


async def test_bytes_without_a_row_are_swept_away_once_they_are_old(
    gateway: Gateway, files_dir: Path
) -> None:
    import os

    file_id = (await upload(gateway.client, b"x")).json()["id"]
    (blob,) = blobs(files_dir)
    orphan, new = blob.with_name("file-" + "0" * 32), blob.with_name(".upload-abc")
    for path in (orphan, new):
        path.write_bytes(b"x")
    for path in (orphan, blob):
        os.utime(path, (0, 0))
    assert await asyncio.to_thread(remove_expired) == 1
    assert {path.name for path in blobs(files_dir)} == {file_id, ".upload-abc"}
