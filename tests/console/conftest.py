"""Rows, logged-in clients and heartbeats for the tests of pages and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from django.test import Client

from catalog import access as catalog_access
from engine.contract import messages as protocol
from engine.contract import redis_keys
from engine.contract.messages import Heartbeat
from tenants import authentication
from tenants.models import User
from tests.console.rows import make_rows

Login = Callable[[str], Client]
Beat = Callable[[Heartbeat], None]


@pytest.fixture
def rows(db: None) -> None:
    """The rows of `tests.console.rows`."""
    make_rows()


@pytest.fixture
def committed(transactional_db: None) -> Iterator[None]:
    """For tests of what is looked up in other threads: what `rows` makes is committed."""
    authentication.clear_cache()
    catalog_access.clear_cache()
    yield
    authentication.clear_cache()
    catalog_access.clear_cache()


@pytest.fixture
def login(rows: None, live_redis: str) -> Login:
    """A client logged in as the user of this name."""

    def make(name: str) -> Client:
        client = Client()
        client.force_login(User.objects.get(username=name))
        return client

    return make


@pytest.fixture
def beat(live_redis: str, key_prefix: str) -> Iterator[Beat]:
    """Puts a heartbeat into Redis, as a replica does."""
    client: Any = redis.Redis.from_url(live_redis)

    def write(heartbeat: Heartbeat) -> None:
        client.sadd(redis_keys.replicas_key(key_prefix), heartbeat.replica_id)
        key = redis_keys.replica_key(heartbeat.replica_id, key_prefix)
        client.set(key, protocol.encode(heartbeat), px=60_000)

    yield write
    client.close()
