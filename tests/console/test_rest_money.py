"""Budgets and prices in the management API, for each kind of caller."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from adapters.models import Adapter, AdapterAlias
from catalog.models import ServedModel
from metering import actions as money
from metering.budgets import rebuild_counters
from metering.models import Budget, Price, UsageEntry
from metering.rules import load_rules
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import Role, Tenant
from tests.console.test_ledger_pages import use
from tests.platform.conftest import World, make_world

pytestmark = [pytest.mark.django_db(transaction=True)]

BUDGETS, PRICES = "/api/tenants/acme/budgets/", "/api/prices/"
PRICE = {"model": "m", "input_per_million": "1", "output_per_million": "2"}
BUDGET = {"period": "day", "tokens": 5}


@pytest.fixture
def world(live_redis: str) -> World:
    return make_world()


def secret_of(world: World, who: str) -> str:
    """A key that manages, of a person or of a service account with the role of an admin."""
    scopes, account = ["tenant:admin"], None
    if who == "service account":
        account = actions.create_service_account(
            actor=SYSTEM_ACTOR, tenant=world.acme, name="robot", role=Role.ADMIN
        )
    if who == "operator":
        scopes = ["operator", "tenant:admin"]
    maker: Any = SYSTEM_ACTOR if account else world.user(who)
    tenant = world.rival if who == "outsider" else world.acme
    return actions.create_key(
        actor=maker, tenant=tenant, scopes=scopes, service_account=account
    ).secret


def call(method: str, path: str, secret: str = "", body: Any = None) -> Any:
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    data = b"" if body is None else json.dumps(body).encode()
    return Client().generic(method, path, data, "application/json", headers=headers)


#: Who gets what: [list budgets, set a tenant's, set a key's, list prices, set one].
MANAGERS = {
    "operator": [200, 201, 201, 200, 201],
    "owner": [200, 403, 201, 200, 403],
    "admin": [200, 403, 201, 200, 403],
    "service account": [200, 403, 201, 200, 403],
    "outsider": [404, 404, 404, 200, 403],
}


@pytest.mark.parametrize("who", list(MANAGERS))
def test_each_route_for_each_key(world: World, who: str) -> None:
    secret = secret_of(world, who)
    replies = [
        call("GET", BUDGETS, secret),
        call("POST", BUDGETS, secret, BUDGET),
        call("POST", BUDGETS, secret, {**BUDGET, "key": world.key.pk}),
        call("GET", PRICES, secret),
        call("POST", PRICES, secret, PRICE),
    ]
    assert [reply.status_code for reply in replies] == MANAGERS[who]
    for reply in replies:
        if reply.status_code >= 400:
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("who", "status"), [("member", 200), ("viewer", 200), ("outsider", 404)])
def test_people_see_the_budgets_of_their_tenant_and_their_keys(
    world: World, who: str, status: int
) -> None:
    money.set_budget(actor=SYSTEM_ACTOR, tenant=world.acme, **BUDGET)
    money.set_budget(actor=SYSTEM_ACTOR, tenant=world.acme, key=world.key, **BUDGET)
    client = Client()
    client.force_login(world.user(who))
    reply = client.get(BUDGETS)
    assert reply.status_code == status
    if status == 200:  # the key is the member's
        assert reply.json()["count"] == {"member": 2, "viewer": 1}[who]
    assert client.get(PRICES).status_code == 200


def test_prices_name_nothing_that_is_another_tenants(world: World) -> None:
    model = ServedModel.objects.create(name="shared", source="demo/model", public=True)
    secret_model = ServedModel.objects.create(name="acmes-own", source="demo/model", public=False)
    secret_model.tenants.add(world.acme)
    whose: dict[str, Any] = {"tenant": world.acme, "served_model": model, "name": "tone"}
    AdapterAlias.objects.create(adapter=Adapter.objects.create(**whose), **whose)
    names = {"shared", "acmes-own", "shared:tone#acme"}
    for name in names:
        money.set_price(actor=SYSTEM_ACTOR, **{**PRICE, "model": name})

    def seen(who: str) -> set[str]:
        results = call("GET", PRICES, secret_of(world, who)).json()["results"]
        return {row["model"] for row in results}

    assert seen("operator") == seen("admin") == names
    assert seen("outsider") == {"shared"}


def test_nobody_and_plain_keys_get_nothing(world: World) -> None:
    for path in (BUDGETS, PRICES):
        assert call("GET", path).status_code in (401, 403)
        assert call("GET", path, "sk-quire-wrong").status_code == 401
        assert call("GET", path, world.secret).json()["error"]["code"] == "insufficient_scope"


def test_a_name_that_nothing_has_comes_with_a_warning(world: World) -> None:
    ServedModel.objects.create(name="quill", source="demo/model", public=True)
    operator = secret_of(world, "operator")
    for name, warning in (("quil", "No model or adapter is called quil today"), ("quill", "")):
        budget = {"period": "month", "tokens": 9, "model": name}
        response = call("POST", BUDGETS, operator, budget)
        assert (response.status_code, response.json()["warning"].partition(":")[0]) == (
            201,
            warning,
        )
        again = call("GET", f"{BUDGETS}{response.json()['id']}/", operator).json()
        assert again["warning"] == response.json()["warning"]
        price = call("POST", PRICES, operator, {**PRICE, "model": name})
        assert (price.status_code, price.json()["warning"].partition(":")[0]) == (201, warning)
    # What others' adapters are called, lists of prices don't tell.
    assert {price["warning"] for price in call("GET", PRICES, operator).json()["results"]} == {""}


def test_budgets_show_what_is_spent_and_prices_their_history(world: World) -> None:
    operator = secret_of(world, "operator")
    payload = call("POST", BUDGETS, operator, {"period": "month", "amount": "12.5"}).json()
    assert (payload["amount"], payload["spent_amount"], payload["tokens"]) == (
        "12.5",
        "0.000000000",
        None,
    )
    again = call("POST", BUDGETS, operator, {"period": "month", "tokens": 9}).json()
    assert again["id"] == payload["id"]
    assert call("GET", f"{BUDGETS}{payload['id']}/", operator).json()["tokens"] == 9
    assert call("GET", f"{BUDGETS}?period=day", operator).json()["count"] == 0
    foreign = call("GET", f"/api/tenants/rival/budgets/{payload['id']}/", operator)
    assert foreign.status_code == 404
    assert call("DELETE", f"{BUDGETS}{payload['id']}/", operator).status_code == 204
    assert not Budget.objects.exists()
    later = {**PRICE, "valid_from": "2999-01-01T00:00:00Z"}
    first = call("POST", PRICES, operator, later).json()
    money.set_price(actor=SYSTEM_ACTOR, **PRICE)
    assert call("GET", f"{PRICES}?model=m", operator).json()["count"] == 2
    assert call("DELETE", f"{PRICES}{first['id']}/", operator).status_code == 204
    started_price = Price.objects.get()
    use(Tenant.objects.get(slug="acme"), model="m")
    assert call("DELETE", f"{PRICES}{started_price.pk}/", operator).status_code == 409
    UsageEntry.objects.all().delete()
    assert call("DELETE", f"{PRICES}{started_price.pk}/", operator).status_code == 204
    bad = call("POST", PRICES, operator, {**PRICE, "input_per_million": "x"})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "input_per_million")


def test_many_budgets_are_read_at_once(world: World) -> None:
    secret, asked = secret_of(world, "operator"), []
    for count in (1, 6):
        for number in range(count):
            money.set_budget(
                actor=SYSTEM_ACTOR, tenant=world.acme, model=f"m{number}", period="day", tokens=5
            )
        rules = load_rules(world.acme.pk)
        for budget in rules.budgets:
            rebuild_counters(rules.limit(budget, timezone.now()))  # as the first request does
        call("GET", BUDGETS, secret)  # what is remembered for a while is there
        with CaptureQueriesContext(connection) as seen:
            assert len(call("GET", BUDGETS, secret).json()["results"]) == count
        asked.append(len(seen))
    assert asked[0] == asked[1]
