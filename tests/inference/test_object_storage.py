"""Files and batches in object storage: tenants, caches, redirects, workers and uploads that die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from urllib.request import urlopen

import pytest
from django.conf import settings as django_settings
from django.core.files.storage import InMemoryStorage

from common import object_storage
from common.errors import ServiceUnavailable
from common.files import new_id
from common.installation import APPS_DIR, BASE_DIR
from inference.api.batches.files import ResultJournal
from inference.api.batches.runner import SavedJournals
from storage.actions import remove_expired
from storage.blobs import (
    blob_path,
    delete_orphan_blobs,
    files_dir,
    link_blob,
    open_blob,
    remove_tenant_blobs,
    saved_journal_lines,
    write_blob,
)
from storage.models import Batch
from tests.inference.conftest import Gateway
from tests.inference.forms import upload
from tests.inference.strangers import stranger
from tests.object_storage import KillingProxy, new_bucket, object_names, s3_server


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(autouse=True)
def objects(s3: str, tmp_path: Path, settings: Any) -> dict[str, Any]:
    entry = new_bucket(s3)
    quire = settings.QUIRE.replace(data_dir=tmp_path, object_storage=json.dumps(entry))
    settings.QUIRE, settings.STORAGES = quire, django_settings.STORAGES | quire.storages
    return entry


def read(tenant_id: int, public_id: str) -> bytes:
    with open_blob(tenant_id, public_id) as file:
        return file.read()


async def test_files_are_objects_of_their_tenant(gateway: Gateway, objects: dict[str, Any]) -> None:
    client = gateway.client
    payload = (await upload(client, b"{}\n")).json()
    tenant = gateway.rows.tenant.pk
    assert object_names(objects) == [f"files/{tenant}/{payload['id']}"]
    blob_path(tenant, payload["id"]).unlink()  # another gateway has no copy
    assert (await client.get(f"/v1/files/{payload['id']}/content")).body == b"{}\n"
    other = await asyncio.to_thread(stranger)
    assert (await other.get(f"/v1/files/{payload['id']}/content")).status == 404
    await client.request("DELETE", f"/v1/files/{payload['id']}")
    assert object_names(objects) == []


async def test_a_download_may_be_redirected_to_a_url_that_ends(
    gateway: Gateway, settings: Any
) -> None:
    settings.QUIRE = settings.QUIRE.replace(presigned_downloads=True)
    payload = (await upload(gateway.client, b"content", filename="a b.jsonl")).json()
    answer = await gateway.client.get(f"/v1/files/{payload['id']}/content")
    assert (answer.status, answer.body) == (302, b"")
    url = answer.headers["location"]
    query = parse_qs(urlsplit(url).query)
    assert query["response-content-disposition"] == ['attachment; filename="a b.jsonl"']
    with await asyncio.to_thread(urlopen, url) as response:
        assert response.read() == b"content"


def test_presigned_downloads_need_a_cloud(settings: Any) -> None:
    with pytest.raises(ValueError, match="QUIRE_PRESIGNED_DOWNLOADS needs S3, Google Cloud or"):
        settings.QUIRE.replace(presigned_downloads=True, object_storage="")


def test_two_tenants_files_of_one_id_are_two(objects: dict[str, Any]) -> None:
    public_id = new_id("file-")
    write_blob(1, public_id, [b"one"])
    write_blob(2, public_id, [b"two"])
    for tenant in (1, 2):
        blob_path(tenant, public_id).unlink()
    assert (read(1, public_id), read(2, public_id)) == (b"one", b"two")
    remove_tenant_blobs(1)
    assert object_names(objects) == [f"files/2/{public_id}"]
    with pytest.raises(FileNotFoundError):
        open_blob(1, public_id)


def test_the_cache_keeps_what_was_used_last_within_its_budget(settings: Any) -> None:
    settings.QUIRE = settings.QUIRE.replace(object_cache_bytes=250)
    ids = [new_id("file-") for _ in range(4)]
    for public_id in ids:
        write_blob(1, public_id, [b"x" * 100])
        blob_path(1, public_id).unlink()
    open_files = []
    for used_at, public_id in enumerate(ids):
        open_files.append(open_blob(1, public_id))
        os.utime(blob_path(1, public_id), (used_at, used_at))
    cached = {path.name for path in blob_path(1, ids[0]).parent.iterdir()}
    assert cached == set(ids[2:])
    for file in open_files:  # one whose copy has gone is read to its end
        assert file.read() == b"x" * 100
        file.close()


def test_uploads_stay_within_the_caches_budget(settings: Any) -> None:
    settings.QUIRE = settings.QUIRE.replace(object_cache_bytes=250)
    ids = [new_id("file-") for _ in range(4)]
    for public_id in ids:
        write_blob(1, public_id, [b"x" * 100])
    assert len(list(files_dir().glob("*/*"))) == 2
    assert [read(1, public_id) for public_id in ids] == [b"x" * 100] * 4


def test_results_of_a_worker_that_did_not_commit_are_no_copy_of_its_successors(
    settings: Any, tmp_path: Path
) -> None:
    public_id, quire = new_id("file-"), settings.QUIRE
    for machine, content in (("first", b"not committed"), ("second", b"committed")):
        settings.QUIRE = quire.replace(data_dir=tmp_path / machine)
        journal = tmp_path / f"{machine}.output"
        journal.write_bytes(content)
        assert link_blob(1, public_id, journal) == len(content)
    for machine in ("first", "second"):
        settings.QUIRE = quire.replace(data_dir=tmp_path / machine)
        assert read(1, public_id) == b"committed"


@pytest.mark.django_db
def test_a_sweep_removes_objects_that_no_row_has(objects: dict[str, Any]) -> None:
    stored_id, orphan = new_id("file-"), new_id("file-")
    for public_id in (stored_id, orphan):
        write_blob(1, public_id, [b"x"])
    remove_expired()
    assert len(object_names(objects)) == 2  # they are young
    delete_orphan_blobs(lambda ids: ids & {stored_id}, -10)
    assert object_names(objects) == [f"files/1/{stored_id}"]


def test_a_storage_that_does_not_answer_is_said_to_be_unavailable(
    settings: Any, objects: dict[str, Any]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unknown_server:
        address = f"http://127.0.0.1:{unknown_server.getsockname()[1]}"
    broken = objects | {"OPTIONS": objects["OPTIONS"] | {"endpoint_url": address}}
    settings.STORAGES = django_settings.STORAGES | {"objects": broken}
    public_id = new_id("file-")
    with pytest.raises(ServiceUnavailable, match="object storage is unavailable"):
        write_blob(1, public_id, [b"x"])
    assert not blob_path(1, public_id).exists()


def test_a_worker_on_another_machine_goes_on_with_what_was_saved(tmp_path: Path) -> None:
    row = Batch(public_id=new_id("batch_"), tenant_id=1)

    def journals(machine: str) -> tuple[ResultJournal, ResultJournal]:
        folder = tmp_path / machine
        folder.mkdir(exist_ok=True)
        names = ("output", "errors")
        output, errors = (ResultJournal(folder / name, lambda line: None) for name in names)
        return output, errors

    output, errors = journals("first")
    first = SavedJournals(row, output, errors)
    output.append({"custom_id": "a"})
    first.save()
    output.append({"custom_id": "b"})
    errors.append({"custom_id": "c"})
    first.save()
    output.append({"custom_id": "lost"})
    output, errors = journals("second")
    errors.append({"custom_id": "b"})  # it had begun with the batch itself, before
    second = SavedJournals(row, output, errors)
    second.restore()
    assert (output.custom_ids, errors.custom_ids) == ({"a"}, {"b", "c"})
    output.append({"custom_id": "d"})
    second.save()
    saved = b"".join(saved_journal_lines(1, row.public_id, ".output")).splitlines()
    assert [json.loads(line)["custom_id"] for line in saved] == ["a", "d"]
    second.remove()
    assert list(saved_journal_lines(1, row.public_id, ".output")) == []


WRITE = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from django.conf import settings
entry, folder, public_id = json.loads(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
settings.configure(
    STORAGES={"objects": entry}, QUIRE=SimpleNamespace(files_dir=folder, object_cache_bytes=1)
)
from storage.blobs import write_blob
write_blob(1, public_id, (b"x" * (1 << 20) for _ in range(64)))
"""


