"""Tenants' pages, fairness and history: who sees what, and who may set what."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from history.models import TrafficSample
from history.read import complete_until
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import AuditEntry, Role, Tenant, User
from tests.console.conftest import Login
from tests.console.seed import PASSWORD

#: name: role in Acme. olga owns Rival; root is the operator.
PEOPLE = {"ada": "owner", "max": "member", "vera": "viewer"}
FORM = {"weight": "2", "kv_reserved_fraction": "0.5", "kv_max_fraction": "0.8"}


@pytest.fixture
def people(login: Login) -> Login:
    acme = Tenant.objects.get(slug="acme")
    for name in ("max", "vera"):
        user = User.objects.create_user(name, f"{name}@example.org", PASSWORD)
        actions.add_member(actor=SYSTEM_ACTOR, tenant=acme, user=user, role=Role(PEOPLE[name]))
    return login


@pytest.fixture
def samples(people: Login) -> None:
    """20 s ago Acme and Rival had 100 and 300 tokens of service."""
    start = complete_until() - 10
    for slug, tokens in (("acme", 100), ("rival", 300)):
        pk = Tenant.objects.get(slug=slug).pk
        amounts: dict[str, Any] = {"requests": 1, "completion_tokens": tokens}
        TrafficSample.objects.create(
            width=10, start=start, tenant_id=pk, model="quill", gaps={"20": tokens}, **amounts
        )
    full: dict[str, Any] = {"requests": 2, "completion_tokens": 400}
    TrafficSample.objects.create(width=10, start=start, tenant_id=0, model="quill", **full)


@pytest.mark.parametrize("name", PEOPLE)
def test_members_see_their_tenants_home_and_are_led_to_it(people: Login, name: str) -> None:
    client = people(name)
    assert client.get("/console/tenants/")["Location"] == "/console/tenants/acme/"
    html = client.get("/console/tenants/acme/").content.decode()
    assert "Share and limits" not in html
    assert "rival" not in html.lower()


@pytest.mark.parametrize("name", ["olga", "nobody"])
@pytest.mark.parametrize(
    "path",
    [
        "/console/tenants/acme/",
        "/console/fairness/?tenant=acme",
        "/console/api/history?tenant=acme",
        "/console/api/fairness?tenant=acme",
        "/console/api/overview?tenant=acme",
        "/console/?tenant=acme",
    ],
)
def test_fault_23_a_strangers_tenant_is_not_there(people: Login, name: str, path: str) -> None:
    answer = people(name).get(path)
    assert answer.status_code == 404
    assert "Acme" not in answer.content.decode()


def test_an_operator_who_is_no_member_is_not_called_one(people: Login) -> None:
    assert '<span class="badge">Operator</span>' in (
        people("root").get("/console/tenants/acme/").content.decode()
    )
    assert '<span class="badge">Owner</span>' in (
        people("ada").get("/console/tenants/acme/").content.decode()
    )


def test_a_tenant_without_members_has_no_owner(people: Login) -> None:
    root = people("root")
    actions.create_tenant(actor=SYSTEM_ACTOR, name="Vacant")
    page = root.get("/console/tenants/vacant/").content.decode()
    assert "No members yet" in page
    assert ">Owner<" not in page


def test_only_operators_set_limits_and_make_tenants(people: Login) -> None:
    for name, status in (("ada", 403), ("max", 403), ("olga", 404), ("nobody", 404)):
        assert people(name).post("/console/tenants/acme/limits/", FORM).status_code == status
    for name in ("ada", "nobody"):
        assert people(name).post("/console/tenants/create/", {"name": "New"}).status_code == 403
    assert Tenant.objects.get(slug="acme").weight == 1
    root = people("root")
    assert root.post("/console/tenants/acme/limits/", FORM).status_code == 302
    acme = Tenant.objects.get(slug="acme")
    assert (acme.weight, acme.kv_reserved_fraction, acme.kv_max_fraction) == (2, 0.5, 0.8)
    assert AuditEntry.objects.filter(action="tenant.update", tenant=acme).count() == 1
    response = root.post("/console/tenants/create/", {"name": "New Press"})
    assert response["Location"] == "/console/tenants/new-press/"


def test_fault_45_the_sum_of_reserves_stands_beside_the_field(people: Login) -> None:
    Tenant.objects.filter(slug="rival").update(kv_reserved_fraction=0.6)
    root = people("root")
    page = root.get("/console/tenants/acme/").content.decode()
    assert "Other tenants reserve 60 % of at most 90 %: 30 % are left" in page
    refused = root.post("/console/tenants/acme/limits/", FORM)
    assert refused.status_code == 400
    html = refused.content.decode()
    assert "Reserved KV cache of all tenants would be 1.1" in html
    assert 'value="0.5"' in html
    assert Tenant.objects.get(slug="acme").kv_reserved_fraction == 0
    assert "60 %" in root.get("/console/fairness/").content.decode()


@pytest.mark.parametrize("invalid", ["nan", "inf", "", "a", "1e400"])
def test_what_is_no_number_is_refused(people: Login, invalid: str) -> None:
    answer = people("root").post("/console/tenants/acme/limits/", FORM | {"weight": invalid})
    assert answer.status_code == 400
    assert Tenant.objects.get(slug="acme").weight == 1


def tokens(client: Client, query: str = "") -> int:
    return sum(
        client.get(f"/console/api/history?range=5m{query}").json()["sums"]["completion_tokens"]
    )


def test_a_member_sees_their_own_traffic_and_an_operator_all(samples: None, people: Login) -> None:
    assert tokens(people("ada")) == 100
    assert tokens(people("olga")) == 300
    root = people("root")
    assert tokens(root) == 400
    assert tokens(root, "&tenant=rival") == 300
    assert tokens(root, "&model=other") == 0
    groups = root.get("/console/api/history?range=5m&by=tenant").json()["groups"]
    assert {group["name"]: sum(group["tokens"]) for group in groups} == {"acme": 100, "rival": 300}


def service(client: Client) -> tuple[dict[str, int], bool]:
    """Tokens by tenant on the page of fairness, and whether these are all."""
    data = client.get("/console/api/fairness?range=5m").json()
    return {tenant["name"]: sum(tenant["tokens"]) for tenant in data["tenants"]}, data["whole"]


def test_a_members_history_names_nobody_else(samples: None, people: Login) -> None:
    ada = people("ada")
    assert ada.get("/console/api/history?by=tenant").status_code == 404
    assert service(ada) == ({"Acme": 100}, False)  # the others' would be Rival's
    assert "its tokens aren't shown" in ada.get("/console/fairness/?range=5m").content.decode()
    third = actions.create_tenant(actor=SYSTEM_ACTOR, name="Third")
    start = complete_until() - 10
    TrafficSample.objects.create(
        width=10, start=start, tenant_id=third.pk, model="quill", completion_tokens=50
    )
    assert service(ada) == ({"Acme": 100, "All other tenants": 350}, True)
    assert "Rival" not in ada.get("/console/fairness/?range=5m").content.decode()
    assert "Rival" in people("root").get("/console/fairness/?range=5m").content.decode()


@pytest.mark.parametrize("query", ["range=1y", "by=key"])
def test_odd_questions_are_refused_by_name(people: Login, query: str) -> None:
    answer = people("ada").get(f"/console/api/history?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.split("=")[0]


def test_who_belongs_nowhere_is_told_so(people: Login) -> None:
    for path in ("/console/", "/console/fairness/", "/console/tenants/"):
        answer = people("nobody").get(path)
        assert answer.status_code == 200
        assert "no tenant" in answer.content.decode().lower()
