"""Adapters in the management API: every route, asked by everybody who could."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from adapters.models import Adapter, AdapterUpload, AdapterVersion
from catalog.models import ServedModel
from metering.models import UsageEntry
from tenants.actors import SYSTEM_ACTOR
from tenants.models import Tenant
from tests.adapter_files import adapter_bytes, adapter_folder
from tests.console.conftest import Login
from tests.console.test_rest import Caller, answered_otherwise, callers, expect
from tests.platform.adapters import ready

__all__ = ["callers"]
pytestmark = pytest.mark.usefixtures("adapter_store")

NUMBERS = itertools.count(1)
DIGEST = "d" * 64
FILES = {name: len(content) for name, content in adapter_bytes().items()}


def admins(ok: int) -> dict[str, int]:
    return expect(ok, members=403)


def members(ok: int) -> dict[str, int]:
    return {**expect(ok, members=ok), "viewer": 403}


def everybody(ok: int) -> dict[str, int]:
    return expect(ok, members=ok)


def operators(ok: int) -> dict[str, int]:
    return expect(ok, managers=403, members=403, outsiders=403)


def of_acme_for_operators(ok: int) -> dict[str, int]:
    strangers = dict.fromkeys(("outsider", "outsider's key", "rival program"), 404)
    return {**operators(ok), **strangers}


NEW = {"model": "quill", "name": "new"}
ADAPTER = "tenants/acme/adapters/{adapter}/"
UPLOAD = "tenants/acme/adapters/uploads/{upload}/"
ROUTES: dict[tuple[str, str, str], dict[str, int]] = {
    ("GET", "tenants/acme/adapters/", ""): everybody(200),
    ("GET", ADAPTER, ""): everybody(200),
    ("DELETE", ADAPTER, ""): admins(204),
    ("POST", "tenants/acme/adapters/", '{"repository": "a/b"}'): admins(201),
    ("POST", "tenants/acme/adapters/", '{"path": "tone"}'): of_acme_for_operators(201),
    ("POST", f"{ADAPTER}promote/", '{"version": 1}'): admins(200),
    ("POST", f"{ADAPTER}rollback/", "{}"): admins(409),
    ("POST", f"{ADAPTER}offline/", "{}"): admins(409),
    ("POST", f"{ADAPTER}pin/", ""): of_acme_for_operators(200),
    ("POST", f"{ADAPTER}unpin/", ""): of_acme_for_operators(200),
    ("DELETE", f"{ADAPTER}aliases/nothing/", ""): everybody(404),
    ("GET", f"{ADAPTER}versions/1/", ""): everybody(200),
    ("DELETE", f"{ADAPTER}versions/1/", ""): admins(204),
    ("POST", f"{ADAPTER}versions/1/check/", ""): members(200),
    ("POST", f"{ADAPTER}versions/1/retire/", ""): admins(200),
    ("GET", "tenants/acme/adapters/uploads/", ""): members(200),
    ("POST", "tenants/acme/adapters/uploads/", json.dumps({"files": FILES})): members(201),
    ("GET", UPLOAD, ""): members(200),
    ("DELETE", UPLOAD, ""): members(204),
    ("POST", f"{UPLOAD}finish/", ""): members(409),
    ("GET", "tenants/acme/requests/chatcmpl-1/", ""): everybody(200),
    ("GET", "adapters/", ""): operators(200),
    ("GET", "adapters/{shared}/", ""): operators(200),
    ("POST", "adapters/{shared}/promote/", '{"version": 1}'): operators(200),
    ("POST", "adapters/{shared}/pin/", ""): operators(200),
    ("POST", "adapters/", '{"path": "tone"}'): operators(201),
    ("DELETE", "adapters/{shared}/", ""): operators(204),
    ("GET", "adapters/uploads/", ""): operators(200),
    ("POST", "adapters/uploads/", json.dumps({"files": FILES})): operators(201),
}


@pytest.fixture
def new_adapter(callers: dict[str, Caller], adapter_store: Any) -> Any:
    """Rows of each kind: an operation takes them away."""
    adapter_folder(adapter_store / "tone")
    acme, quill = Tenant.objects.get(slug="acme"), ServedModel.objects.get(name="quill")
    UsageEntry.objects.create(
        request_id="chatcmpl-1",
        tenant=acme,
        endpoint="chat.completions",
        model="quill",
        adapter="tone",
        adapter_digest=DIGEST,
        prompt_tokens=3,
        cached_tokens=0,
        completion_tokens=2,
        status=200,
        started_at=timezone.now(),
        duration_ms=1.0,
        stream=False,
    )
    local_adapter = ready(SYSTEM_ACTOR, acme, quill, name="tone", seed=500).adapter
    shared = ready(SYSTEM_ACTOR, None, quill, name="ours", seed=501).adapter

    def make() -> dict[str, Any]:
        AdapterUpload.objects.all().delete()
        Adapter.objects.filter(name__startswith="new").delete()
        adapters = {"adapter": local_adapter, "shared": shared}
        for name, row in adapters.items():
            copy = AdapterVersion.objects.filter(adapter=row).first()
            if copy is None or not Adapter.objects.filter(pk=row.pk).exists():
                owner = acme if name == "adapter" else None
                adapters[name] = ready(SYSTEM_ACTOR, owner, quill, name=f"n{next(NUMBERS)}").adapter
            else:
                row.aliases.update(version=None, previous=None, canary=None)
                row.versions.update(state="ready")
        upload = AdapterUpload.objects.create(
            public_id=f"upload-{next(NUMBERS):032x}",
            tenant=acme,
            served_model=quill,
            name="tone",
            files=FILES,
            num_bytes=sum(FILES.values()),
        )
        pks = {name: row.pk for name, row in adapters.items()}
        return {**pks, "upload": upload.public_id}

    return make


def test_each_route_answers_everybody_as_it_should(
    callers: dict[str, Caller], new_adapter: Any
) -> None:
    assert not answered_otherwise(ROUTES, lambda *route: answers(callers, new_adapter, *route))


def answers(
    callers: dict[str, Caller], new: Any, method: str, path: str, body: str
) -> dict[str, int]:
    """The status of each caller's answer."""
    status_codes, rows = {}, new()
    for name, caller in callers.items():
        sent = json.loads(body) if body else None
        if sent and ("files" in sent or "path" in sent or "repository" in sent):
            sent |= NEW
        answer = caller.ask(method, f"/api/{path.format(**rows)}", sent)
        status_codes[name] = answer.status_code
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        elif method != "GET":  # the operation is done, and the next one needs rows to do it to
            rows = new()
    return status_codes