def test_a_process_that_is_killed_in_an_upload_leaves_no_object(
    s3: str, objects: dict[str, Any]
) -> None:
    folder = files_dir()
    proxy = KillingProxy(s3, num_bytes=20 << 20)
    entry = objects | {"OPTIONS": objects["OPTIONS"] | {"endpoint_url": proxy.address}}
    command = [sys.executable, "-c", WRITE, json.dumps(entry), str(folder), new_id("file-")]
    paths = {"PYTHONPATH": f"{APPS_DIR}:{BASE_DIR}"}
    proxy.process = subprocess.Popen(command, env=paths)
    try:
        assert proxy.process.wait(60) == -signal.SIGKILL
    finally:
        proxy.close()
    assert object_names(objects) == []
    delete_orphan_blobs(lambda ids: set(), -10)
    assert not any(path.is_file() for path in folder.rglob("*"))


class AzureLikeStorage(InMemoryStorage):
    """Lists and fails as `AzureStorage` of django-storages does, seen at Azurite."""

    class Missing(Exception):
        status_code = 404

    def listdir(self, path: str) -> tuple[list[str], list[str]]:
        names, folders = [], [path]
        while folders:
            folder = folders.pop()
            inner, files = super().listdir(folder)
            folders += [f"{folder}/{name}" for name in inner]
            names += [f"{folder}/{name}" for name in files]
        return [], names

    def _open(self, name: str, mode: str = "rb") -> Any:
        if not self.exists(name):
            raise self.Missing(name)
        return super()._open(name, mode)


