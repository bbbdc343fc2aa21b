"""Every route of the console, asked by every kind of person about Acme's rows."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from django.test import Client
from django.utils import timezone

from accounts import reauthentication
from adapters.models import Adapter, AdapterAlias, AdapterVersion
from catalog.models import McpServer, Replica, ServedModel
from common.files import new_id
from history.models import Alert, BenchmarkRun
from metering.models import Budget, Price, RequestEntry, SavedSearch, Webhook, WebhookDelivery
from storage.models import Batch, PlaygroundPreset, SavedConversation, StoredFile
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import AuditEntry, Role, Tenant, User
from tests.console.conftest import Login
from tests.console.test_every_route import ALL

#: From whom on a route is open. Whoever is below may not, whoever isn't of Acme finds nothing.
RANKS = ("viewer", "member", "admin", "owner", "operator")
OUTSIDE = ("outsider", "nobody", "stranger")
VIEW, WORK, RUN, OWNER, OPERATE = RANKS
EVERYBODY, MEMBERS = "everybody", "who belongs to any tenant"
HIS = "the member whose it is, and nobody else"
ROUTES: dict[str, dict[str, str]] = {
    "GET": {
        "console/": VIEW,
        "console/adapters/": VIEW,
        "console/adapters/<pk>/": VIEW,
        "console/alerts/": OPERATE,
        "console/feedback/export/": RUN,
        "console/api/adapters": VIEW,
        "console/api/batches": VIEW,
        "console/api/conversations": VIEW,
        "console/api/presets": VIEW,
        "console/api/presets/<public_id>": VIEW,
        "console/api/conversations/<public_id>": HIS,
        "console/api/fairness": VIEW,
        "console/api/find": EVERYBODY,
        "console/mcp-servers/": OPERATE,
        "console/nodes/": OPERATE,
        "console/people/": OPERATE,
        "console/playground/<kind>/": VIEW,
        "console/api/history": VIEW,
        "console/api/model": MEMBERS,
        "console/api/model-states": EVERYBODY,
        "console/api/models": VIEW,
        "console/api/overview": VIEW,
        "console/api/replica-log": OPERATE,
        "console/api/usage": EVERYBODY,
        "console/audit/": RUN,
        "console/batches/": VIEW,
        "console/batches/<public_id>/": VIEW,
        "console/budgets/": VIEW,
        "console/data/": VIEW,
        "console/fairness/": VIEW,
        "console/files/": VIEW,
        "console/files/<public_id>/": WORK,
        "console/keys/": VIEW,
        "console/kv/": VIEW,
        "console/members/": VIEW,
        "console/models/": EVERYBODY,
        "console/models/<pk>/": MEMBERS,
        "console/prices/": EVERYBODY,
        "console/requests/": VIEW,
        "console/requests/<name>/": VIEW,
        "console/settings/": OPERATE,
        "console/tenants/": EVERYBODY,
        "console/tenants/<slug>/": VIEW,
        "console/usage/": VIEW,
        "console/webhook/": VIEW,
    },
    "POST": {
        "console/adapters/<pk>/alias/delete/": RUN,
        "console/alerts/<pk>/silence/": OPERATE,
        "console/mcp-servers/<name>/delete/": OPERATE,
        "console/mcp-servers/<name>/test/": OPERATE,
        "console/mcp-servers/set/": OPERATE,
        "console/alerts/webhook/<pk>/again/": OPERATE,
        "console/alerts/webhook/delete/": OPERATE,
        "console/alerts/webhook/set/": OPERATE,
        "console/alerts/webhook/test/": OPERATE,
        "console/api/feedback/<name>": VIEW,
        "console/api/pictures": WORK,
        "console/api/run/completions": WORK,
        "console/api/run/embeddings": WORK,
        "console/api/run/rerank": WORK,
        "console/api/run/speech": WORK,
        "console/adapters/<pk>/delete/": RUN,
        "console/adapters/<pk>/offline/": RUN,
        "console/adapters/<pk>/pin/": OPERATE,
        "console/adapters/<pk>/promote/": RUN,
        "console/adapters/<pk>/rollback/": RUN,
        "console/adapters/<pk>/versions/<number>/": WORK,
        "console/adapters/fetch/": RUN,
        "console/batches/<public_id>/cancel/": WORK,
        "console/batches/add/": WORK,
        "console/budgets/<pk>/delete/": RUN,
        "console/budgets/set/": RUN,
        "console/data/erase/": OWNER,
        "console/data/export/": OWNER,
        "console/data/keep/": OWNER,
        "console/files/<public_id>/delete/": WORK,
        "console/files/upload/": WORK,
        "console/invitations/<pk>/revoke/": RUN,
        "console/keys/": WORK,
        "console/keys/<pk>/revoke/": RUN,
        "console/keys/<pk>/rotate/": RUN,
        "console/members/<pk>/remove/": RUN,
        "console/members/<pk>/role/": RUN,
        "console/members/invite/": RUN,
        "console/models/<pk>/benchmark/": OPERATE,
        "console/models/<pk>/benchmark/stop/": OPERATE,
        "console/models/<pk>/delete/": OPERATE,
        "console/models/<pk>/load/": OPERATE,
        "console/models/<pk>/restart/": OPERATE,
        "console/models/<pk>/settings/": OPERATE,
        "console/models/<pk>/sleep/": OPERATE,
        "console/models/<pk>/unload/": OPERATE,
        "console/models/<pk>/wake/": OPERATE,
        "console/models/add/": OPERATE,
        "console/prices/<pk>/delete/": OPERATE,
        "console/prices/set/": OPERATE,
        "console/requests/store/": OWNER,
        "console/requests/views/<pk>/delete/": HIS,
        "console/requests/views/save/": VIEW,
        "console/service-accounts/<pk>/retire/": RUN,
        "console/service-accounts/add/": RUN,
        "console/tenants/<slug>/limits/": OPERATE,
        "console/tenants/create/": OPERATE,
        "console/webhook/<pk>/again/": RUN,
        "console/webhook/delete/": RUN,
        "console/webhook/set/": RUN,
        "console/webhook/test/": RUN,
    },
}
#: These look in threads of their own, where rows of this test aren't yet: who may is asked in
#: test_api.py and test_batches_page.py, here who may not.
ELSEWHERE = {
    "console/api/models",
    "console/api/pictures",
    "console/api/run/completions",
    "console/api/run/embeddings",
    "console/api/run/rerank",
    "console/api/run/speech",
    "console/batches/<public_id>/cancel/",
    "console/batches/add/",
    "console/files/<public_id>/",
    "console/files/<public_id>/delete/",
    "console/files/upload/",
    "console/mcp-servers/<name>/test/",
    "console/mcp-servers/set/",
}
ASKED = [(method, route) for method, routes in ROUTES.items() for route in routes]
#: What is sent with every operation: forms take what they know.
SENT = {
    "tenant": "acme",
    "email": "new@example.org",
    "role": "member",
    "name": "made",
    "scopes": "inference",
    "model": "quill",
    "per": "day",
    "tokens": "100",
    "url": "https://hooks.example.org/",
    "operation": "check",
    "confirm": "no",
    "version": "1",
    "alias": "pirate",
    "period": "day",
    "weight": "1",
    "kv_reserved_fraction": "0",
    "kv_max_fraction": "1",
    "replica": "quill-1",
    "benchmark": "bench-1",
    "query": "status=5xx",
}


@pytest.fixture
def people(login: Login) -> dict[str, Client]:
    """A client for somebody of every kind."""
    acme = Tenant.objects.get(slug="acme")
    for name in ("admin", "member", "viewer"):
        user = User.objects.create_user(name, f"{name}@example.org", "a quiet page of ink")
        actions.add_member(actor=SYSTEM_ACTOR, tenant=acme, user=user, role=Role(name))
    names = {"owner": "ada", "outsider": "olga", "operator": "root"}
    clients = {name: login(names.get(name, name)) for name in (*RANKS, "outsider", "nobody")}
    return clients | {"stranger": Client()}


def rows_of(acme: Tenant) -> dict[str, Any]:
    """One of each kind, of Acme's member; by the beginning of the routes that take it."""
    member, now = User.objects.get(username="member"), timezone.now()
    guest = User.objects.create(username="guest")  # no password: to hash one takes a while
    quill = ServedModel.objects.get(name="quill")
    adapter = Adapter.objects.create(tenant=acme, served_model=quill, name="pirate")
    version = AdapterVersion.objects.create(adapter=adapter, number=1)
    AdapterAlias.objects.create(
        adapter=adapter, tenant=acme, served_model=quill, name="pirate", version=version
    )
    Replica.objects.create(served_model=quill, replica_id="quill-1")
    for tenant in (acme, None):
        Webhook.objects.create(tenant=tenant, url="https://hooks.example.org/", secret="x")
    file = StoredFile.objects.create(
        tenant=acme, user=member, public_id=new_id("file-"), filename="a.jsonl", size=0
    )
    batch = Batch.objects.create(
        tenant=acme,
        user=member,
        public_id=new_id("batch_"),
        endpoint="/v1/chat/completions",
        completion_window="24h",
        input_file_id=file.public_id,
    )
    conversation = SavedConversation.objects.create(
        tenant=acme,
        user=member,
        public_id=new_id("conv_"),
        title="mine",
        document={},
        changed_at=now,
    )
    entry = RequestEntry.objects.create(
        request_id="chatcmpl-1",
        tenant=acme,
        endpoint="chat",
        status=200,
        started_at=now,
        duration_ms=1.0,
    )
    key = actions.create_key(actor=User.objects.get(username="ada"), tenant=acme).key
    delivery, alert_delivery = (
        WebhookDelivery.objects.create(
            tenant=tenant, event_id=name, kind="test", url="https://hooks.example.org/", body="{}"
        )
        for tenant, name in ((acme, "e-1"), (None, "e-2"))
    )
    preset = PlaygroundPreset.objects.create(public_id=new_id("preset-"), tenant=acme, name="Brief")
    BenchmarkRun.objects.create(
        public_id="bench-1",
        served_model=quill,
        levels=[1],
        input_tokens=1,
        output_tokens=1,
        num_requests=1,
    )
    return {
        "console/adapters/": adapter.pk,
        "console/batches/": batch.public_id,
        "console/files/": file.public_id,
        "console/api/conversations/": conversation.public_id,
        "console/api/presets/": preset.public_id,
        "console/playground/": "completions",
        "console/requests/": entry.request_id,
        "console/requests/views/": SavedSearch.objects.create(
            user=member, name="slow", query="slower_ms=2000"
        ).pk,
        "console/api/feedback/": entry.request_id,
        "console/keys/": key.pk,
        "console/alerts/": Alert.objects.create(rule="disk", subject="/", text="Full.").pk,
        "console/alerts/webhook/": alert_delivery.pk,
        "console/webhook/": delivery.pk,
        "console/mcp-servers/": McpServer.objects.create(
            name="weather", url="http://127.0.0.1:1/mcp"
        ).name,
        "console/models/": quill.pk,
        "console/tenants/": "acme",
        "console/budgets/": Budget.objects.create(
            tenant=acme, api_key=key, period="day", tokens=9
        ).pk,
        "console/prices/": Price.objects.create(
            model="quill",
            valid_from=now + timedelta(days=1),
            input_per_million=1,
            cached_per_million=1,
            output_per_million=1,
        ).pk,
        "console/members/": actions.add_member(
            actor=SYSTEM_ACTOR, tenant=acme, user=guest, role=Role.VIEWER
        ).pk,
        "console/invitations/": actions.invite(
            actor=SYSTEM_ACTOR, tenant=acme, email="i@example.org"
        ).invitation.pk,
        "console/service-accounts/": actions.create_service_account(
            actor=SYSTEM_ACTOR, tenant=acme, name="ci"
        ).pk,
    }


