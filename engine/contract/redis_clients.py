"""Clients of Redis, made in one place. What is asked by the thousand goes by `redis_link`."""

from __future__ import annotations

import redis
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

TIMEOUT_S = 5.0


def sync_client(url: str, *, timeout_s: float = TIMEOUT_S, block_s: float = 0.0) -> redis.Redis:
    """A client for threads. `block_s`: its longest blocking read, on top of a reply's time."""
    return redis.Redis.from_url(
        url, socket_timeout=timeout_s + block_s, socket_connect_timeout=timeout_s
    )


def patient_client(url: str) -> redis.Redis:
    """A client for a replica's threads, whose blocking reads may take as long as they like."""
    return redis.Redis.from_url(url, health_check_interval=15)


def async_client(url: str) -> AsyncRedis:
    """A client for what is asked a few times a second. It repeats no command by itself."""
    return AsyncRedis.from_url(
        url,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=TIMEOUT_S,
    )
