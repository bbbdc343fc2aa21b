"""Every route of the API, asked with every kind of key: who may is decided by role and scope."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from asgiref.sync import sync_to_async

from inference.edge.handler import GatewayHandler
from tenants import actions
from tenants import api_keys as scopes
from tenants.actors import SYSTEM_ACTOR
from tenants.models import Membership, Role, Tenant, User
from tests.console.test_every_route import ALL, REVIEWED, sample
from tests.inference.asgi_client import AsgiClient
from tests.inference.conftest import Gateway

#: What a route needs that isn't for asking models.
NEEDS = {
    "v1/models": scopes.MODELS,
    "v1/models/<model>": scopes.MODELS,
    "v1/organization/costs": scopes.USAGE,
    "v1/organization/usage/completions": scopes.USAGE,
    "v1/organization/usage/embeddings": scopes.USAGE,
    **dict.fromkeys(
        (
            "abort_requests",
            "collective_rpc",
            "get_world_size",
            "is_paused",
            "is_scaling_elastic_ep",
            "is_sleeping",
            "load",
            "v1/load_lora_adapter",
            "v1/lora/load",
            "v1/lora/unload",
            "v1/unload_lora_adapter",
            "metrics",
            "pause",
            "reset_encoder_cache",
            "reset_mm_cache",
            "reset_prefix_cache",
            "resume",
            "scale_elastic_ep",
            "server_info",
            "sleep",
            "start_profile",
            "stop_profile",
            "tokenizer_info",
            "wake_up",
        ),
        scopes.OPERATOR,
    ),
}
READ_SCOPES = {scopes.MODELS, scopes.USAGE}
ASKS = {*READ_SCOPES, scopes.INFERENCE}
HAS = {
    "owner": ASKS,
    "admin": ASKS,
    "member": ASKS,
    "viewer": READ_SCOPES,
    "program": ASKS,
    "viewing program": READ_SCOPES,
    "outsider": ASKS,
    "operator": {*ASKS, scopes.OPERATOR},
}
PAGES = ("console/", "api/", "account/", "admin/")


def routes() -> Iterator[str]:
    """Those of the API that ask for a key."""
    return (r for r in ALL if r and not r.startswith(PAGES) and r not in REVIEWED)


def keys(tenant: Tenant) -> dict[str, str]:
    """A key of every kind, with all scopes that its maker could give."""
    rival = actions.create_tenant(actor=SYSTEM_ACTOR, name="Rivals")
    secrets_by_name = {}
    for name in HAS:
        wide, account = ["inference", "models:read", "usage:read"], None
        of, person = (
            tenant,
            User.objects.create_user(name, f"{len(secrets_by_name)}@example.org", "x"),
        )
        if name == "operator":
            User.objects.filter(pk=person.pk).update(is_superuser=True)
            person.refresh_from_db()
            wide = list(scopes.ALL)
        elif "program" in name:
            role = Role.VIEWER if "viewing" in name else Role.MEMBER
            account = actions.create_service_account(
                actor=SYSTEM_ACTOR, tenant=tenant, name=name, role=role
            )
        else:
            of = rival if name == "outsider" else tenant
            role = Role(name) if name in ("owner", "admin") else Role.MEMBER
            actions.add_member(actor=SYSTEM_ACTOR, tenant=of, user=person, role=role)
        actor = SYSTEM_ACTOR if account else person
        key = actions.create_key(actor=actor, tenant=of, scopes=wide, service_account=account)
        if name == "viewer":  # who became one past the action that ends keys
            Membership.objects.filter(user=person).update(role=Role.VIEWER)
        secrets_by_name[name] = key.secret
    return secrets_by_name


async def test_each_route_lets_each_kind_of_key_in_or_not(gateway: Gateway) -> None:
    secrets = await sync_to_async(keys)(gateway.rows.tenant)
    clients = {name: AsgiClient(GatewayHandler(), secret) for name, secret in secrets.items()}
    problems = []
    for route in routes():
        for method in ("GET", "POST", "DELETE"):
            for name in ("operator", *HAS):
                body = {} if method == "POST" else None
                reply = await clients[name].open(method, sample(route), body).reply()
                if reply.status == 405:
                    break
                allowed = NEEDS.get(route, scopes.INFERENCE) in HAS[name]
                if (reply.status in (401, 403)) == allowed or reply.status == 500:
                    problems.append((method, route, name, reply.status, reply.body[:80]))
    assert problems == []


@pytest.mark.parametrize("route", NEEDS)
def test_the_table_holds_nothing_that_is_gone(route: str) -> None:
    assert route in ALL
