"""The JSON of kept conversations: a session's own, changed with Django's CSRF token alone."""

from __future__ import annotations

import json
from typing import Any

from django.test import Client

from tenants.models import Membership, Role, Tenant, User
from tests.console.conftest import Login
from tests.platform.test_conversations import talk

URL = "/console/api/conversations"
PRESETS = "/console/api/presets"


def send(client: Client, method: str, url: str, **body: Any) -> Any:
    return client.generic(method, url, json.dumps(body), content_type="application/json")


def test_a_conversation_is_kept_found_changed_and_deleted(login: Login) -> None:
    ada = login("ada")
    payload = send(ada, "POST", URL, document=talk("Where is Lisbon?")).json()
    assert (payload["title"], payload["version"], payload["own"]) == ("Where is Lisbon?", 1, True)
    one = f"{URL}/{payload['id']}"
    assert ada.get(one).json()["document"]["turns"][0]["text"] == "Where is Lisbon?"
    listed = ada.get(URL, {"q": "lisbon"}).json()
    assert (listed["kept"], [row["id"] for row in listed["conversations"]]) == (
        True,
        [payload["id"]],
    )
    assert ada.get(URL, {"q": "porto"}).json()["conversations"] == []
    written = send(ada, "PUT", one, document=talk("Where is Porto?"), version=1).json()
    assert written["version"] == 2
    late = send(ada, "PUT", one, document=talk("Late"), version=1)
    assert (late.status_code, late.json()["error"]["param"]) == (409, "version")
    named = send(ada, "PATCH", one, title="Cities", shared=True).json()
    assert (named["title"], named["shared"]) == ("Cities", True)
    assert send(ada, "DELETE", one).json() == {"id": payload["id"], "deleted": True}
    assert ada.get(one).status_code == 404


def test_fault_38_others_conversations_are_not_there(login: Login) -> None:
    ada, olga = login("ada"), login("olga")
    payload = send(ada, "POST", URL, document=talk("Ours")).json()
    one = f"{URL}/{payload['id']}"
    send(ada, "PATCH", one, shared=True)
    calls = [
        olga.get(one),
        send(olga, "PUT", one, document=talk("x"), version=1),
        send(olga, "PATCH", one, title="x"),
        send(olga, "DELETE", one),
        olga.get(URL, {"tenant": payload["tenant"]}),
        send(olga, "POST", f"{URL}?tenant={payload['tenant']}", document=talk("x")),
    ]
    assert [call.status_code for call in calls] == [404] * 6
    colleague = User.objects.create(username="carl")
    tenant = Tenant.objects.get(slug=payload["tenant"])
    Membership.objects.create(tenant=tenant, user=colleague, role=Role.VIEWER)
    carl = login("carl")
    seen = carl.get(one).json()
    assert (seen["own"], seen["by"], seen["document"]["leaf"]) == (False, "ada", "2")
    assert send(carl, "DELETE", one).status_code == 404


def test_folders_group_ones_own_conversations(login: Login) -> None:
    ada, olga = login("ada"), login("olga")
    ids = [send(ada, "POST", URL, document=talk(text)).json()["id"] for text in ("One", "Two")]
    moved = send(ada, "PATCH", f"{URL}/{ids[0]}", folder="Cities").json()
    assert moved["folder"] == "Cities"
    listed = ada.get(URL, {"folder": "Cities"}).json()
    assert ([row["id"] for row in listed["conversations"]], listed["folders"]) == (
        ids[:1],
        ["Cities"],
    )
    assert len(ada.get(URL).json()["conversations"]) == 2
    assert olga.get(URL).json()["folders"] == []
    assert send(olga, "PATCH", f"{URL}/{ids[0]}", folder="Mine").status_code == 404
    refused = send(ada, "PATCH", f"{URL}/{ids[0]}", folder="x" * 61)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "folder")
    send(ada, "PATCH", f"{URL}/{ids[0]}", folder="")
    assert ada.get(URL).json()["folders"] == []


def test_presets_are_the_tenants(login: Login) -> None:
    ada, olga = login("ada"), login("olga")
    body: dict[str, Any] = {"prompt": "Summarise this: ", "options": {"system": "Be brief."}}
    payload = send(ada, "POST", PRESETS, name=" Brief\n", **body).json()
    assert payload == {
        "id": payload["id"],
        "name": "Brief",
        "by": "ada",
        "may_change": True,
        **body,
    }
    assert ada.get(PRESETS).json() == {"presets": [payload]}
    assert olga.get(PRESETS).json() == {"presets": []}
    assert ada.get(f"{PRESETS}/{payload['id']}").json() == payload
    calls = [
        olga.get(f"{PRESETS}/{payload['id']}"),
        olga.get(PRESETS, {"tenant": "acme"}),
        send(olga, "POST", f"{PRESETS}?tenant=acme", name="Brief", **body),
        send(olga, "DELETE", f"{PRESETS}/{payload['id']}"),
    ]
    assert [call.status_code for call in calls] == [404] * 4
    for change, param in (
        ({"name": " "}, "name"),
        ({"name": 1}, "name"),
        ({"prompt": "\0"}, "prompt"),
        ({"prompt": "", "options": {}}, "prompt"),
        ({"prompt": "x" * 100_001}, "prompt"),
        ({"options": {"html": "x"}}, "options"),
        ({"options": []}, "options"),
    ):
        answer = send(ada, "POST", PRESETS, **{"name": "A", **body, **change})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert send(ada, "POST", PRESETS, name="A").json()["error"]["param"] == "prompt"
    assert send(ada, "DELETE", f"{PRESETS}/{payload['id']}").json()["deleted"] is True
    assert ada.get(PRESETS).json() == {"presets": []}


def test_bodies_that_are_no_conversation_are_refused(login: Login) -> None:
    ada = login("ada")
    one = f"{URL}/{send(ada, 'POST', URL, document=talk('x')).json()['id']}"
    for method, url, body, param in (
        ("POST", URL, {}, "document"),
        ("POST", URL, {"document": {"turns": [{"html": 1}]}}, "document"),
        ("PUT", one, {"document": talk("x")}, "version"),
        ("PUT", one, {"document": talk("x"), "version": "1"}, "version"),
        ("PATCH", one, {"title": ""}, "title"),
        ("PATCH", one, {}, "title"),
    ):
        answer = send(ada, method, url, **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert ada.post(URL, "{", content_type="application/json").status_code == 400


def test_without_a_csrf_token_nothing_is_changed(login: Login) -> None:
    login("ada")
    client = Client(enforce_csrf_checks=True)
    client.force_login(User.objects.get(username="ada"))
    assert send(client, "POST", URL, document=talk("x")).status_code == 403
    assert client.get(URL).json()["conversations"] == []