def test_an_upload_by_api_from_its_first_byte_to_the_digest(
    callers: dict[str, Caller], new_adapter: Any
) -> None:
    admin, files = callers["admin's key"], adapter_bytes(9)
    sizes = {name: len(content) for name, content in files.items()}
    root = "/api/tenants/acme/adapters/"
    started_payload = admin.ask(
        "POST", f"{root}uploads/", {**NEW, "files": sizes, "promote": True}
    ).json()
    assert {
        name: file["offset"] for name, file in started_payload["files"].items()
    } == dict.fromkeys(files, 0)

    def send(name: str, offset: int, content: bytes) -> Any:
        return admin.client.generic(
            "PATCH",
            f"{root}uploads/{started_payload['id']}/files/{name}/",
            content,
            content_type="application/octet-stream",
            headers={**admin.headers, "Upload-Offset": str(offset)},
        )

    for name, content in files.items():
        assert send(name, 0, content[:20]).json()["files"][name]["offset"] == 20
        invalid_response = send(name, 0, content)
        assert (invalid_response.status_code, invalid_response["Upload-Offset"]) == (409, "20")
        assert send(name, 20, content[20:]).status_code == 200
    payload = admin.ask("POST", f"{root}uploads/{started_payload['id']}/finish/").json()
    assert payload["state"] == "uploaded"
    assert len(payload["digest"]) == 64
    assert send("adapter_config.json", 0, b"x").status_code == 404


def test_offsets_and_names_of_pieces_are_checked(
    callers: dict[str, Caller], new_adapter: Any
) -> None:
    rows, admin = new_adapter(), callers["admin's key"]
    path = f"/api/tenants/acme/adapters/uploads/{rows['upload']}/files/"
    for name, offset, status in (
        ("adapter_config.json", "-1", 400),
        ("adapter_config.json", "", 400),
        ("adapter_config.json", "9" * 30, 400),
        ("other.json", "0", 404),
        ("..%2f..%2fetc", "0", 404),
    ):
        answer = admin.client.generic(
            "PATCH",
            f"{path}{name}/",
            b"x",
            content_type="application/octet-stream",
            headers={**admin.headers, "Upload-Offset": offset},
        )
        assert answer.status_code == status, name


def test_a_stranger_gets_at_nothing(callers: dict[str, Caller], new_adapter: Any) -> None:
    rows = new_adapter()
    for name in ("outsider", "outsider's key", "rival program"):
        rival = callers[name]
        for path in (
            f"adapters/{rows['adapter']}/",
            f"adapters/{rows['adapter']}/versions/1/",
            f"adapters/uploads/{rows['upload']}/",
            "requests/chatcmpl-1/",
        ):
            for tenant in ("acme", "rival"):
                assert rival.ask("GET", f"/api/tenants/{tenant}/{path}").status_code == 404
        listed = rival.get("/api/tenants/rival/adapters/")["results"]
        assert [row["name"] for row in listed] == ["ours"]
        shared = f"/api/tenants/rival/adapters/{rows['shared']}/"
        assert rival.ask("POST", f"{shared}promote/", {"version": 1}).status_code == 403
        assert rival.ask("DELETE", shared).status_code == 403


def test_a_servers_path_is_shown_to_operators_alone(
    callers: dict[str, Caller], new_adapter: Any
) -> None:
    new_adapter()
    payload = callers["operator"].ask("POST", "/api/adapters/", {**NEW, "path": "tone"}).json()
    assert payload["source"].startswith("/")
    results = callers["viewer"].get("/api/tenants/acme/adapters/?name=new")["results"]
    assert results[0]["versions"][0]["source"] == "the server"


def test_which_digest_answered(callers: dict[str, Caller], new_adapter: Any) -> None:
    response = callers["viewer"].get("/api/tenants/acme/requests/chatcmpl-1/")
    assert (response["model"], response["adapter"], response["adapter_digest"]) == (
        "quill",
        "tone",
        DIGEST,
    )
    assert callers["viewer"].ask("GET", "/api/tenants/acme/requests/no/").status_code == 404


def test_a_sessions_upload_needs_csrf(login: Login, new_adapter: Any) -> None:
    rows = new_adapter()
    strict = Client(enforce_csrf_checks=True)
    strict.cookies = login("ada").cookies
    answer = strict.generic(
        "PATCH",
        f"/api/tenants/acme/adapters/uploads/{rows['upload']}/files/adapter_config.json/",
        b"x",
        content_type="application/octet-stream",
        headers={"Upload-Offset": "0"},
    )
    assert answer.status_code == 403
