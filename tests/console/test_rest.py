"""The management API: every route, asked by everybody who could."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from django.core.cache import cache
from django.db import transaction
from django.test import Client

from accounts import reauthentication as recent
from inference.web import authentication as guesses
from tenants import actions
from tenants import api_keys as scopes
from tenants.actors import SYSTEM_ACTOR
from tenants.models import ApiKey, AuditEntry, Membership, Role, Tenant, User
from tests.console.conftest import Login

PASSWORD = "a quiet page of ink"


@dataclass
class Caller:
    """Somebody who asks: a session, or a key."""

    client: Client
    headers: dict[str, str] = field(default_factory=dict)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        sent = {} if body is None else {"data": json.dumps(body)}
        return self.client.generic(
            method, path, content_type="application/json", headers=self.headers, **sent
        )

    def get(self, path: str) -> Any:
        return self.ask("GET", path).json()


def by_key(secret: str) -> Caller:
    return Caller(Client(), {"authorization": f"Bearer {secret}"})


@pytest.fixture
def callers(login: Login) -> dict[str, Caller]:
    """Acme's people by session and by key, strangers, the operator, programs of both tenants."""
    acme, rival = Tenant.objects.get(slug="acme"), Tenant.objects.get(slug="rival")
    for name in ("admin", "member", "viewer"):
        user = User.objects.create_user(name, f"{name}@example.org", PASSWORD)
        actions.add_member(actor=SYSTEM_ACTOR, tenant=acme, user=user, role=Role(name))
    names = {"owner": "ada", "outsider": "olga", "operator": "root"}
    callers = {
        name: Caller(login(names.get(name, name)))
        for name in ("owner", "admin", "member", "viewer", "outsider", "operator")
    }
    callers["stranger"] = Caller(Client())
    wide = ["inference", "models:read", "tenant:admin", "usage:read"]

    def key(tenant: Tenant, actor: Any = SYSTEM_ACTOR, scopes: Any = wide, **more: Any) -> Caller:
        key = actions.create_key(actor=actor, tenant=tenant, scopes=scopes, **more)
        return by_key(key.secret)

    callers["admin's key"] = key(acme, User.objects.get(username="admin"))
    callers["outsider's key"] = key(rival, User.objects.get(username="olga"))
    callers["operator's key"] = key(acme, User.objects.get(username="root"), scopes.ALL)
    callers["plain key"] = key(acme, scopes=["inference"])
    for name, tenant in (("program", acme), ("rival program", rival)):
        account = actions.create_service_account(
            actor=SYSTEM_ACTOR, tenant=tenant, name=name, role=Role.ADMIN
        )
        callers[name] = key(tenant, service_account=account)
    return callers


#: What is answered to whom: those who run the tenant, its other people, strangers, operators.
MANAGERS = ("owner", "admin", "admin's key", "program")
OPERATORS = ("operator", "operator's key")
MEMBERS = ("member", "viewer")
OUTSIDERS = ("outsider", "outsider's key", "rival program")


def expect(ok: int, *, members: int, outsiders: int = 404, managers: int = 0) -> dict[str, int]:
    expected = dict.fromkeys(OPERATORS, ok)
    expected |= dict.fromkeys(MANAGERS, managers or ok)
    expected |= dict.fromkeys(MEMBERS, members)
    expected |= dict.fromkeys(OUTSIDERS, outsiders)
    return {**expected, "stranger": 401, "plain key": 403}


