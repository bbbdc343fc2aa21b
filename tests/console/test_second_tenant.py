"""An owner of one tenant names another's rows: in their own paths, in bodies, filters, headers."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.db import transaction
from django.test import Client
from django_filters import ModelChoiceFilter, ModelMultipleChoiceFilter
from django_filters.rest_framework import DjangoFilterBackend

from adapters.models import Adapter, AdapterUpload
from catalog.models import ServedModel
from management_api.urls import router
from metering.models import Budget, Webhook
from tenants.models import ApiKey, AuditEntry, ServiceAccount, Tenant, User
from tests.console.conftest import Login
from tests.console.test_every_role import (
    EVERYBODY,
    MEMBERS,
    ROUTES,
    SENT,
    path_of,
    people,
    rows_of,
)
from tests.console.test_every_route import ALL, sample
from tests.console.test_rest import Caller, by_key

__all__ = ["people"]  # a fixture
#: Routes about one row of a tenant, which the path names by its number.
OF_A_ROW = [
    (method, route)
    for method, routes in ROUTES.items()
    for route, minimum in routes.items()
    if re.search("<(?!slug|kind)", route) and minimum not in (MEMBERS, EVERYBODY)
]
BELOW = "api/tenants/<tenant>/"
#: Headers that a proxy or another product takes a tenant, a person or a path from.
HEADERS = {
    "x-forwarded-for": "127.0.0.1",
    "x-forwarded-user": "ada",
    "remote-user": "ada",
    "x-tenant": "acme",
    "x-quire-tenant": "acme",
    "openai-organization": "acme",
    "openai-project": "acme",
    "x-original-url": "/api/tenants/acme/keys/",
    "x-rewrite-url": "/api/tenants/acme/keys/",
    "x-http-method-override": "DELETE",
}


@pytest.mark.parametrize("way", ["own tenant", "none", "own in the body, theirs in the address"])
def test_fault_23_pages_find_no_row_of_another_tenant_below_ones_own(
    people: dict[str, Client], way: str
) -> None:
    olga, rows = people["outsider"], rows_of(Tenant.objects.get(slug="acme"))
    operations = AuditEntry.objects.count()
    body = {} if way == "none" else {"tenant": "rival"}
    address = "?tenant=acme" if way.endswith("address") else ""
    problems = []
    for method, route in OF_A_ROW:
        with transaction.atomic():
            path = path_of(route, rows)
            if method == "GET":
                response = olga.get(path, body)
            else:
                sent = {name: value for name, value in SENT.items() if name != "tenant"}
                response = olga.post(f"{path}{address}", {**sent, **body})
            # 401: asked in a thread, where these rows aren't yet.
            refused = response.status_code in (401, 403, 404)
            if not refused or AuditEntry.objects.count() != operations:
                problems.append((method, route, response.status_code))
            transaction.set_rollback(True)
    assert len(OF_A_ROW) > 25
    assert problems == []


@pytest.fixture
def theirs(people: dict[str, Client]) -> dict[str, Any]:
    """A row of Acme's for each kind below `/api/tenants/<tenant>/`."""
    rows = rows_of(Tenant.objects.get(slug="acme"))
    upload = AdapterUpload.objects.create(
        public_id=f"upload-{7:032x}",
        tenant=Tenant.objects.get(slug="acme"),
        served_model=ServedModel.objects.get(name="quill"),
        name="tone",
        files={"adapter_model.safetensors": 1},
        num_bytes=1,
    )
    names = {f"{kind}/": rows[f"console/{kind}/"] for kind in ("members", "invitations", "keys")}
    return names | {
        "service-accounts/": rows["console/service-accounts/"],
        "budgets/": rows["console/budgets/"],
        "webhooks/": Webhook.objects.get(tenant__slug="acme").pk,
        "webhook-deliveries/": rows["console/webhook/"],
        "audit/": AuditEntry.objects.filter(tenant__slug="acme").latest("pk").pk,
        "adapters/uploads/": upload.public_id,
        "adapters/": rows["console/adapters/"],
        "requests/": rows["console/requests/"],
    }