def path_of(route: str, rows: dict[str, Any]) -> str:
    """With the row that it's about."""
    parts = []
    for part in route.split("/"):
        if part == "<number>":
            part = "1"
        elif part.startswith("<"):
            part = str(rows["/".join(parts) + "/"])
        parts.append(part)
    return "/" + "/".join(parts)


def test_each_route_is_open_from_one_rank_on_and_does_nothing_for_the_others(
    people: dict[str, Client],
) -> None:
    rows, problems = rows_of(Tenant.objects.get(slug="acme")), []
    operations = AuditEntry.objects.count()
    for method, route in ASKED:
        with transaction.atomic():
            for name in (*OUTSIDE, *RANKS):
                allowed = may(name, ROUTES[method][route])
                if allowed and route in ELSEWHERE:
                    continue
                response = ask(people[name], method, path_of(route, rows), rows)
                if not right(name, response, allowed=allowed):
                    problems.append((method, route, name, response.status_code))
                if not allowed and AuditEntry.objects.count() != operations:
                    problems.append((method, route, name, "did something"))
                if allowed and method == "POST":
                    break  # the operation is done
            transaction.set_rollback(True)
    assert not problems, "\n".join(map(str, problems))


#: What is done with a key by the API, where no login is asked for; the playground's own; a person's
#: own filters.
DONE_BY_KEYS = ("console/api/", "console/batches/", "console/files/", "console/requests/views/")