class GoogleCloudLikeStorage(InMemoryStorage):
    """Fails and signs as `GoogleCloudStorage` of django-storages does, seen at fake-gcs-server."""

    class NotFound(Exception):
        code = 404

    def get_modified_time(self, name: str) -> Any:
        raise self.NotFound(name)

    def url(self, name: str | None, parameters: Any = None) -> str:
        return f"{name} {sorted(parameters)} {parameters['expiration']}"


def test_an_object_that_went_meanwhile_and_a_url_at_google(settings: Any) -> None:
    entry = {"BACKEND": f"{__name__}.GoogleCloudLikeStorage"}
    settings.STORAGES = django_settings.STORAGES | {"objects": entry}
    settings.QUIRE = settings.QUIRE.replace(
        object_storage=json.dumps(entry), presigned_downloads=True
    )
    with pytest.raises(FileNotFoundError):
        object_storage.modified_at("files/1/gone")
    assert object_storage.presigned_url("files/1/a", "attachment") == (
        "files/1/a ['expiration', 'response_disposition', 'response_type'] 0:05:00"
    )


def test_an_object_that_went_meanwhile_at_s3() -> None:
    with pytest.raises(FileNotFoundError):
        object_storage.modified_at("files/1/gone")


def test_a_bucket_that_does_not_exist_is_an_unavailable_storage(
    settings: Any, objects: dict[str, Any], tmp_path: Path
) -> None:
    entry = objects | {"OPTIONS": objects["OPTIONS"] | {"bucket_name": "none"}}
    settings.STORAGES = django_settings.STORAGES | {"objects": entry}
    (tmp_path / "file").write_bytes(b"content")
    with pytest.raises(ServiceUnavailable):
        object_storage.upload_object("files/1/a", tmp_path / "file")


def test_a_back_end_without_folders_is_listed_and_read_like_the_others(
    settings: Any, tmp_path: Path
) -> None:
    entry = {"BACKEND": f"{__name__}.AzureLikeStorage"}
    settings.STORAGES = django_settings.STORAGES | {"objects": entry}
    (tmp_path / "file").write_bytes(b"content")
    for name in ("adapters/one/a.tar", "adapters/one/b.tar", "adapters/two/c.tar", "adapters/used"):
        object_storage.upload_object(name, tmp_path / "file")
    assert object_storage.list_objects("adapters") == (["one", "two"], ["used"])
    assert object_storage.list_objects("adapters/one") == ([], ["a.tar", "b.tar"])
    with pytest.raises(FileNotFoundError):
        object_storage.read_object("adapters/three/d.tar")
    object_storage.delete_folder("adapters/one")
    assert object_storage.list_objects("adapters") == (["two"], ["used"])
