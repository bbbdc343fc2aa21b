"""Pictures of the playground's questions: files of the tenant, uploaded with the session."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from django.utils import timezone

from engine.contract.errors import InvalidRequest
from storage.models import StoredFile
from storage.playground_document import validate_document
from tenants.models import Membership, Tenant, User
from tests.console.conftest import Login
from tests.platform.test_conversations import talk

PIXELS = b"\x89PNG, or so it says"


@pytest.fixture(autouse=True)
def folder(settings: Any, tmp_path: Any) -> None:
    settings.QUIRE = settings.QUIRE.replace(storage_dir=tmp_path)


def upload(client: Client, content: bytes = PIXELS, tenant: str = "acme") -> Any:
    file = SimpleUploadedFile("fox.png", content)
    return client.post(f"/console/api/pictures?tenant={tenant}", {"file": file})


@pytest.mark.usefixtures("committed")
def test_a_picture_becomes_a_file_of_the_tenant(login: Login, settings: Any) -> None:
    ada = login("ada")
    stored = upload(ada).json()
    file = StoredFile.objects.get()
    assert stored == {"id": file.public_id, "name": "fox.png"}
    assert (file.purpose, file.tenant.slug, file.expires_at) == ("vision", "acme", None)
    content = ada.get(f"/console/files/{file.public_id}/?tenant=acme")
    assert b"".join(content.streaming_content) == PIXELS
    Tenant.objects.filter(slug="acme").update(keep_conversations=False)
    expiry = StoredFile.objects.get(public_id=upload(ada).json()["id"]).expires_at
    assert expiry is not None
    assert expiry <= timezone.now() + timedelta(days=1)
    settings.QUIRE = settings.QUIRE.replace(max_file_bytes=10)
    for content, status in ((b"", 400), (PIXELS, 413)):
        refused = upload(ada, content)
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, "file")
    assert StoredFile.objects.count() == 2


@pytest.mark.usefixtures("committed")
def test_a_pdf_becomes_a_document_that_a_conversation_keeps(login: Login) -> None:
    file = SimpleUploadedFile("report.pdf", b"%PDF-1.7", "application/pdf")
    stored = login("ada").post("/console/api/pictures?tenant=acme", {"file": file}).json()
    assert (stored["kind"], StoredFile.objects.get().purpose) == ("document", "user_data")
    document = talk("What does it say?")
    document["turns"][0]["images"] = [stored, {"id": "file-2", "name": "fox.png"}]
    assert validate_document(document)["turns"][0]["images"] == document["turns"][0]["images"]


@pytest.mark.usefixtures("committed")
def test_only_members_upload_pictures(login: Login) -> None:
    viewer = User.objects.create_user("vera", "vera@example.org", "x")
    Membership.objects.create(user=viewer, tenant=Tenant.objects.get(slug="acme"), role="viewer")
    statuses = [upload(login(name)).status_code for name in ("vera", "olga", "nobody", "root")]
    assert statuses == [403, 404, 404, 403]
    assert upload(Client()).status_code == 401
    assert not StoredFile.objects.exists()


def test_a_conversation_keeps_the_pictures_of_its_questions() -> None:
    document = talk("What is this?")
    images = [{"id": "file-1", "name": "fox.png"}]
    document["turns"][0]["images"] = images
    assert validate_document(document)["turns"][0]["images"] == images
    for invalid in ([{"id": "file-1"}], [{"id": "x" * 65, "name": ""}], images * 65, "file-1"):
        document["turns"][0]["images"] = invalid
        with pytest.raises(InvalidRequest, match="No conversation"):
            validate_document(document)