NEW_USER = {"username": "new", "email": "new@example.org"}
#: (method, path, body): status by caller. Names in braces are kinds of `Rows`.
ROUTES: dict[tuple[str, str, str], dict[str, int]] = {
    ("GET", "users/", ""): expect(200, managers=403, members=403, outsiders=403),
    ("POST", "users/", json.dumps(NEW_USER)): expect(201, managers=403, members=403, outsiders=403),
    ("GET", "users/{user}/", ""): expect(200, managers=403, members=403, outsiders=403),
    ("PATCH", "users/{user}/", '{"first_name": "V"}'): expect(
        200, managers=403, members=403, outsiders=403
    ),
    ("POST", "users/{user}/password/", '{"password": "a quiet page"}'): expect(
        204, managers=403, members=403, outsiders=403
    ),
    ("DELETE", "users/{user}/", ""): expect(204, managers=403, members=403, outsiders=403),
    ("GET", "audit/", ""): expect(200, managers=403, members=403, outsiders=403),
    ("GET", "audit/{entry}/", ""): expect(200, managers=403, members=403, outsiders=403),
    ("GET", "tenants/", ""): expect(200, members=200, outsiders=200),
    ("GET", "tenants/acme/", ""): expect(200, members=200),
    ("POST", "tenants/", '{"name": "Made"}'): expect(201, managers=403, members=403, outsiders=403),
    ("PATCH", "tenants/acme/", '{"name": "Acme"}'): expect(200, members=403),
    ("POST", "tenants/acme/new-cache-namespace/", ""): {
        **expect(204, members=403, managers=403),
        "owner": 204,
    },
    ("POST", "tenants/acme/export/", ""): {
        **expect(200, members=403, managers=403),
        "owner": 200,
    },
    # With a name that isn't the tenant's: a right one would end the others' turn.
    ("POST", "tenants/acme/erase/", '{"confirm": "no"}'): {
        **expect(400, members=403, managers=403),
        "owner": 400,
    },
    ("GET", "tenants/acme/members/", ""): expect(200, members=200),
    ("GET", "tenants/acme/members/{membership}/", ""): expect(200, members=200),
    ("POST", "tenants/acme/members/", '{"username": "nobody", "role": "viewer"}'): expect(
        201, managers=403, members=403
    ),
    ("PATCH", "tenants/acme/members/{membership}/", '{"role": "member"}'): expect(200, members=403),
    ("DELETE", "tenants/acme/members/{membership}/", ""): expect(204, members=403),
    ("GET", "tenants/acme/invitations/", ""): expect(200, members=403),
    ("GET", "tenants/acme/invitations/{invitation}/", ""): expect(200, members=403),
    ("POST", "tenants/acme/invitations/", '{"email": "n@example.org", "role": "viewer"}'): expect(
        201, members=403
    ),
    ("DELETE", "tenants/acme/invitations/{invitation}/", ""): expect(204, members=403),
    ("GET", "tenants/acme/service-accounts/", ""): expect(200, members=200),
    ("GET", "tenants/acme/service-accounts/{account}/", ""): expect(200, members=200),
    ("POST", "tenants/acme/service-accounts/", '{"name": "ci"}'): expect(201, members=403),
    ("PATCH", "tenants/acme/service-accounts/{account}/", '{"active": false}'): expect(
        200, members=403
    ),
    ("DELETE", "tenants/acme/service-accounts/{account}/", ""): expect(204, members=403),
    ("GET", "tenants/acme/keys/", ""): expect(200, members=200),
    ("GET", "tenants/acme/keys/{key}/", ""): expect(200, members=404),
    ("POST", "tenants/acme/keys/", '{"scopes": ["inference"]}'): {
        **expect(201, members=201),
        "viewer": 403,
    },
    ("POST", "tenants/acme/keys/{key}/rotate/", "{}"): expect(201, members=404),
    ("DELETE", "tenants/acme/keys/{key}/", ""): expect(204, members=404),
    ("GET", "tenants/acme/audit/", ""): expect(200, members=403),
    ("GET", "tenants/acme/audit/{entry}/", ""): expect(200, members=403),
    ("GET", "overview/?tenant=acme", ""): expect(200, members=200),
    ("GET", "history/?tenant=acme&by=model", ""): expect(200, members=200),
    ("GET", "fairness/?tenant=acme", ""): expect(200, members=200),
    ("GET", "settings/", ""): expect(200, managers=403, members=403, outsiders=403),
    ("GET", "openapi.json", ""): expect(200, members=200, outsiders=200),
}


NUMBERS = itertools.count()


class Rows(dict[str, int]):
    """Acme's row of each kind, created on first use, for an operation may remove it."""

    def __missing__(self, kind: str) -> int:
        self[kind] = row = row_of(kind, Tenant.objects.get(slug="acme"), next(NUMBERS))
        return row


