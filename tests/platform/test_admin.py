"""The admin: read-only pages that lead to the console, and actions that go through `actions.py`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from catalog.actions import load_model
from catalog.models import McpServer, Replica, ServedModel
from engine.contract import redis_keys
from metering import actions as money
from metering.models import UsageEntry
from storage.models import StoredFile
from tenants.actions import create_user, set_staff_rights
from tenants.actors import SYSTEM_ACTOR
from tenants.models import ApiKey, AuditEntry, Tenant, User
from tests.platform.conftest import World
from tests.platform.test_usage_sums import used

pytestmark = [pytest.mark.django_db]

OURS = ("tenants", "catalog", "metering")


@pytest.fixture
def site(world: World, client: Client) -> Client:
    """A browser with the operator logged in."""
    client.force_login(world.operator)
    return client


def url(model: type, page: str, *args: object) -> str:
    return reverse(
        f"admin:{model._meta.app_label}_{model._meta.model_name}_{page}",  # type: ignore[attr-defined]
        args=args,
    )


def act(site: Client, model: type, action: str, *rows: Any) -> str:
    """Choose rows in the list and run an action; return the page that follows."""
    data = {"action": action, "_selected_action": [row.pk for row in rows]}
    return site.post(url(model, "changelist"), data, follow=True).content.decode()


def our_models() -> list[type]:
    return [model for model in admin.site._registry if model._meta.app_label in OURS]


def test_every_model_has_a_page_and_each_page_opens(site: Client, world: World) -> None:
    names = {model.__name__ for model in our_models()}
    assert names == {
        *("User", "Tenant", "Membership", "ApiKey", "AuditEntry"),
        *("ServedModel", "Replica", "McpServer", "UsageEntry", "Price", "Budget"),
    }
    for row in every_row(world):
        page = site.get(url(type(row), "changelist"), {"q": "a"})
        assert page.status_code == 200, row
        assert site.get(url(type(row), "change", row.pk)).status_code == 200, row


def test_what_operators_come_for_comes_first(site: Client) -> None:
    page = site.get("/admin/")
    labels = [app["app_label"] for app in page.context["app_list"]]
    assert labels[:5] == ["tenants", "catalog", "adapters", "metering", "storage"]
    assert {"Groups of staff"} <= {app["name"] for app in page.context["app_list"]}


@pytest.mark.parametrize("name", ["owner", "outsider"])
def test_people_without_staff_rights_see_nothing(world: World, client: Client, name: str) -> None:
    client.force_login(world.user(name))
    for model in our_models():
        assert client.get(url(model, "changelist")).status_code == 302


def test_secrets_are_on_no_page(site: Client, world: World) -> None:
    secrets = (world.acme.salt, world.acme.cache_namespace, world.key.digest)
    secrets += (world.operator.password,)
    for row in (world.acme, world.key, world.operator):
        for page in (url(type(row), "changelist"), url(type(row), "change", row.pk)):
            text = site.get(page).content.decode()
            assert not any(secret in text for secret in secrets), page


def every_row(world: World) -> list[Any]:
    """A row of each of our models."""
    used(world.acme, datetime.now(UTC))
    served = ServedModel.objects.create(name="m", source="hub/m")
    Replica.objects.create(served_model=served, replica_id="r")
    McpServer.objects.create(name="weather", url="https://tools.example.com/mcp")
    money.set_price(actor=SYSTEM_ACTOR, model="m", input_per_million="1", output_per_million="2")
    money.set_budget(actor=SYSTEM_ACTOR, tenant=world.acme, period="day", tokens=5)
    return [model.objects.first() for model in our_models()]  # type: ignore[attr-defined]


def test_no_page_adds_changes_or_deletes_rows(site: Client, world: World) -> None:
    for row in every_row(world):
        model = type(row)
        assert site.get(url(model, "add")).status_code == 403, model
        assert site.post(url(model, "delete", row.pk), {"post": "yes"}).status_code == 403, model
        if model not in (Tenant, User):
            assert site.post(url(model, "change", row.pk), {}).status_code == 403, model
        act(site, model, "delete_selected", row)
        assert model.objects.filter(pk=row.pk).exists(), model


def test_each_page_leads_to_the_consoles(site: Client, world: World) -> None:
    for row in every_row(world):
        model = type(row)
        console = reverse(admin.site._registry[model].console_page)  # type: ignore[attr-defined]
        for page in (url(model, "changelist"), url(model, "change", row.pk)):
            assert f'<a href="{console}">' in site.get(page).content.decode(), page


def test_keys_are_revoked_from_the_list(site: Client, world: World) -> None:
    assert "1 keys revoked" in act(site, ApiKey, "revoke", world.key)
    assert ApiKey.objects.get(pk=world.key.pk).state() == "revoked"
    assert AuditEntry.objects.get(action="api_key.revoke").actor == world.operator


@pytest.mark.parametrize("state", ["active", "revoked", "expired"])
def test_keys_are_filtered_by_state(site: Client, world: World, state: str) -> None:
    ends = timezone.now() + timedelta(minutes={"active": 1, "expired": -1}.get(state, 1))
    ApiKey.objects.filter(pk=world.key.pk).update(
        expires_at=ends, revoked_at=ends if state == "revoked" else None
    )
    for visible in ("active", "revoked", "expired"):
        page = site.get(url(ApiKey, "changelist"), {"state": visible}).content.decode()
        assert (world.key.prefix in page) == (visible == state), visible


def limits_form(tenant: Tenant, **changes: object) -> dict[str, object]:
    fields = ("name", "weight", "kv_reserved_fraction", "kv_max_fraction", "max_priority")
    return {
        **{name: getattr(tenant, name) for name in (*fields, "time_zone")},
        "memberships-TOTAL_FORMS": 0,
        "memberships-INITIAL_FORMS": 0,
        **changes,
    }


def test_operators_change_limits_on_a_tenants_page(site: Client, world: World) -> None:
    page = url(Tenant, "change", world.acme.pk)
    changes = {"weight": "2.5", "kv_max_fraction": "0.5", "tokens_per_minute": "500"}
    site.post(page, limits_form(world.acme, slug="other", **changes))
    acme = Tenant.objects.get(slug="acme")
    assert (acme.weight, acme.kv_max_fraction, acme.tokens_per_minute) == (2.5, 0.5, 500)
    entry = AuditEntry.objects.get(action="tenant.update")
    assert entry.actor == world.operator
    assert entry.details["changes"]["weight"] == [1.0, 2.5]
    refused = site.post(page, limits_form(acme, weight="-1"))
    assert "greater than or equal to 0.01" in refused.content.decode()
    refused = site.post(
        page, limits_form(acme, kv_max_fraction="0.2", kv_reserved_fraction="0.4"), follow=True
    )
    assert "errorlist" in refused.content.decode() or "messagelist" in refused.content.decode()
    acme.refresh_from_db()
    assert (acme.weight, acme.kv_reserved_fraction) == (2.5, 0.0)


def test_tenants_are_switched_and_get_new_namespaces(site: Client, world: World) -> None:
    assert "2 tenants switched off" in act(site, Tenant, "deactivate", world.acme, world.rival)
    assert Tenant.objects.filter(active=False).count() == 2
    act(site, Tenant, "activate", world.acme)
    assert Tenant.objects.get(pk=world.acme.pk).active
    page = act(site, Tenant, "rotate_cache_salts", world.acme)
    assert "1 tenants got a new cache namespace" in page
    assert Tenant.objects.get(pk=world.acme.pk).salt != world.acme.salt
    verbs = AuditEntry.objects.filter(actor_id=world.operator.pk).values_list("action", flat=True)
    assert list(verbs[:4]) == [
        *("tenant.rotate_cache_salt", "tenant.activate", "tenant.deactivate", "tenant.deactivate"),
    ]


def test_models_are_loaded_and_unloaded(site: Client, world: World, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    model = load_model(actor=SYSTEM_ACTOR, name="m", source=str(tmp_path))
    assert "loaded already" in act(site, ServedModel, "load", model)
    assert "1 models are being unloaded" in act(site, ServedModel, "unload", model)
    assert "1 models are being loaded" in act(site, ServedModel, "load", model)
    actors = AuditEntry.objects.filter(action__startswith="model.").values_list("actor", flat=True)
    assert set(actors[:2]) == {world.operator.pk}


def test_staff_see_what_they_may_view_and_act_on_nothing(world: World, client: Client) -> None:
    staff = create_user(actor=world.operator, username="staff", is_staff=True)
    viewed = Permission.objects.filter(codename__in=("view_tenant", "view_apikey", "change_tenant"))
    set_staff_rights(actor=world.operator, user=staff, groups=[], permissions=viewed)
    client.force_login(staff)
    assert client.get(url(Tenant, "changelist")).status_code == 200
    assert client.get(url(User, "changelist")).status_code == 403
    page = url(Tenant, "change", world.acme.pk)
    assert client.post(page, limits_form(world.acme, weight="3")).status_code == 403
    act(client, ApiKey, "revoke", world.key)
    act(client, Tenant, "deactivate", world.acme)
    act(client, Tenant, "rotate_cache_salts", world.acme)
    world.key.refresh_from_db()
    assert world.key.state() == "active"
    acme = Tenant.objects.get(pk=world.acme.pk)
    assert (acme.active, acme.weight, acme.salt) == (True, 1.0, world.acme.salt)


def test_a_replica_is_drained_by_a_word_in_its_inbox(
    site: Client, live_redis: str, key_prefix: str
) -> None:
    import redis

    from engine.contract import messages as protocol

    model = ServedModel.objects.create(name="m", source="hub/m")
    ready = Replica.objects.create(served_model=model, replica_id="r1", state="ready")
    failed = Replica.objects.create(served_model=model, replica_id="r2", state="failed")
    page = act(site, Replica, "drain", ready, failed)
    assert "1 replicas are being drained" in page
    assert "R2 is failed: only a ready one can be drained" in page
    client = redis.Redis.from_url(live_redis)
    ((_, fields),) = client.xrange(redis_keys.inbox_key("r1", key_prefix))
    assert protocol.decode_inbox(fields[protocol.STREAM_FIELD]) == protocol.ControlRequest(
        command="drain"
    )
    client.close()
    assert AuditEntry.objects.get(action="replica.drain").target_label == "r1"


def test_without_redis_a_drain_is_refused_and_not_audited(site: Client, settings: Any) -> None:
    settings.REDIS_URL = "unix:///nowhere/redis.sock"
    model = ServedModel.objects.create(name="m", source="hub/m")
    ready = Replica.objects.create(served_model=model, replica_id="r1", state="ready")
    assert "no connection to Redis" in act(site, Replica, "drain", ready)
    assert not AuditEntry.objects.filter(action="replica.drain").exists()


@pytest.mark.parametrize(
    "path",
    [
        "//admin/tenants/apikey/",
        "/admin//tenants/apikey/",
        "/admin/../admin/tenants/apikey/",
        "/%2fadmin/tenants/apikey/",
        "/admin/tenants%2fapikey/",
        "/static/../admin/tenants/apikey/",
        "http://localhost/admin/tenants/apikey/",
    ],
)
@pytest.mark.parametrize("host", ["localhost", "localhost:1", "evil.example", "a b", "localhost@x"])
def test_fault_31_no_spelling_of_a_path_or_host_passes_the_login_by(
    world: World, client: Client, path: str, host: str
) -> None:
    answer = client.get("/", headers={"host": host}, PATH_INFO=path)
    assert answer.status_code in (301, 302, 400, 404)
    assert world.key.prefix not in answer.content.decode()
    assert not answer.headers.get("Location", "/").startswith(("//", "http"))


def test_a_headers_id_finds_the_ledgers_entry(site: Client, world: World) -> None:
    used(world.acme, datetime.now(UTC))
    UsageEntry.objects.update(request_id="chatcmpl-0123456789abcdef")
    used(world.acme, datetime.now(UTC), tokens=77_777)
    page = site.get(url(UsageEntry, "changelist"), {"q": "req-0123456789abcdef"}).content.decode()
    assert "77,777" not in page
    assert "1 usage entry" in page


def test_a_list_without_rows_says_why(site: Client, world: World) -> None:
    page = site.get(url(ServedModel, "changelist")).content.decode()
    assert "No served model yet." in page
    page = site.get(url(StoredFile, "changelist")).content.decode()
    assert "No file yet." in page
    page = site.get(url(Tenant, "changelist"), {"q": "nothing-like-this"}).content.decode()
    assert "No tenant matches." in page
    assert "No tenant" not in site.get(url(Tenant, "changelist")).content.decode()
