"""The engine client's links to Redis."""

from __future__ import annotations

from engine.contract.redis_clients import TIMEOUT_S
from engine.contract.redis_link import RedisLink
from inference.engine_client.outbox import BLOCK_MS


def short_link(url: str) -> RedisLink:
    """For requests, on their way in and out."""
    return RedisLink(url, timeout_s=TIMEOUT_S)


def reading_link(url: str) -> RedisLink:
    """For blocking reads, which would hold up any other command."""
    return RedisLink(url, timeout_s=TIMEOUT_S + BLOCK_MS / 1000)