def row_of(kind: str, acme: Tenant, number: int) -> int:
    """A fresh one's key."""
    if kind == "account":
        service_account = actions.create_service_account(
            actor=SYSTEM_ACTOR, tenant=acme, name=f"row {number}"
        )
        return int(service_account.pk)
    if kind == "invitation":
        invited = actions.invite(actor=SYSTEM_ACTOR, tenant=acme, email=f"i{number}@example.org")
        return int(invited.invitation.pk)
    if kind == "key":
        return int(actions.create_key(actor=SYSTEM_ACTOR, tenant=acme, scopes=["inference"]).key.pk)
    if kind == "entry":
        return int(AuditEntry.objects.filter(tenant=acme)[0].pk)
    user = User.objects.create_user(f"row-{number}", f"row-{number}@example.org", PASSWORD)
    member = actions.add_member(actor=SYSTEM_ACTOR, tenant=acme, user=user, role=Role.VIEWER)
    return int({"user": user.pk, "membership": member.pk}[kind])


def test_each_route_answers_everybody_as_it_should(callers: dict[str, Caller]) -> None:
    assert not answered_otherwise(ROUTES, lambda *route: answers(callers, *route))


def answered_otherwise(
    routes: dict[tuple[str, str, str], dict[str, int]], ask: Callable[..., dict[str, int]]
) -> list[str]:
    """Where somebody's status is another than it should be. What a route does is undone behind it.

    `ask`: a route's statuses by caller.
    """
    problems = []
    for route, expected in routes.items():
        with transaction.atomic():
            response = ask(*route)
            transaction.set_rollback(True)
        cache.clear()  # it counts how often somebody asks
        if response != expected:
            differs = {
                name: response[name] for name in response if response[name] != expected[name]
            }
            problems.append(f"{route[0]} {route[1]}: {differs}")
    return problems


def answers(callers: dict[str, Caller], method: str, path: str, body: str) -> dict[str, int]:
    """The status of each caller's answer."""
    status_codes, rows = {}, Rows()
    for name, caller in callers.items():
        sent = json.loads(body) if body else None
        if sent and "username" in sent and sent["username"] == "new":
            sent["username"] = f"new-{len(status_codes)}"
        if sent and sent.get("name") in ("ci", "Made"):
            sent["name"] = f"{sent['name']} {next(NUMBERS)}"
        answer = caller.ask(method, f"/api/{path.format_map(rows)}", sent)
        status_codes[name] = answer.status_code
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        elif method != "GET":  # the operation is done, and the next one needs a row to do it to
            rows = Rows()
            Membership.objects.filter(user__username="nobody").delete()
    return status_codes


def test_every_route_and_method_is_in_the_table() -> None:
    from management_api.urls import router

    served = set()
    for pattern in router.urls:
        shape = str(pattern.pattern).removeprefix("^").removesuffix("\\Z").removesuffix("$")
        # Files of their own ask these.
        elsewhere = ("prices", "budgets", "adapters", "requests", "models", "webhooks", "blocks")
        more = ("webhook-deliveries", "isolation", "mcp-servers", "saved-views")
        if any(f"{name}/" in shape for name in (*elsewhere, *more)):
            continue
        for method in set(pattern.callback.actions) - {"head"}:
            served.add((method.upper(), shape.replace("(?P<tenant>[a-z0-9-]{1,63})", "acme")))
    asked = set()
    for method, path, _ in ROUTES:
        path = path.partition("?")[0]
        shape = path.replace("tenants/acme/", "tenants/(?P<slug>[a-z0-9-]{1,63})/", 1)
        tenant_paths = ("", "new-cache-namespace/", "export/", "erase/")
        full_shape = shape if path.removeprefix("tenants/acme/") in tenant_paths else path
        for name in ("user", "membership", "account", "invitation", "key", "entry"):
            full_shape = full_shape.replace(f"{{{name}}}", "(?P<pk>[0-9]{1,18})")
        asked.add((method, full_shape))
    assert served <= asked


