"""The pages of batches and files: for a tenant's own people, with what the API would say."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client

from console.views import batches as pages
from storage import actions
from storage.models import Batch, BatchStatus, StoredFile
from tenants.models import AuditEntry, Membership, Tenant, User
from tests.console.conftest import Login

LINE = b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {}}\n'


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Batches that workers were told of."""
    job_ids: list[str] = []
    monkeypatch.setattr(pages, "send_job", lambda kind, public_id: job_ids.append(public_id))
    return job_ids


@pytest.fixture
def folder(settings: Any, tmp_path: Any) -> None:
    settings.QUIRE = settings.QUIRE.replace(storage_dir=tmp_path)


def upload(client: Client, content: bytes = LINE, name: str = "in.jsonl", **more: str) -> Any:
    file = SimpleUploadedFile(name, content)
    return client.post("/console/files/upload/?tenant=acme", {"file": file, **more})


def viewer() -> None:
    user = User.objects.create_user("vera", "vera@example.org", "x")
    Membership.objects.create(user=user, tenant=Tenant.objects.get(slug="acme"), role="viewer")


@pytest.mark.usefixtures("committed", "folder")
def test_a_file_becomes_a_batch_that_is_cancelled(login: Login, sent: list[str]) -> None:
    ada = login("ada")
    assert "No file yet" in ada.get("/console/files/").content.decode()
    assert upload(ada, days="3").status_code == 302
    file = StoredFile.objects.get()
    assert file.expires_at is not None
    page = ada.get("/console/files/").content.decode()
    assert "in.jsonl is uploaded as" in page
    got = ada.get(f"/console/files/{file.public_id}/?tenant=acme")
    assert b"".join(got.streaming_content) == LINE
    assert got["Content-Disposition"].startswith("attachment")
    form = {"file": file.public_id, "endpoint": "/v1/completions", "window": "24h"}
    assert ada.post("/console/batches/add/?tenant=acme", form).status_code == 302
    batch = Batch.objects.get()
    assert sent == [batch.public_id]
    page = ada.get("/console/batches/").content.decode()
    assert batch.public_id in page
    refused = ada.post(f"/console/files/{file.public_id}/delete/?tenant=acme")
    assert refused.status_code == 409
    assert "needs this file" in refused.content.decode()
    ada.post(f"/console/batches/{batch.public_id}/cancel/?tenant=acme")
    batch.refresh_from_db()
    assert batch.status == BatchStatus.CANCELLING
    operations = set(AuditEntry.objects.values_list("action", flat=True))
    assert {"file.create", "batch.create", "batch.cancel"} <= operations


@pytest.mark.usefixtures("committed", "folder")
def test_progress_and_errors_are_told(login: Login) -> None:
    ada = login("ada")
    upload(ada)
    form = {"file": StoredFile.objects.get().public_id, "window": "1h"}
    ada.post("/console/batches/add/?tenant=acme", {**form, "endpoint": "/v1/responses"})
    batch = Batch.objects.get()
    actions.start_batch(row=batch, total=8)
    actions.update_progress(row=batch, completed=5, failed=1, usage={})
    (reported,) = ada.get("/console/api/batches?tenant=acme").json()["batches"]
    assert (reported["percent"], reported["completed"], reported["failed"]) == (75, 5, 1)
    assert reported["left"].startswith("about")
    problem = {"line": 3, "code": "invalid", "param": "body", "message": "<b>No body.</b>"}
    actions.fail_batch(row=batch, errors=[problem])
    page = ada.get(f"/console/batches/{batch.public_id}/?tenant=acme").content.decode()
    assert "&lt;b&gt;No body.&lt;/b&gt;" in page
    (reported,) = ada.get(f"/console/api/batches?tenant=acme&batch={batch.public_id}").json()[
        "batches"
    ]
    assert (reported["open"], reported["errors"]) == (False, 1)
    listed = ada.get("/console/batches/?tenant=acme").content.decode()
    assert "&lt;b&gt;No body.&lt;/b&gt;" in listed


@pytest.mark.usefixtures("committed", "folder")
def test_fault_80_a_viewer_reads_no_file_here_either(login: Login) -> None:
    ada = login("ada")
    upload(ada)
    path = f"/console/files/{StoredFile.objects.get().public_id}/?tenant=acme"
    assert ada.get(path).status_code == 200
    viewer()
    vera = login("vera")
    assert vera.get(path).status_code == 403
    assert "/console/files/file-" not in vera.get("/console/files/?tenant=acme").content.decode()


@pytest.mark.usefixtures("committed", "folder")
def test_strangers_find_nothing_and_viewers_only_look(login: Login) -> None:
    ada = login("ada")
    upload(ada)
    file = StoredFile.objects.get()
    form = {"file": file.public_id, "endpoint": "/v1/completions", "window": "24h"}
    ada.post("/console/batches/add/?tenant=acme", form)
    batch = Batch.objects.get()
    paths = (f"/console/files/{file.public_id}/", f"/console/batches/{batch.public_id}/")
    for name in ("olga", "nobody"):
        other = login(name)
        for path in paths:
            assert other.get(path).status_code == 404
            assert other.get(f"{path}?tenant=acme").status_code == 404
        visible_tenant = "rival" if name == "olga" else "acme"
        for path in (f"{paths[0]}delete/", f"{paths[1]}cancel/"):
            assert other.post(f"{path}?tenant={visible_tenant}").status_code == 404
        answer = other.get(f"/console/api/batches?tenant=acme&batch={batch.public_id}")
        assert answer.status_code == 404
        assert upload(other).status_code == 404
    viewer()
    vera = login("vera")
    assert vera.get(f"{paths[1]}?tenant=acme").status_code == 200
    assert "Create a batch" not in vera.get("/console/batches/").content.decode()
    assert upload(vera).status_code == 403
    assert vera.post("/console/batches/add/?tenant=acme", form).status_code == 403
    assert vera.post(f"{paths[1]}cancel/?tenant=acme").status_code == 403
    root = login("root")
    assert root.get(f"{paths[1]}?tenant=acme").status_code == 200
    assert root.post(f"{paths[1]}cancel/?tenant=acme").status_code == 403
    assert (StoredFile.objects.count(), Batch.objects.count()) == (1, 1)


@pytest.mark.usefixtures("committed", "folder")
def test_what_is_wrong_is_said(login: Login, settings: Any) -> None:
    ada = login("ada")
    settings.QUIRE = settings.QUIRE.replace(max_file_bytes=100)
    assert "The file is empty." in upload(ada, b"").content.decode()
    assert "the limit is 100" in upload(ada, b"x" * 101).content.decode()
    assert "Days must be" in upload(ada, days="31").content.decode()
    invalid_response = ada.post(
        "/console/batches/add/?tenant=acme", {"file": "", "endpoint": "/v1/x"}
    )
    assert invalid_response.status_code == 400
    gone = {"file": "file-none", "endpoint": "/v1/completions", "window": "24h"}
    assert ada.post("/console/batches/add/?tenant=acme", gone).status_code == 404
    late = {**gone, "window": "99d"}
    assert ada.post("/console/batches/add/?tenant=acme", late).status_code == 400
    assert StoredFile.objects.count() == 0
