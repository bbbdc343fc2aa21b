"""Usage, budgets, prices, webhook and data: who sees them, and who changes what."""

from __future__ import annotations

import csv
import html
import io
import re
import time
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from accounts import reauthentication as recent
from metering import actions as money
from metering import reports as report_pages
from metering import webhooks
from metering.ledger import insert_records
from metering.models import Budget, Price, UsageEntry, Webhook, WebhookDelivery
from metering.usage_record import UsageRecord
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import ApiKey, AuditEntry, Role, Tenant, User
from tests.console.conftest import Login

#: ada owns Acme, root is the operator, olga owns a rival tenant, nobody has none.
ROLES = {"adam": Role.ADMIN, "mia": Role.MEMBER, "vic": Role.VIEWER}
PAGES = ("usage", "budgets", "webhook", "data")


@pytest.fixture
def acme(rows: None) -> Tenant:
    tenant = Tenant.objects.get(slug="acme")
    for name, role in ROLES.items():
        user = User.objects.create_user(name, f"{name}@example.org", "a long password")
        actions.add_member(actor=SYSTEM_ACTOR, tenant=tenant, user=user, role=role)
    return tenant


def use(tenant: Tenant, number: int = 0, **fields: Any) -> None:
    values: dict[str, Any] = {
        "request_id": f"{tenant}-{number}",
        "tenant_id": tenant.pk,
        "endpoint": "chat",
        "model": "m",
        "prompt_tokens": 1000,
        "cached_tokens": 400,
        "completion_tokens": 50,
        "cost_nanos": 1_500_000,
        "status": 200,
        "duration_ms": 1.0,
        "started_at": datetime.now(UTC),
    }
    insert_records([UsageRecord(**{**values, **fields})])


def text_of(client: Client, path: str, **query: Any) -> str:
    return client.get(path, query).content.decode()


@pytest.mark.parametrize("page", PAGES)
def test_a_strangers_tenant_is_not_found(login: Login, acme: Tenant, page: str) -> None:
    for name in ("olga", "nobody"):
        answer = login(name).get(f"/console/{page}/?tenant=acme")
        assert answer.status_code == 404, name
        assert "Acme" not in answer.content.decode()
    assert login("nobody").get(f"/console/{page}/").status_code == 200


def test_posts_of_strangers_change_nothing(login: Login, acme: Tenant) -> None:
    client = login("olga")
    budget = money.set_budget(actor=SYSTEM_ACTOR, tenant=acme, period="day", tokens=5)
    money.set_webhook(actor=SYSTEM_ACTOR, tenant=acme, url="https://x.example/in")
    for path in ("budgets/set/", f"budgets/{budget.pk}/delete/", "webhook/set/", "webhook/delete/"):
        form = {"tenant": "acme", "period": "day", "tokens": 1, "url": "https://y.example"}
        assert client.post(f"/console/{path}", form).status_code == 404, path
    for path in ("webhook/test/", "data/keep/", "data/export/", "data/erase/"):
        form = {"tenant": "acme", "confirm": "acme", "days": 1}
        assert client.post(f"/console/{path}", form).status_code == 404, path
    assert (Budget.objects.count(), Webhook.objects.get().url) == (1, "https://x.example/in")
    assert Tenant.objects.get(slug="acme").erase_requested_at is None


# -- usage ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ada", "adam", "mia", "vic"])
def test_members_of_any_role_look_at_usage_in_groups(login: Login, acme: Tenant, name: str) -> None:
    mia = User.objects.get(username="mia")
    key = actions.create_key(actor=mia, tenant=acme).key
    use(acme, 1, key_id=key.pk, adapter="tone")
    use(acme, 2, user_id=mia.pk)
    use(Tenant.objects.get(slug="rival"), 3, model="rivals-own")
    client = login(name)
    today = datetime.now(UTC).date().isoformat()
    groups = ["model", "adapter", "user_id", "api_key_id"]
    text = text_of(client, "/console/usage/", first=today, last=today, by=groups)
    assert "tone" in text
    assert ">mia<" in text
    assert key.public_id in text
    assert ">0.003<" in text, "the sum"
    assert "rivals-own" not in text


def test_usage_names_no_person_and_no_key_of_another_tenant(login: Login, acme: Tenant) -> None:
    vic, rival = login("vic"), Tenant.objects.get(slug="rival")
    olga = User.objects.get(username="olga")
    key = actions.create_key(actor=SYSTEM_ACTOR, tenant=rival, name="secret project").key
    conditions = {"user": olga.pk, "key": key.public_id}
    for condition, value in conditions.items():
        query = {"first": "2026-03-01", "last": "2026-03-02", condition: value}
        text = vic.get("/console/usage/", query).content.decode()
        assert str(value) in text
        assert "olga" not in text
        assert "secret project" not in text