def test_a_key_is_used_within_its_tenant_whatever_its_holder_may(
    callers: dict[str, Caller],
) -> None:
    olga = User.objects.get(username="olga")
    acme = Tenant.objects.get(slug="acme")
    actions.add_member(actor=SYSTEM_ACTOR, tenant=acme, user=olga, role=Role.OWNER)
    assert callers["outsider's key"].ask("GET", "/api/tenants/acme/members/").status_code == 404
    assert [t["slug"] for t in callers["outsider's key"].get("/api/tenants/")["results"]] == [
        "rival"
    ]


def test_a_secret_is_in_the_answer_that_made_it_alone(callers: dict[str, Caller]) -> None:
    admin = callers["admin's key"]
    payload = admin.ask("POST", "/api/tenants/acme/keys/", {"name": "ci"}).json()
    assert payload["secret"].startswith(payload["prefix"].removesuffix("..."))
    assert payload["secret"] not in str(admin.get(f"/api/tenants/acme/keys/{payload['id']}/"))
    assert "digest" not in str(admin.get("/api/tenants/acme/keys/"))


def test_a_key_gives_no_scope_that_it_hasnt(callers: dict[str, Caller]) -> None:
    for key_scopes in (["operator"], ["inference", "operator"]):
        answer = callers["admin's key"].ask(
            "POST", "/api/tenants/acme/keys/", {"scopes": key_scopes}
        )
        assert answer.status_code == 403


def test_rows_of_another_tenant_are_not_reached_through_ones_own(
    callers: dict[str, Caller],
) -> None:
    rows = Rows()
    for kind, row in (
        ("members", rows["membership"]),
        ("invitations", rows["invitation"]),
        ("service-accounts", rows["account"]),
        ("keys", rows["key"]),
    ):
        for method in ("GET", "DELETE"):
            answer = callers["rival program"].ask(method, f"/api/tenants/rival/{kind}/{row}/")
            assert answer.status_code == 404, (kind, method)
    assert ApiKey.objects.get(pk=rows["key"]).state() == "active"


def test_lists_are_paged_and_narrowed(callers: dict[str, Caller]) -> None:
    operator = callers["operator"]
    page = operator.get("/api/users/?limit=2")
    assert (page["count"], len(page["results"])) == (User.objects.count(), 2)
    assert "offset=2" in page["next"]
    assert [u["username"] for u in operator.get("/api/users/?is_superuser=true")["results"]] == [
        "root"
    ]
    admin = callers["admin's key"]
    actions.change_role(
        actor=SYSTEM_ACTOR,
        membership=Membership.objects.get(user__username="viewer"),
        role="member",
    )
    results = admin.get("/api/tenants/acme/audit/?action=member.change_role")["results"]
    assert [row["changes"] for row in results] == [{"role": ["viewer", "member"]}]
    assert admin.get("/api/tenants/acme/audit/?after=2999-01-01T00:00:00Z")["count"] == 0
    assert admin.ask("GET", "/api/tenants/acme/audit/?after=soon").status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("users/", {"username": "a b\n"}, None),
        ("users/", {"username": "root"}, None),
        ("users/", {"username": "x", "password": "123"}, "password"),
        ("tenants/acme/invitations/", {"email": "no", "role": "viewer"}, None),
        ("tenants/acme/service-accounts/", {"name": "x", "role": "god"}, None),
        ("tenants/acme/keys/", {"scopes": ["root"]}, None),
        ("tenants/acme/keys/", {"expires_at": "2020-01-01T00:00:00Z"}, "expires_at"),
    ],
)
def test_bad_input_is_refused_by_name(
    callers: dict[str, Caller], path: str, body: Any, param: str | None
) -> None:
    answer = callers["operator"].ask("POST", f"/api/{path}", body)
    assert answer.status_code in (400, 409)
    assert param is None or answer.json()["error"]["param"] == param


def test_a_key_acts_in_the_audit_log_by_its_name_and_address(callers: dict[str, Caller]) -> None:
    callers["program"].ask("POST", "/api/tenants/acme/service-accounts/", {"name": "second"})
    entry = AuditEntry.objects.filter(action="service_account.create").first()
    assert entry is not None
    assert (entry.actor_kind, entry.address) == ("key", "127.0.0.1")
    assert entry.actor_label.startswith("API key sk-quire-")