def test_fault_80_what_needs_a_recent_login_by_rest_needs_one_in_the_console(
    people: dict[str, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, problems = rows_of(Tenant.objects.get(slug="acme")), []
    monkeypatch.setattr(reauthentication, "is_recently_authenticated", lambda request: False)
    operations = AuditEntry.objects.count()
    for route, rank in ROUTES["POST"].items():
        if not route.startswith(DONE_BY_KEYS):
            response = ask(people[rank], "POST", path_of(route, rows), rows)
            if "/account/reauthenticate/" not in response.headers.get("Location", ""):
                problems.append((route, response.status_code))
    assert not problems, "\n".join(map(str, problems))
    assert AuditEntry.objects.count() == operations


def may(name: str, minimum: str) -> bool:
    """Whether a route that's open from `minimum` on is for this kind of person."""
    wide = {EVERYBODY: (*RANKS, "outsider", "nobody"), MEMBERS: (*RANKS, "outsider"), HIS: (WORK,)}
    if minimum in wide:
        return name in wide[minimum]
    return name in RANKS and RANKS.index(name) >= RANKS.index(minimum)


def right(name: str, response: Any, *, allowed: bool) -> bool:
    """Whether that's what one gets who may, or who may not."""
    if name == "stranger":
        leads = response.status_code == 302 and "/login/" in response["Location"]
        return leads or response.status_code == 401
    if allowed:
        return response.status_code not in (401, 403, 404) and response.status_code < 500
    return response.status_code in (401, 403, 404)


def ask(client: Client, method: str, path: str, rows: dict[str, Any]) -> Any:
    """With all that any of them takes."""
    if method == "POST":
        return client.post(path, {**SENT, "key": rows["console/keys/"]})
    asked = {"tenant": "acme", "model": rows["console/models/"], "replica": "quill-1"}
    return client.get(path, asked)


def test_every_route_is_in_the_table() -> None:
    asked = {route for routes in ROUTES.values() for route in routes}
    assert {route for route in ALL if route.startswith("console/")} == asked