@pytest.fixture
def rivals(people: dict[str, Client]) -> dict[str, Caller]:
    """Olga, by session and by a key that may all that she may."""
    from tenants import actions

    olga, rival = User.objects.get(username="olga"), Tenant.objects.get(slug="rival")
    wide = ["inference", "models:read", "tenant:admin", "usage:read"]
    key = actions.create_key(actor=olga, tenant=rival, scopes=wide)
    return {"session": Caller(people["outsider"]), "key": by_key(key.secret)}


def below_rival(route: str, theirs: dict[str, Any]) -> str:
    """The path with Acme's row in Rival's place. A kind without a row here is an error."""
    rest = route.removeprefix(BELOW)
    kind = max((name for name in theirs if rest.startswith(name)), key=len)
    parts = rest.removeprefix(kind).split("/")
    parts[0] = str(theirs[kind])
    return sample("/".join(["api/tenants/rival", *kind.strip("/").split("/"), *parts]))


def test_fault_23_the_api_finds_no_row_of_another_tenant_below_ones_own(
    rivals: dict[str, Caller], theirs: dict[str, Any]
) -> None:
    asked, problems, initial_audit_entry_count = 0, [], AuditEntry.objects.count()
    for route in (route for route in ALL if route.startswith(BELOW)):
        if "<" not in route.removeprefix(BELOW):
            continue
        path = below_rival(route, theirs)
        for name, rival in rivals.items():
            for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
                body = {"role": "viewer"} if "/members/" in path else {}
                response = rival.ask(method, path, body)
                asked += response.status_code == 404
                if response.status_code not in (404, 405):
                    problems.append((name, method, path, response.status_code))
    assert problems == []
    assert asked > 50
    assert AuditEntry.objects.count() == initial_audit_entry_count


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("keys/", {"service_account": "service-accounts/"}, None),
        ("budgets/", {"key": "keys/", "period": "day", "tokens": 1}, None),
        ("adapters/", {"model": "acme-private", "name": "x", "repository": "a/b"}, "model"),
        ("adapters/uploads/", {"model": "acme-private", "name": "x", "files": {"a": 1}}, "model"),
        ("keys/", {"tenant": "acme"}, "tenant"),
        ("keys/", {"created_by": 1}, "created_by"),
        ("members/", {"username": "olga", "role": "owner", "tenant": "acme"}, None),
        ("invitations/", {"email": "x@example.org", "tenant": "acme"}, "tenant"),
        ("service-accounts/", {"name": "x", "tenant": "acme"}, "tenant"),
        ("webhooks/", {"url": "https://x.example/", "tenant": "acme"}, "tenant"),
        ("budgets/", {"period": "day", "tokens": 1, "tenant": "acme"}, "tenant"),
    ],
)
def test_bodies_name_no_row_of_another_tenant(
    rivals: dict[str, Caller],
    theirs: dict[str, Any],
    path: str,
    body: dict[str, Any],
    field: str | None,
) -> None:
    sent = {
        name: theirs.get(value, value) if isinstance(value, str) else value
        for name, value in body.items()
    }
    models = (ApiKey, Budget, Adapter, ServiceAccount, Webhook, AdapterUpload)
    initial_model_counts = [model.objects.count() for model in models]
    for rival in rivals.values():
        response = rival.ask("POST", f"/api/tenants/rival/{path}", sent)
        assert response.status_code in (400, 403, 404)
        assert field is None or response.json()["error"]["param"] == field
        assert "acme" not in response.content.decode().replace("acme-private", "")
    assert [model.objects.count() for model in models] == initial_model_counts
    response = rivals["session"].ask("PATCH", "/api/tenants/rival/", {"slug": "acme"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "slug")


def lists() -> list[str]:
    return [
        f"/{route.replace('<tenant>', 'rival')}"
        for route in ALL
        if route.startswith(BELOW) and "<" not in route.removeprefix(BELOW)
    ]


def test_headers_and_parameters_show_no_other_rows(
    rivals: dict[str, Caller], theirs: dict[str, Any]
) -> None:
    tricks = "tenant=acme&tenant__slug=acme&tenant_id=1&ordering=digest&user__password__regex=.&"
    tricks += "created_by__password__startswith=p&api_key__tenant__slug=acme&all=yes"
    paths = [*lists(), "/api/tenants/"]
    assert len(paths) > 8
    for rival in rivals.values():
        for path in paths:
            baseline_results = rival.get(path)["results"]
            assert rival.get(f"{path}?{tricks}")["results"] == baseline_results
            bold = Caller(rival.client, {**HEADERS, **rival.headers})
            assert bold.get(path)["results"] == baseline_results
        assert rival.get("/api/requests/?tenant=acme")["results"] == []
        assert rival.get(f"/api/requests/?id={theirs['requests/']}")["results"] == []
        assert rival.ask("GET", f"/api/requests/{theirs['requests/']}/").status_code == 404
        assert rival.ask("GET", "/api/tenants/acme/", None).status_code == 404
    olga = rivals["session"].client
    for path in ("/console/api/overview", "/console/api/history", "/console/api/fairness"):
        assert olga.get(path, {"tenant": "acme"}).status_code == 404, path


def test_fault_23_filters_tell_nothing_of_numbers_that_are_anothers(
    rivals: dict[str, Caller], theirs: dict[str, Any]
) -> None:
    missing_id = 10**6
    for rival in rivals.values():
        for path, name, number in (
            ("keys/", "service_account", theirs["service-accounts/"]),
            ("budgets/", "api_key", theirs["keys/"]),
        ):
            responses = [
                rival.ask("GET", f"/api/tenants/rival/{path}?{name}={value}")
                for value in (number, missing_id)
            ]
            assert [response.status_code for response in responses] == [200, 200]
            assert responses[0].json()["results"] == responses[1].json()["results"] == []
        for value in ("0", "-1", "x", "1.5", str(2**63), "9" * 400):
            responses = rival.ask("GET", f"/api/tenants/rival/keys/?service_account={value}")
            assert (responses.status_code, responses.json()["error"]["param"]) == (
                400,
                "service_account",
            )


def test_no_filter_looks_another_row_up() -> None:
    looked = 0
    for _, view, name in router.registry:
        if view.queryset is None or DjangoFilterBackend not in view.filter_backends:
            continue
        filterset_class = DjangoFilterBackend().get_filterset_class(view(), view.queryset)
        for word, base_filter in (filterset_class.base_filters if filterset_class else {}).items():
            looked += 1
            assert not isinstance(base_filter, ModelChoiceFilter | ModelMultipleChoiceFilter), (
                name,
                word,
            )
    assert looked > 20


def test_a_proof_of_isolation_is_for_admins_of_both(rivals: dict[str, Caller]) -> None:
    for tenant, other in (("rival", "acme"), ("acme", "rival"), ("acme", "")):
        body = {"tenant": tenant, "other": other, "model": "quill"}
        response = rivals["session"].ask("POST", "/api/isolation/", body)
        assert response.status_code == 404, (tenant, other)


def test_a_viewer_of_ones_own_tenant_changes_nothing(
    people: dict[str, Client], login: Login, theirs: dict[str, Any]
) -> None:
    viewer, initial_audit_entry_count = Caller(people["viewer"]), AuditEntry.objects.count()
    for route in (route for route in ALL if route.startswith("api/")):
        path = sample(route)
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            response = viewer.ask(method, path, {})
            assert response.status_code in (400, 403, 404, 405), (method, path)
    assert AuditEntry.objects.count() == initial_audit_entry_count