def test_a_session_needs_csrf_and_a_recent_proof(callers: dict[str, Caller]) -> None:
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(User.objects.get(username="root"))
    assert Caller(strict).ask("POST", "/api/users/", NEW_USER).status_code == 403
    client = callers["operator"].client
    session = client.session
    session[recent.SESSION_KEY] = time.time() - 3600
    session.save()
    answer = callers["operator"].ask("POST", "/api/users/", NEW_USER)
    assert answer.json()["error"]["code"] == "recent_authentication_required"
    assert callers["operator"].ask("GET", "/api/users/").status_code == 200


def test_guessing_keys_is_bounded_here_too(login: Login, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guesses, "WINDOW_S", 10**10)
    monkeypatch.setattr(guesses, "_local", {})
    monkeypatch.setattr(guesses, "MAX_FAILED_KEYS", 5)
    status_codes = [by_key(f"sk-quire-{n}").ask("GET", "/api/users/").status_code for n in range(7)]
    assert status_codes == [401] * 5 + [429] * 2


def test_asking_too_often_is_refused(
    callers: dict[str, Caller], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rest_framework.throttling import ScopedRateThrottle

    monkeypatch.setattr(ScopedRateThrottle, "THROTTLE_RATES", {"management": "3/min"})
    status_codes = [
        callers["admin's key"].ask("GET", "/api/tenants/").status_code for _ in range(4)
    ]
    assert status_codes == [200, 200, 200, 429]
    assert callers["program"].ask("GET", "/api/tenants/").status_code == 200


def test_fault_28_keys_are_revoked_though_redis_is_away(
    callers: dict[str, Caller], settings: Any
) -> None:
    key = Rows()["key"]
    settings.REDIS_URL = "unix:///nowhere/redis.sock"
    settings.CACHES = {
        "default": {
            "BACKEND": "django.core.cache.backends.redis.RedisCache",
            "LOCATION": settings.REDIS_URL,
        }
    }
    path = f"/api/tenants/acme/keys/{key}/"
    assert callers["admin's key"].ask("DELETE", path).status_code == 204
    assert ApiKey.objects.get(pk=key).state() == "revoked"
    answer = callers["admin's key"].ask("GET", "/api/overview/?tenant=acme")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_unavailable")


def test_the_document_names_every_route(callers: dict[str, Caller], capfd: Any) -> None:
    response = callers["member"].get("/api/openapi.json")
    assert "/api/tenants/{tenant}/members/{id}/" in response["paths"]
    assert "/api/users/{id}/password/" in response["paths"]
    assert set(response["paths"]["/api/audit/"]) == {"get"}
    assert response["info"]["title"] == "Quire: management"
    assert response["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert capfd.readouterr().err == ""  # nothing that the generator couldn't make out


@pytest.mark.parametrize(
    ("method", "path", "body", "field"),
    [
        ("POST", "tenants/acme/keys/", {"name": "k", "expires": "2027-01-01"}, "expires"),
        ("PATCH", "tenants/acme/", {"name": "Acme", "token_per_minute": 5}, "token_per_minute"),
        ("POST", "users/", {**NEW_USER, "is_super": True}, "is_super"),
        ("PATCH", "users/1/", {"active": False}, "active"),
    ],
)
def test_a_field_that_is_misspelt_is_refused_by_name(
    callers: dict[str, Caller], method: str, path: str, body: dict[str, Any], field: str
) -> None:
    initial = ApiKey.objects.count(), User.objects.count()
    if path == "users/1/":
        path = f"users/{User.objects.get(username='member').pk}/"
    answer = callers["operator"].ask(method, f"/api/{path}", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert (ApiKey.objects.count(), User.objects.count()) == initial


@pytest.mark.parametrize("query", ["limit=-1", "limit=0", "limit=x", "limit=", "offset=-1"])
def test_a_page_that_is_none_is_refused(callers: dict[str, Caller], query: str) -> None:
    answer = callers["owner"].ask("GET", f"/api/tenants/acme/members/?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])
    assert len(callers["owner"].get("/api/tenants/acme/members/?limit=9999")["results"]) == 4
