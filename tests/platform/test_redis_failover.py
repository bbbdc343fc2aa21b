"""Clients of Redis go where its address leads once the server that they had is a replica."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.cache.backends.redis import RedisCache
from redis.exceptions import RedisError

from config import settings
from config.connections import socket_path
from engine.system import redis_client as redis_link
from engine.system.redis_client import (
    RedisPipeline,
    async_client,
    is_demoted_primary,
    replica_client,
    sync_client,
)
from tests.services import running_redis

pytestmark = pytest.mark.service


@dataclass
class Pair:
    """Two servers; `url` is the address of the first, and of the second after `fail_over`."""

    url: str
    first: Path
    second: Path

    def fail_over(self) -> None:
        """The first is a replica from now on, and goes on answering whoever is connected to it."""
        with redis.Redis.from_url(self.url) as client:
            client.execute_command("REPLICAOF", "127.0.0.1", "1")
        os.replace(self.second, self.first)


@contextmanager
def _pair(folder: Path) -> Iterator[Pair]:
    with running_redis(folder / "a") as url, running_redis(folder / "b"):
        yield Pair(url, socket_path(folder / "a"), socket_path(folder / "b"))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with _pair(tmp_path) as pair:
        yield pair


@pytest.mark.parametrize("make", [sync_client, replica_client], ids=["sync", "patient"])
def test_a_client_for_threads_goes_to_the_new_primary(pair: Pair, make: Any) -> None:
    with make(pair.url) as client:
        client.set("x", 1)
        pair.fail_over()
        with pytest.raises(RedisError) as refused:
            client.set("x", 2)
        assert is_demoted_primary(refused.value)
        client.set("x", 3)
        assert client.get("x") == b"3"
        assert client.info("replication")["role"] == "master"


def test_a_pipeline_that_was_refused_goes_to_the_new_primary(pair: Pair) -> None:
    with sync_client(pair.url) as client, client.pipeline() as pipeline:
        client.set("x", 1)
        pair.fail_over()
        for transaction in range(2):
            pipeline.set("x", transaction)
            pipeline.set("y", transaction)
            if transaction:
                assert pipeline.execute() == [True, True]
            else:
                with pytest.raises(RedisError):
                    pipeline.execute()


async def test_a_client_of_an_event_loop_goes_to_the_new_primary(pair: Pair) -> None:
    client = async_client(pair.url)
    await client.set("x", 1)
    pair.fail_over()
    with pytest.raises(RedisError):
        await client.set("x", 2)
    await client.set("x", 3)
    assert await client.get("x") == b"3"
    await client.aclose()


async def test_a_link_goes_to_the_new_primary_and_what_was_sent_is_answered(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_link, "_LEAVE_AFTER_S", 0.0)
    link, reading = RedisPipeline(pair.url), RedisPipeline(pair.url, timeout_s=60)
    await link.execute("XADD", "s", "1-1", "m", "old")
    blocked = reading.send("XREAD", "BLOCK", 60_000, "STREAMS", "s", "1-1")
    await asyncio.sleep(0.05)
    pair.fail_over()
    with pytest.raises(RedisError) as unblocked:
        await blocked
    assert is_demoted_primary(unblocked.value)
    refused, read = link.send("XADD", "s", "1-2", "m", "lost"), link.send("XLEN", "s")
    with pytest.raises(RedisError):
        await refused
    assert await read == 1  # by the server that it was sent to
    assert await link.execute("XADD", "s", "1-3", "m", "new") == b"1-3"
    reply = await reading.execute("XREAD", "STREAMS", "s", "0-0")
    assert [entry[1] for entry in reply[0][1]] == [[b"m", b"new"]]
    await link.close()
    await reading.close()


async def test_a_redis_that_stays_read_only_is_not_connected_to_for_each_command(
    pair: Pair,
) -> None:
    link = RedisPipeline(pair.url)
    with redis.Redis.from_url(pair.url) as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        initial = client.info("stats")["total_connections_received"]
        for _ in range(50):
            with pytest.raises(RedisError):
                await link.execute("SET", "x", 1)
        assert client.info("stats")["total_connections_received"] - initial <= 3
    await link.close()


def test_djangos_cache_goes_to_the_new_primary(pair: Pair) -> None:
    options: Any = settings.CACHES["default"]["OPTIONS"]
    redis_cache = RedisCache(pair.url, {"OPTIONS": options})
    redis_cache.set("x", 1)
    pair.fail_over()
    with pytest.raises(RedisError):
        redis_cache.set("x", 2)
    redis_cache.set("x", 3)
    assert redis_cache.get("x") == 3
    redis_cache.close()
