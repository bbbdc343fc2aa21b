"""What Redis must know of a stream gets there, though Redis was away when it was first said."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import redis
from redis.exceptions import RedisError

from config import embedded_redis
from engine.contract import redis_keys
from engine.contract.messages import STREAM_FIELD, OutboxBatch, encode
from engine.system.redis_client import RedisPipeline
from inference.engine_client.journal import Journal
from inference.engine_client.redis_streams import OutboxReader


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


@pytest.mark.service
async def test_after_redis_was_away_no_token_is_delivered_before_open_streams_are_marked(
    short_tmp: Path,
) -> None:
    """Else a gateway that is killed right after would deliver what nobody bills."""
    server, url = embedded_redis.start(short_tmp / "journal", persist=True)
    link, reading = RedisPipeline(url), RedisPipeline(url)
    journal, was_read = Journal(link, "p"), asyncio.Event()
    marks: dict[int, list[bool]] = {}

    def begin(batch: OutboxBatch) -> None:
        with redis.Redis.from_url(url) as client:
            marks[batch.step] = [
                client.hexists(redis_keys.stream_key(stream, "p"), "told")
                for stream in ("lost", "while-away", "settled")
            ]
        was_read.set()

    async def deliver(batch: OutboxBatch) -> None:
        pass

    def write(step: int) -> None:
        batch = OutboxBatch(replica_id="r", incarnation="i", step=step)
        with redis.Redis.from_url(url) as client:
            client.xadd(reader.key, {STREAM_FIELD: encode(batch)}, id=f"{step}-1")

    reader = OutboxReader(
        reading,
        link,
        "g",
        "p",
        begin,
        deliver,
        journal.save,
        lambda: None,
        journal.restore_marks,
    )
    task = asyncio.create_task(reader.run())
    try:
        await journal.mark_delivered("lost")
        await journal.mark_delivered("settled")
        await journal.mark_settled("settled", 1, 1)
        write(1)
        await asyncio.wait_for(was_read.wait(), 60)
        server.stop(grace=5)
        with pytest.raises(RedisError):
            await journal.mark_delivered("while-away")
        was_read.clear()
        # On an empty folder: it has lost what it had confirmed.
        server, url_anew = embedded_redis.start(short_tmp / "journal", persist=False)
        assert url_anew == url
        write(2)
        await asyncio.wait_for(was_read.wait(), 60)
        assert marks == {1: [True, False, True], 2: [True, True, False]}
    finally:
        task.cancel()
        await asyncio.wait([task])
        await asyncio.wait_for(link.close(), 60)
        await asyncio.wait_for(reading.close(), 60)
        server.stop(grace=5)
