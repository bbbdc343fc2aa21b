"""What Redis must know of a stream gets there, though Redis was away when it was first said."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import redis
from redis.exceptions import RedisError

from config import embedded_redis
from engine.contract import redis_keys
from engine.system.redis_client import RedisPipeline
from inference.engine_client.journal import Journal


@pytest.mark.service
async def test_that_a_client_was_told_tokens_is_kept_though_redis_was_away(short_tmp: Path) -> None:
    folder = short_tmp / "journal"
    server, url = embedded_redis.start(folder, persist=True)
    try:
        link = RedisPipeline(url)
        journal = Journal(link, "p")
        await link.execute("PING")
        server.stop(grace=5)
        with pytest.raises(RedisError):
            await journal.mark_delivered("a")
        journal.mark_delivered("settled-meanwhile")
        await journal.mark_settled("settled-meanwhile", 1, 1)
        with pytest.raises(RedisError):
            await journal.save()
        server, url = embedded_redis.start(folder, persist=True)
        await journal.save()
        with redis.Redis.from_url(url) as client:
            assert client.hget(redis_keys.stream_key("a", "p"), "told") == b"1"
            assert client.ttl(redis_keys.stream_key("a", "p")) > 0
            assert not client.exists(redis_keys.stream_key("settled-meanwhile", "p"))
            client.flushall()
            await journal.save()
            assert client.dbsize() == 0
        await asyncio.wait_for(link.close(), 60)
    finally:
        server.stop(grace=5)
