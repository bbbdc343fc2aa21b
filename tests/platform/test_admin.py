"""The admin: every page opens, what it changes goes through the actions, secrets show once."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from django.contrib import admin
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from catalog.models import Replica, ServedModel
from engine.contract import redis_keys
from metering import actions as money
from metering.budgets import _limits
from metering.models import Budget, Price, UsageEntry
from metering.redis_scripts import sync_client
from tenants.actors import SYSTEM_ACTOR
from tenants.models import ApiKey, AuditEntry, Membership, Tenant, User
from tests.platform.conftest import World
from tests.platform.test_usage_sums import used

pytestmark = [pytest.mark.django_db]

OURS = ("tenants", "catalog", "metering")


@pytest.fixture
def site(world: World, client: Client) -> Client:
    """A browser with the operator logged in."""
    client.force_login(world.operator)
    return client


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


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
    used(world.acme, datetime.now(UTC))
    model = ServedModel.objects.create(name="m", source="hub/m")
    Replica.objects.create(served_model=model, replica_id="r", state="failed", detail="no memory")
    names = {model.__name__ for model in our_models()}
    assert names == {
        *("User", "Tenant", "Membership", "ApiKey", "AuditEntry"),
        *("ServedModel", "Replica", "UsageEntry", "Price", "Budget"),
    }
    money.set_price(actor=SYSTEM_ACTOR, model="m", input_per_million="1", output_per_million="2")
    money.set_budget(actor=SYSTEM_ACTOR, tenant=world.acme, period="day", tokens=5)
    for registered in our_models():
        page = site.get(url(registered, "changelist"), {"q": "a"})
        assert page.status_code == 200, registered
        row = registered.objects.first()  # type: ignore[attr-defined]
        assert site.get(url(registered, "change", row.pk)).status_code == 200, registered


def test_what_operators_come_for_comes_first(site: Client) -> None:
    page = site.get("/admin/")
    labels = [app["app_label"] for app in page.context["app_list"]]
    assert labels[:5] == ["tenants", "catalog", "adapters", "metering", "storage"]
    assert {"Groups of staff"} <= {app["name"] for app in page.context["app_list"]}


def test_moments_say_their_time_zone_and_figures_their_unit(site: Client, world: World) -> None:
    used(world.acme, datetime(2026, 11, 21, 15, 4, tzinfo=UTC))
    page = site.get(url(UsageEntry, "changelist")).content.decode()
    assert "2026-11-21 15:04 UTC" in page
    row = UsageEntry.objects.get()
    assert f"{row.prompt_tokens:,}" in page
    assert f"{row.duration_ms:.0f} ms" in page


@pytest.mark.parametrize("name", ["owner", "outsider"])
def test_people_without_staff_rights_see_nothing(world: World, client: Client, name: str) -> None:
    client.force_login(world.user(name))
    for model in our_models():
        assert client.get(url(model, "changelist")).status_code == 302


def test_a_new_keys_secret_is_shown_on_the_answer_and_never_again(
    site: Client, world: World
) -> None:
    before = set(ApiKey.objects.values_list("pk", flat=True))
    answer = site.post(
        url(ApiKey, "add"),
        {"tenant": world.acme.pk, "name": "ci", "scopes": ["inference", "models:read"]},
        follow=True,
    )
    assert answer.redirect_chain == [("/admin/tenants/apikey/created/", 302)]
    key = ApiKey.objects.exclude(pk__in=before).get()
    (secret,) = [word for word in answer.content.decode().split('"') if word.startswith("sk-quire")]
    assert secret.startswith(f"sk-quire-{key.public_id}")
    assert "no-store" in answer["Cache-Control"]
    assert (key.tenant, key.name, key.created_by) == (world.acme, "ci", world.operator)
    tail = secret[20:]
    for page in (
        "/admin/tenants/apikey/created/",
        url(ApiKey, "changelist"),
        url(ApiKey, "change", key.pk),
        url(AuditEntry, "changelist"),
    ):
        assert tail not in site.get(page, follow=True).content.decode()
    assert tail not in str(site.session.items()) + str(site.cookies)


def test_a_bad_key_form_says_what_is_wrong(site: Client, world: World) -> None:
    page = site.post(url(ApiKey, "add"), {"tenant": world.acme.pk, "scopes": ["root"]})
    assert "root is not one of the available choices" in page.content.decode()
    past = {"expires_at_0": "2020-01-01", "expires_at_1": "00:00"}
    page = site.post(
        url(ApiKey, "add"), {"tenant": world.acme.pk, "scopes": ["inference"], **past}, follow=True
    )
    assert "expires_at must be in the future" in page.content.decode().lower()
    assert ApiKey.objects.count() == 2


def test_keys_are_revoked_from_the_list_and_neither_changed_nor_deleted(
    site: Client, world: World
) -> None:
    assert "1 keys revoked" in act(site, ApiKey, "revoke", world.key)
    assert ApiKey.objects.get(pk=world.key.pk).state() == "revoked"
    entry = AuditEntry.objects.filter(action="api_key.revoke").get()
    assert entry.actor == world.operator
    assert site.post(url(ApiKey, "delete", world.key.pk), {"post": "yes"}).status_code == 403
    changed = site.post(url(ApiKey, "change", world.rival_key.pk), {"name": "mine"})
    assert changed.status_code == 403


@pytest.mark.parametrize("state", ["active", "revoked", "expired"])
def test_keys_are_filtered_by_state(site: Client, world: World, state: str) -> None:
    page = site.get(url(ApiKey, "changelist"), {"state": state}).content.decode()
    assert (world.key.prefix in page) == (state == "active")


def test_tenants_are_made_changed_and_switched(site: Client, world: World) -> None:
    form = {
        "slug": "new",
        "name": "New",
        "weight": "2.5",
        "kv_reserved_fraction": "0.25",
        "kv_max_fraction": "0.5",
        "max_priority": "0",
        "requests_per_minute": "",
        "tokens_per_minute": "500",
        "time_zone": "Europe/Berlin",
        "memberships-TOTAL_FORMS": "0",
        "memberships-INITIAL_FORMS": "0",
    }
    site.post(url(Tenant, "add"), form)
    tenant = Tenant.objects.get(slug="new")
    assert (tenant.weight, tenant.tokens_per_minute) == (2.5, 500)
    assert (tenant.kv_reserved_fraction, tenant.kv_max_fraction) == (0.25, 0.5)
    site.post(url(Tenant, "change", tenant.pk), {**form, "weight": "3"})
    tenant.refresh_from_db()
    assert tenant.weight == 3
    page = site.post(url(Tenant, "change", tenant.pk), {**form, "weight": "-1"})
    assert "greater than or equal to 0.01" in page.content.decode()
    act(site, Tenant, "deactivate", tenant, world.rival)
    assert Tenant.objects.filter(active=False).count() == 2
    act(site, Tenant, "activate", tenant)
    salt = Tenant.objects.get(slug="new").salt
    assert "1 tenants got a new cache namespace" in act(site, Tenant, "rotate_cache_salts", tenant)
    assert Tenant.objects.get(slug="new").salt != salt
    verbs = list(AuditEntry.objects.values_list("action", flat=True)[:6])
    assert verbs == [
        "tenant.rotate_cache_salt",
        "tenant.activate",
        "tenant.deactivate",
        "tenant.deactivate",
        "tenant.update",
        "tenant.create",
    ]
    assert site.post(url(Tenant, "delete", tenant.pk), {"post": "yes"}).status_code == 403


def test_the_salt_is_on_no_page(site: Client, world: World) -> None:
    for page in (url(Tenant, "changelist"), url(Tenant, "change", world.acme.pk)):
        text = site.get(page).content.decode()
        assert world.acme.salt not in text
        assert world.acme.cache_namespace not in text


def test_members_are_added_changed_and_removed(site: Client, world: World) -> None:
    site.post(
        url(Membership, "add"),
        {"tenant": world.acme.pk, "user": world.outsider.pk, "role": "viewer"},
    )
    made = Membership.objects.get(tenant=world.acme, user=world.outsider)
    site.post(url(Membership, "change", made.pk), {"role": "admin"})
    made.refresh_from_db()
    assert made.role == "admin"
    last = Membership.objects.get(tenant=world.rival)
    page = site.post(url(Membership, "change", last.pk), {"role": "viewer"}, follow=True)
    assert "needs at least one owner" in page.content.decode()
    page = site.post(url(Membership, "delete", last.pk), {"post": "yes"}, follow=True)
    assert "needs at least one owner" in page.content.decode()
    act(site, Membership, "delete_selected", made)
    site.post(
        url(Membership, "changelist"),
        {"action": "delete_selected", "_selected_action": [made.pk, last.pk], "post": "yes"},
    )
    assert Membership.objects.filter(pk=last.pk).exists()
    assert not Membership.objects.filter(pk=made.pk).exists()


def test_users_are_made_with_an_audit_row(site: Client, world: World) -> None:
    password = "correct horse battery"
    site.post(
        url(User, "add"),
        {
            "username": "new",
            "password1": password,
            "password2": password,
            "usable_password": "true",
            "memberships-TOTAL_FORMS": "0",
            "memberships-INITIAL_FORMS": "0",
        },
    )
    assert User.objects.get(username="new").check_password(password)
    entry = AuditEntry.objects.get(action="user.create", target_label="new")
    assert password not in str(entry.details)
    site.post(url(User, "delete", User.objects.get(username="new").pk), {"post": "yes"})
    assert AuditEntry.objects.filter(action="user.delete", target_label="new").exists()


REPLICAS = {"replicas-TOTAL_FORMS": "0", "replicas-INITIAL_FORMS": "0"}


def test_a_model_is_added_loaded_changed_and_unloaded(
    site: Client, world: World, folder: str
) -> None:
    form = {
        "name": "m",
        "source": folder,
        "num_replicas": "1",
        "idle_minutes": "5",
        "num_spares": "0",
        "node": "",
        "managed": "on",
        "tenants": [world.acme.pk],
        **REPLICAS,
    }
    site.post(url(ServedModel, "add"), form)
    model = ServedModel.objects.get()
    assert (model.desired_state, model.idle_minutes, model.public) == ("loaded", 5, False)
    ServedModel.objects.update(settings={"max_model_len": 64})
    page = site.get(url(ServedModel, "change", model.pk)).content.decode()
    assert "<code>max_model_len</code> 64" in page
    assert f'href="/console/models/{model.pk}/settings/"' in page
    assert list(model.tenants.all()) == [world.acme]
    site.post(url(ServedModel, "change", model.pk), {**form, "num_replicas": "2"})
    model.refresh_from_db()
    assert (model.num_replicas, model.settings) == (2, {"max_model_len": 64})
    assert "loaded already" in act(site, ServedModel, "load", model)
    assert "1 models are being unloaded" in act(site, ServedModel, "unload", model)
    assert "1 models are being loaded" in act(site, ServedModel, "load", model)
    page = site.post(url(ServedModel, "delete", model.pk), {"post": "yes"}, follow=True)
    assert "unload it first" in page.content.decode()
    act(site, ServedModel, "unload", model)
    Replica.objects.create(served_model=model, replica_id="r", state="stopped")  # it ran once
    assert "Are you sure" in site.get(url(ServedModel, "delete", model.pk)).content.decode()
    site.post(url(ServedModel, "delete", model.pk), {"post": "yes"})
    assert not ServedModel.objects.exists()
    actors = set(AuditEntry.objects.filter(action__startswith="model.").values_list("actor"))
    assert actors == {(world.operator.pk,)}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("source", "/no/such/folder", "There is no folder"),
        ("idle_minutes", "-1", "greater than or equal to 0"),
        ("name", "a b", "Letters, digits"),
    ],
)
def test_a_bad_model_form_says_what_is_wrong_beside_the_field(
    site: Client, folder: str, field: str, value: str, message: str
) -> None:
    form = {"name": "m", "source": folder, "idle_minutes": "0", "num_replicas": "1", **REPLICAS}
    page = site.post(url(ServedModel, "add"), {**form, field: value})
    assert message in page.content.decode()
    assert not ServedModel.objects.exists()


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


@pytest.mark.parametrize("model", [AuditEntry, UsageEntry, Replica])
def test_log_ledger_and_replicas_are_read_only(site: Client, world: World, model: type) -> None:
    from datetime import UTC, datetime

    used(world.acme, datetime.now(UTC))
    served = ServedModel.objects.create(name="m", source="hub/m")
    Replica.objects.create(served_model=served, replica_id="r")
    row = model.objects.first()  # type: ignore[attr-defined]
    assert site.get(url(model, "add")).status_code == 403
    assert site.post(url(model, "change", row.pk), {}).status_code == 403
    assert site.post(url(model, "delete", row.pk), {"post": "yes"}).status_code == 403
    count = model.objects.count()  # type: ignore[attr-defined]
    act(site, model, "delete_selected", row)
    assert model.objects.count() == count  # type: ignore[attr-defined]


def test_the_ledger_shows_sums_of_what_is_selected(site: Client, world: World) -> None:
    from datetime import UTC, datetime

    used(world.acme, datetime.now(UTC), tokens=1234)
    used(world.rival, datetime.now(UTC), tokens=1)
    page = site.get(url(UsageEntry, "changelist")).content.decode()
    assert "1,235 prompt tokens" in page
    page = site.get(url(UsageEntry, "changelist"), {"tenant__id__exact": world.acme.pk})
    assert "1,234 prompt tokens" in page.content.decode()


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


def test_a_page_of_budgets_asks_no_more_for_many_than_for_one(
    site: Client, world: World, live_redis: str
) -> None:
    def add(tenant: Tenant, key: ApiKey | None, period: str) -> None:
        made = money.set_budget(
            actor=world.operator, tenant=tenant, key=key, period=period, tokens=100
        )
        (limit,) = _limits([made], datetime.now(UTC))
        with sync_client() as client:
            client.hset(limit.redis_key, mapping={"tokens": 7 + made.pk, "nanos": 0})

    def asked() -> int:
        with CaptureQueriesContext(connection) as queries:
            page = site.get(url(Budget, "changelist")).content.decode()
        for made in Budget.objects.all():
            assert f"{7 + made.pk} tokens, 0.000000000" in page
        return len(queries)

    add(world.acme, None, "day")
    add(world.acme, world.key, "day")
    few = asked()
    for period in ("week", "month"):
        add(world.acme, None, period)
        add(world.acme, world.key, period)
        add(world.rival, None, period)
        add(world.rival, world.rival_key, period)
    assert asked() == few


def test_prices_and_budgets_are_set_in_the_admin_through_the_actions(
    site: Client, world: World, live_redis: str
) -> None:
    price = {"model": "m", "valid_from_0": "2999-01-01", "valid_from_1": "00:00"}
    price |= {"input_per_million": "1", "cached_per_million": "1", "output_per_million": "2"}
    site.post(url(Price, "add"), price)
    later = Price.objects.get()
    page = site.post(url(Price, "add"), {**price, "valid_from_0": "2020-01-01"}, follow=True)
    assert "must not be in the past" in page.content.decode()
    site.post(url(Price, "delete", later.pk), {"post": "yes"})
    assert not Price.objects.exists()
    budget = {"tenant": world.acme.pk, "period": "day", "tokens": "7", "alert_percent": "80"}
    site.post(url(Budget, "add"), budget)
    made = Budget.objects.get()
    site.post(
        url(Budget, "change", made.pk), {"tokens": "9", "amount": "1.5", "alert_percent": "0"}
    )
    made.refresh_from_db()
    assert (made.tokens, made.period, made.alert_percent) == (9, "day", 0)
    assert "0 tokens, 0.000000000" in site.get(url(Budget, "changelist")).content.decode()
    site.post(url(Budget, "delete", made.pk), {"post": "yes"})
    verbs = AuditEntry.objects.values_list("action", flat=True)[:5]
    assert {"price.set", "price.delete", "budget.create", "budget.update"} <= set(verbs) | {
        "price.set"
    }
    assert AuditEntry.objects.filter(action="budget.delete", actor_id=world.operator.pk).exists()


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
    assert "Add the first one." in page
    assert "Quire adds these itself" in site.get(url(UsageEntry, "changelist")).content.decode()
    page = site.get(url(Tenant, "changelist"), {"q": "nothing-like-this"}).content.decode()
    assert "No tenant matches." in page
    assert "No tenant" not in site.get(url(Tenant, "changelist")).content.decode()