def test_usage_of_a_person_whose_id_no_database_holds_is_empty(login: Login, acme: Tenant) -> None:
    query = {"first": "2026-03-01", "last": "2026-03-02", "user": 2**63}
    assert login("vic").get("/console/usage/", query).status_code == 200


def test_the_file_has_a_line_a_day_and_group(login: Login, acme: Tenant) -> None:
    for number, model in enumerate(("m", "m", "=cmd")):
        use(acme, number, model=model)
    today = datetime.now(UTC).date().isoformat()
    query = {"first": today, "last": today, "by": "model", "format": "csv"}
    answer = login("ada").get("/console/usage/", query)
    assert answer["Content-Type"].startswith("text/csv")
    assert 'filename="usage-acme.csv"' in answer["Content-Disposition"]
    lines = lines_of(answer)
    assert [(line["day"], line["model"], line["requests"], line["cost"]) for line in lines] == [
        (today, "'=cmd", "1", "0.001500000"),
        (today, "m", "2", "0.003000000"),
    ]


def lines_of(answer: Any) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(b"".join(answer.streaming_content).decode())))


@pytest.mark.parametrize("of", [{"all": "yes"}, {"tenant": "acme"}])
def test_more_than_is_read_at_once_comes_page_by_page_and_the_file_has_all(
    login: Login, acme: Tenant, monkeypatch: pytest.MonkeyPatch, of: dict[str, str]
) -> None:
    for name in ("MAX_ROWS", "MAX_ROWS_AGGREGATED", "MAX_ROWS_EXPORT"):
        monkeypatch.setattr(report_pages, name, 3)
    ada = User.objects.get(username="ada")
    for number in range(6):  # two models a day
        started_at = datetime(2026, 3, 1 + number // 2, 12, tzinfo=UTC)
        use(acme, number, model=f"m{number}", started_at=started_at, user_id=ada.pk)
    query = {**of, "first": "2026-03-01", "last": "2026-03-03", "by": "model"}
    client = login("root")
    text = text_of(client, "/console/usage/", **query)
    assert ">m1<" in text
    assert ">m2<" not in text
    (rest,) = re.findall(r'href="(\?[^"]+)">Show the next days', text)
    text = text_of(client, f"/console/usage/{html.unescape(rest)}")
    assert ">m1<" not in text
    filtered = text_of(client, "/console/usage/", **query, user=str(ada.pk))
    (rest,) = re.findall(r'href="(\?[^"]+)">Show the next days', filtered)
    assert f"user={ada.pk}" in html.unescape(rest)
    assert ">m2<" in text
    assert "first=2026-03-03" in text
    lines = lines_of(client.get("/console/usage/", {**query, "format": "csv"}))
    assert [line["model"] for line in lines] == [f"m{number}" for number in range(6)]


def test_the_last_day_that_there_is_can_be_asked_for(login: Login, acme: Tenant) -> None:
    use(acme, 1)
    days = {"first": "9999-12-30", "last": "9999-12-31"}
    for page in ("usage", "requests"):
        assert login("ada").get(f"/console/{page}/", days).status_code == 200


def test_the_whole_installations_usage_is_the_operators(login: Login, acme: Tenant) -> None:
    use(acme, 1)
    use(Tenant.objects.get(slug="rival"), 2)
    today = datetime.now(UTC).date().isoformat()
    query = {"all": "yes", "first": today, "last": today, "by": "project_id"}
    text = text_of(login("root"), "/console/usage/", **query)
    assert "acme" in text
    assert "rival" in text
    assert login("ada").get("/console/usage/", query).status_code == 403
    query_of_tenant = {**query, "all": "no", "tenant": "acme"}
    assert "rival" not in text_of(login("ada"), "/console/usage/", **query_of_tenant)


@pytest.mark.parametrize(
    ("first", "last"), [("2026-02-01", "2026-01-01"), ("2020-01-01", "2026-01-01"), ("x", "y")]
)
def test_days_that_make_no_sense_are_told(
    login: Login, acme: Tenant, first: str, last: str
) -> None:
    answer = login("ada").get("/console/usage/", {"first": first, "last": last})
    assert answer.status_code == 200
    assert "field-error" in answer.content.decode()


# -- budgets and prices -----------------------------------------------------------------------


def test_admins_set_budgets_of_keys_and_operators_all(login: Login, acme: Tenant) -> None:
    key = actions.create_key(actor=User.objects.get(username="mia"), tenant=acme).key
    of_key = {"tenant": "acme", "key": key.pk, "period": "day", "amount": "1.5"}
    of_all = {"tenant": "acme", "period": "month", "tokens": "1000", "alert_percent": "50"}
    for name, form, status in (
        ("mia", of_key, 403),
        ("vic", of_key, 404),  # not even its name
        ("adam", of_all, 403),
        ("adam", of_key, 302),
        ("root", of_all, 302),
        ("root", {**of_all, "tokens": "many"}, 400),
        ("adam", {**of_key, "amount": "-1"}, 400),
    ):
        assert login(name).post("/console/budgets/set/", form).status_code == status, name
    assert {budget.alert_percent for budget in Budget.objects.all()} == {50, 80}
    seen = text_of(login("mia"), "/console/budgets/", tenant="acme")
    assert "of 1.50" in seen
    assert "Remove the budget" not in seen
    assert "of 1,000" in text_of(login("vic"), "/console/budgets/", tenant="acme")
    pk = Budget.objects.get(api_key=key).pk
    path = f"/console/budgets/{pk}/delete/"
    assert login("mia").post(path, {"tenant": "acme"}).status_code == 403
    assert login("adam").post(path, {"tenant": "acme"}).status_code == 302
    assert login("root").post(path, {"tenant": "acme"}).status_code == 404


def test_a_budget_or_price_of_what_is_not_there_is_told(login: Login, acme: Tenant) -> None:
    root = login("root")
    form = {"tenant": "acme", "period": "day", "tokens": "5"}
    for name, is_unknown in (("quil", True), ("quill", False), ("acme-private", False)):
        root.post("/console/budgets/set/", {**form, "model": name})
        page = text_of(root, "/console/budgets/", tenant="acme")
        assert (f"No model or adapter is called {name} today" in page) == is_unknown, name
    assert page.count("no model has this name now") == 1
    root.post("/console/prices/set/", {"model": "quil", "input": "1", "output": "2"})
    page = text_of(root, "/console/prices/")
    assert "is called quil today" in page
    assert "Remove" in page
    assert root.post(f"/console/prices/{Price.objects.get().pk}/delete/").status_code == 302
    assert not Price.objects.exists()


def test_a_budget_is_set_for_one_of_the_tenants_models(login: Login, acme: Tenant) -> None:
    page = text_of(login("root"), "/console/budgets/", tenant="acme")
    choices = page[page.index('<select id="budget-model"') :].partition("</select>")[0]
    assert '<option value="">all models</option>' in choices
    assert "<option>acme-private</option>" in choices
    assert "rival-private" not in choices


def test_amounts_stand_beside_their_currency_key_and_model(login: Login, acme: Tenant) -> None:
    key = actions.create_key(actor=User.objects.get(username="mia"), tenant=acme, name="ci").key
    use(acme, 1, key_id=key.pk, model="quill")
    money.set_budget(
        actor=SYSTEM_ACTOR, tenant=acme, key=key, model="quill", period="day", amount="1.5"
    )
    ada, today = login("ada"), datetime.now(UTC).date().isoformat()
    usage = text_of(
        ada, "/console/usage/", first=today, last=today, by=["model", "api_key_id"], tenant="acme"
    )
    (row,) = [row for row in usage.split("<tr>") if ">0.0015<" in row and "quill" in row]
    assert "ci" in row
    assert "Cost, USD" in usage
    assert "<dt>Cost</dt><dd>0.0015 USD</dd>" in usage
    budgets = text_of(ada, "/console/budgets/", tenant="acme")
    row = next(row for row in budgets.split("<tr>") if "of 1.50" in row)
    assert "key ci" in row
    assert "quill" in row
    assert '<th scope="col" class="end">USD</th>' in budgets


def test_a_price_is_set_for_one_of_the_models_that_are_there(login: Login, acme: Tenant) -> None:
    root = login("root")
    assert "<option>quill</option>" in root.get("/console/prices/").content.decode()
    root.post("/console/prices/set/", {"model": "quill", "input": "1", "output": "2"})
    page = root.get("/console/prices/").content.decode()
    assert '<div class="notice success" role="status">' in page  # green, not a warning's colour
    assert "<option>quill</option>" not in login("ada").get("/console/prices/").content.decode()


def test_prices_are_seen_by_members_and_set_by_operators(login: Login, acme: Tenant) -> None:
    form = {"model": "acme-private", "input": "0.15", "output": "0.6", "valid_from": ""}
    assert login("ada").post("/console/prices/set/", form).status_code == 403
    client = login("root")
    assert client.post("/console/prices/set/", form).status_code == 302
    assert "The price is set" in text_of(client, "/console/prices/")
    later = {**form, "valid_from": "2999-01-01T10:30", "cached": "0.05"}
    assert client.post("/console/prices/set/", later).status_code == 302
    assert client.post("/console/prices/set/", {**form, "input": "x"}).status_code == 400
    assert client.post("/console/prices/set/", {**form, "valid_from": "soon"}).status_code == 400
    text = text_of(login("vic"), "/console/prices/")
    assert "2999-01-01 10:30" in text
    assert "0.15" in text
    assert "Set a price" not in text
    for name in ("olga", "nobody"):  # of a model that isn't theirs
        text = text_of(login(name), "/console/prices/")
        assert "acme-private" not in text
        assert "No model that you may use has a price" in text
    started, coming = Price.objects.order_by("valid_from")
    assert login("ada").post(f"/console/prices/{coming.pk}/delete/").status_code == 403
    UsageEntry.objects.create(
        request_id="billed",
        tenant=acme,
        endpoint="chat",
        model="acme-private",
        cost_nanos=1,
        stream=False,
        started_at=started.valid_from,
        prompt_tokens=9,
        cached_tokens=0,
        completion_tokens=1,
        status=200,
        duration_ms=1.0,
    )
    assert client.post(f"/console/prices/{started.pk}/delete/").status_code == 409
    assert client.post(f"/console/prices/{coming.pk}/delete/").status_code == 302
    assert Price.objects.get() == started


# -- webhook ----------------------------------------------------------------------------------


def test_admins_set_try_and_take_away_the_webhook(
    login: Login, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "post_webhook", lambda *_: 500)
    client, form = login("adam"), {"tenant": "acme", "url": "https://x.example/in"}
    assert login("mia").post("/console/webhook/set/", form).status_code == 403
    assert client.post("/console/webhook/set/", form).status_code == 302
    secret = Webhook.objects.get().secret
    assert secret in text_of(client, "/console/webhook/", tenant="acme")
    assert secret not in text_of(client, "/console/webhook/", tenant="acme"), "once"
    bad = client.post("/console/webhook/set/", {**form, "url": "file:///etc/passwd"})
    assert bad.status_code == 400
    assert client.post("/console/webhook/test/", {"tenant": "acme"}).status_code == 302
    delivery = WebhookDelivery.objects.get()
    webhooks.deliver_event(delivery.pk)
    text = text_of(client, "/console/webhook/", tenant="acme")
    assert delivery.event_id in text
    assert ">500<" in text
    again = f"/console/webhook/{delivery.pk}/again/"
    assert client.post(again, {"tenant": "acme"}).status_code == 409, "it still waits"
    WebhookDelivery.objects.update(next_try_at=None)
    assert client.post(again, {"tenant": "acme"}).status_code == 302
    seen = text_of(login("mia"), "/console/webhook/", tenant="acme")
    assert "x.example" not in seen
    assert client.post("/console/webhook/delete/", {"tenant": "acme"}).status_code == 302
    assert not Webhook.objects.exists()


def test_operators_set_try_and_take_away_the_webhook_of_alerts(
    login: Login, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "post_webhook", lambda *_: 500)
    money.set_webhook(actor=SYSTEM_ACTOR, tenant=acme, url="https://x.example/acme")
    client, page = login("root"), "/console/alerts/"
    assert client.post(f"{page}webhook/set/", {"url": "file:///etc/passwd"}).status_code == 400
    assert client.post(f"{page}webhook/test/").status_code == 404
    assert client.post(f"{page}webhook/set/", {"url": "https://x.example/all"}).status_code == 302
    secret = Webhook.objects.get(tenant=None).secret
    assert secret in text_of(client, page)
    assert secret not in text_of(client, page), "once"
    assert client.post(f"{page}webhook/test/").status_code == 302
    event = WebhookDelivery.objects.get()
    webhooks.deliver_event(event.pk)
    text = text_of(client, page)
    assert event.event_id in text
    assert ">500<" in text
    assert "x.example/acme" not in text
    assert event.event_id not in text_of(login("adam"), "/console/webhook/", tenant="acme")
    again = f"{event.pk}/again/"
    assert client.post(f"{page}webhook/{again}").status_code == 409, "it still waits"
    WebhookDelivery.objects.update(next_try_at=None)
    foreign = login("adam").post(f"/console/webhook/{again}", {"tenant": "acme"})
    assert foreign.status_code == 404
    assert client.post(f"{page}webhook/{again}").status_code == 302
    assert client.post(f"{page}webhook/delete/").status_code == 302
    assert Webhook.objects.get().tenant == acme


# -- data -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adam", "mia", "vic"])
def test_a_tenants_data_is_its_owners(login: Login, acme: Tenant, name: str) -> None:
    client = login(name)
    assert "Download" not in text_of(client, "/console/data/", tenant="acme")
    form = {"tenant": "acme", "days": "30", "confirm": "acme"}
    for operation in ("keep", "export", "erase"):
        assert client.post(f"/console/data/{operation}/", form).status_code == 403, operation


def test_an_owner_keeps_takes_along_and_erases(
    login: Login, acme: Tenant, tmp_path: Path, settings: Any
) -> None:
    settings.QUIRE = settings.QUIRE.replace(storage_dir=tmp_path)
    client = login("ada")
    use(acme)
    assert client.post("/console/data/keep/", {"tenant": "acme", "days": "30"}).status_code == 302
    assert client.post("/console/data/keep/", {"tenant": "acme", "days": "0"}).status_code == 400
    acme.refresh_from_db()
    assert acme.keep_content_days == 30
    answer: Any = client.post("/console/data/export/", {"tenant": "acme"})
    assert answer["Content-Disposition"] == 'attachment; filename="acme.zip"'
    with zipfile.ZipFile(io.BytesIO(b"".join(answer.streaming_content))) as archive:
        assert "usage.jsonl" in archive.namelist()
    assert AuditEntry.objects.filter(action="tenant.export", actor_label="ada").exists()
    invalid_response = client.post("/console/data/erase/", {"tenant": "acme", "confirm": "Acme"})
    assert invalid_response.status_code == 400
    done = client.post("/console/data/erase/", {"tenant": "acme", "confirm": "acme"})
    assert done["Location"] == "/login/"
    assert client.get("/console/").status_code == 302, "logged out"


@pytest.mark.parametrize(
    "path",
    [
        *("budgets/set/", "webhook/set/", "webhook/delete/", "prices/set/"),
        *("data/keep/", "data/export/", "data/erase/"),
    ],
)
def test_changes_ask_for_a_recent_proof(login: Login, acme: Tenant, path: str) -> None:
    client = login("root")
    session = client.session
    session[recent.SESSION_KEY] = time.time() - 3600
    session.save()
    answer = client.post(f"/console/{path}", {"tenant": "acme"})
    assert answer["Location"].startswith("/account/reauthenticate/")


# -- the form of keys -------------------------------------------------------------------------


def test_a_key_is_made_with_limits_and_spending(login: Login, acme: Tenant) -> None:
    form = {
        "tenant": "acme",
        "name": "narrow",
        "scopes": ["inference"],
        "lifetime": "30",
        "allowed_models": "m, other",
        "endpoints": "/v1/embeddings",
        "addresses": "10.0.0.0/8",
        "requests_per_minute": "7",
        "max_context_tokens": "100",
        "spending": "12.5",
        "spending_period": "week",
    }
    assert login("ada").post("/console/keys/", form).status_code == 302
    key = ApiKey.objects.get(name="narrow")
    assert (key.allowed_models, key.endpoints) == (["m", "other"], ["/v1/embeddings"])
    assert (key.addresses, key.requests_per_minute) == (["10.0.0.0/8"], 7)
    assert (key.max_context_tokens, key.tokens_per_minute) == (100, None)
    budget = Budget.objects.get(api_key=key)
    assert (str(budget.amount), budget.period) == ("12.500000000", "week")


def test_a_key_whose_limits_are_refused_is_not_made(login: Login, acme: Tenant) -> None:
    form = {"tenant": "acme", "name": "bad", "scopes": ["inference"], "lifetime": ""}
    answer = login("ada").post("/console/keys/", {**form, "addresses": "10.0.0.1/8"})
    assert answer.status_code == 400
    assert "isn&#x27;t an address range" in answer.content.decode()
    invalid_response = login("ada").post("/console/keys/", {**form, "requests_per_minute": "many"})
    assert "field-error" in invalid_response.content.decode()
    spends = login("mia").post("/console/keys/", {**form, "spending": "1"})
    assert spends.status_code == 403, "Only admins set a spending limit"
    assert not ApiKey.objects.filter(name="bad").exists()
