"""Tenants, models and webhooks in the management API, for each kind of caller."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from catalog.models import ServedModel
from metering import webhooks
from metering.models import Webhook
from tenants.models import Tenant
from tests.console.test_rest_money import call, secret_of
from tests.platform.conftest import World, make_world

pytestmark = [pytest.mark.django_db(transaction=True)]
ACME, HOOKS = "/api/tenants/acme/", "/api/tenants/acme/webhooks/"


@pytest.fixture
def world(live_redis: str, tmp_path: Path, settings: Any) -> World:
    settings.QUIRE = settings.QUIRE.replace(storage_dir=tmp_path)
    return make_world()


#: Who gets what: [look, name, weight, kept days, a new tenant, webhook, models, namespace].
MANAGERS = {
    "operator": [200, 200, 200, 200, 201, 201, 200, 204],
    "owner": [200, 200, 403, 200, 403, 201, 403, 204],
    "admin": [200, 200, 403, 403, 403, 201, 403, 403],
    "service account": [200, 200, 403, 403, 403, 201, 403, 403],
    "outsider": [404, 404, 404, 404, 403, 404, 403, 404],
}


@pytest.mark.parametrize("who", list(MANAGERS))
def test_each_route_for_each_key(world: World, who: str) -> None:
    secret = secret_of(world, who)
    replies = [
        call("GET", ACME, secret),
        call("PATCH", ACME, secret, {"name": "Acme Inc"}),
        call("PATCH", ACME, secret, {"weight": 2}),
        call("PATCH", ACME, secret, {"keep_content_days": 30}),
        call("POST", "/api/tenants/", secret, {"name": "New"}),
        call("POST", HOOKS, secret, {"url": "https://x.example/in"}),
        call("GET", "/api/models/", secret),
        call("POST", f"{ACME}new-cache-namespace/", secret),
    ]
    assert [reply.status_code for reply in replies] == MANAGERS[who]
    for reply in replies:
        if reply.status_code >= 400:
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("who", "status"), [("member", 403), ("viewer", 403), ("outsider", 404)])
def test_people_without_the_role_change_nothing(world: World, who: str, status: int) -> None:
    client = Client()
    client.force_login(world.user(who))
    bodies: dict[str, dict[str, str]] = {
        f"{ACME}export/": {},
        f"{ACME}erase/": {"confirm": "acme"},
        HOOKS: {"url": "https://x.example/in"},
    }
    for path, body in bodies.items():
        assert client.post(path, body, "application/json").status_code == status, path
    assert client.get(HOOKS).status_code == status
    assert client.patch(ACME, {"name": "x"}, "application/json").status_code == status


def test_a_tenant_is_added_changed_and_switched_off(world: World) -> None:
    operator = secret_of(world, "operator")
    payload = call("POST", "/api/tenants/", operator, {"name": "New Co", "owner": "member"}).json()
    assert (payload["slug"], payload["active"], payload["weight"]) == ("new-co", True, 1.0)
    path = "/api/tenants/new-co/"
    changed = call("PATCH", path, operator, {"active": False, "tokens_per_minute": 9}).json()
    assert (changed["active"], changed["tokens_per_minute"]) == (False, 9)
    bad = call("PATCH", path, operator, {"keep_usage_days": 3})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "keep_usage_days")
    response = call("POST", "/api/tenants/", operator, {"name": "Acme"})
    assert response.status_code == 409
    missing = call("POST", "/api/tenants/", operator, {"name": "X", "owner": "nobody-at-all"})
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "owner")


def test_an_owner_takes_along_and_erases_in_person_alone(world: World) -> None:
    key = secret_of(world, "owner")
    assert call("POST", f"{ACME}export/", key).status_code == 403
    assert call("POST", f"{ACME}erase/", key, {"confirm": "acme"}).status_code == 403
    client = Client()
    client.force_login(world.owner)
    answer: Any = client.post(f"{ACME}export/")
    with zipfile.ZipFile(io.BytesIO(b"".join(answer.streaming_content))) as archive:
        assert "tenant.json" in archive.namelist()
    invalid_response = client.post(f"{ACME}erase/", {"confirm": "x"}, "application/json")
    assert (invalid_response.status_code, invalid_response.json()["error"]["param"]) == (
        400,
        "confirm",
    )
    gone = client.post(f"{ACME}erase/", {"confirm": "acme"}, "application/json")
    assert (gone.status_code, gone.json()["active"]) == (202, False)
    assert call("GET", ACME, key).status_code == 401
    assert Tenant.objects.get(pk=world.acme.pk).erase_requested_at is not None


def test_a_webhook_is_set_tried_and_taken_away(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "post_webhook", lambda *_: 500)
    admin = secret_of(world, "admin")
    payload = call("POST", HOOKS, admin, {"url": "https://x.example/in"}).json()
    assert payload["secret"] == Webhook.objects.get().secret
    assert "secret" not in call("GET", HOOKS, admin).json()["results"][0]
    queued = call("POST", f"{HOOKS}{payload['id']}/test/", admin).json()
    assert (queued["kind"], queued["state"]) == ("webhook.test", "waiting")
    webhooks.deliver_event(queued["id"])
    log = "/api/tenants/acme/webhook-deliveries/"
    (row,) = call("GET", log, admin).json()["results"]
    assert (row["attempts"], row["status"]) == (1, 500)
    assert call("POST", f"{log}{row['id']}/again/", admin).status_code == 409
    foreign = f"/api/tenants/rival/webhook-deliveries/{row['id']}/"
    assert call("GET", foreign, secret_of(world, "outsider")).status_code == 404
    assert call("DELETE", f"{HOOKS}{payload['id']}/", admin).status_code == 204
    assert call("GET", HOOKS, admin).json()["count"] == 0


def test_an_operator_looks_after_the_catalogue(world: World, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    operator = secret_of(world, "operator")
    body = {"name": "m", "source": str(tmp_path), "settings": {"max_model_len": 64}}
    response = call("POST", "/api/models/", operator, body)
    assert (response.status_code, response.json()["desired_state"]) == (201, "loaded")
    path = f"/api/models/{response.json()['id']}/"
    shared = call("PATCH", path, operator, {"public": False, "tenants": ["acme"]}).json()
    assert (shared["public"], shared["tenants"]) == (False, ["acme"])
    assert call("PATCH", path, operator, {"settings": {"nonsense": 1}}).status_code == 400
    assert call("DELETE", path, operator).status_code == 409
    assert call("POST", f"{path}unload/", operator).json()["desired_state"] == "unloaded"
    assert call("POST", f"{path}load/", operator).json()["desired_state"] == "loaded"
    assert call("POST", f"{path}unload/", operator).status_code == 200
    assert call("DELETE", path, operator).status_code == 204
    assert not ServedModel.objects.exists()
