"""What is handed out of an outbox is kept elsewhere and removed, and no token waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from django.conf import settings
from redis.exceptions import ConnectionError as RedisConnectionError

from engine.contract import messages as protocol
from engine.contract import redis_keys
from engine.contract.messages import OutboxBatch
from inference.engine_client.redis_streams import (
    MAX_SCANNED,
    OutboxReader,
    reading_link,
    short_link,
)
from tests.inference.conftest import Gateway, until


@asynccontextmanager
async def reading(
    gateway: Gateway,
    steps: list[int],
    save: Callable[[], Awaitable[None]],
    errors: list[str],
    begin: Callable[[OutboxBatch], None] = lambda batch: None,
) -> AsyncIterator[OutboxReader]:
    async def deliver(batch: OutboxBatch) -> None:
        steps.append(batch.step)

    short, long = short_link(settings.REDIS_URL), reading_link(settings.REDIS_URL)
    reader = OutboxReader(
        *(long, short, "reader", gateway.prefix, begin, deliver, save),
        lambda: errors.append("doubt"),
        save,
    )
    tasks = [asyncio.create_task(reader.run()), asyncio.create_task(reader.trim_forever())]
    try:
        yield reader
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await short.close()
        await long.close()


async def write(gateway: Gateway, reader: OutboxReader, step: int) -> None:
    batch = OutboxBatch(replica_id="r", incarnation="i", step=step)
    await gateway.redis.xadd(reader.key, {protocol.STREAM_FIELD: protocol.encode(batch)})


async def trimmed(gateway: Gateway, reader: OutboxReader) -> None:
    async with asyncio.timeout(60):
        while await gateway.redis.xlen(reader.key):  # noqa: ASYNC110 - Redis tells nobody
            await asyncio.sleep(0.005)


async def test_tokens_do_not_wait_until_what_came_before_is_kept_elsewhere(
    gateway: Gateway,
) -> None:
    steps: list[int] = []
    saving, may_end = asyncio.Event(), asyncio.Event()

    async def save() -> None:
        saving.set()
        await may_end.wait()

    async with reading(gateway, steps, save, []) as reader:
        await write(gateway, reader, 1)
        await asyncio.wait_for(saving.wait(), 60)
        await write(gateway, reader, 2)
        await until(lambda: steps == [1, 2])
        assert await gateway.redis.xlen(reader.key) == 2  # neither is kept elsewhere yet
        may_end.set()
        await trimmed(gateway, reader)


async def test_what_came_while_it_was_saved_stays_until_the_next_time(gateway: Gateway) -> None:
    steps: list[int] = []
    lengths: list[int] = []

    async def save() -> None:
        lengths.append(await gateway.redis.xlen(reader.key))
        if len(lengths) == 1:
            await write(gateway, reader, 2)
            await until(lambda: steps == [1, 2])

    async with reading(gateway, steps, save, []) as reader:
        await write(gateway, reader, 1)
        await trimmed(gateway, reader)
    assert lengths == [1, 1]


async def test_what_could_not_be_kept_is_not_removed_and_tried_again(gateway: Gateway) -> None:
    errors: list[str] = []
    tries: list[int] = []

    async def save() -> None:
        tries.append(await gateway.redis.xlen(reader.key))
        if len(tries) == 1:
            raise RedisConnectionError("gone")

    async with reading(gateway, [], save, errors) as reader:
        await write(gateway, reader, 1)
        await trimmed(gateway, reader)
    assert (tries, errors) == ([1, 1], ["doubt"])


async def test_the_first_entries_are_looked_into_as_they_arrive_and_all_are_handed_out_in_order(
    gateway: Gateway,
) -> None:
    seen: list[str] = []
    steps: list[int] = []

    async def save() -> None:
        """Kept."""

    def begin(batch: OutboxBatch) -> None:
        seen.append(f"{batch.step} after {len(steps)}")
        if batch.step == 1:
            raise ValueError("a bad batch ends nothing")

    count = MAX_SCANNED + 2
    key = redis_keys.outbox_key("reader", gateway.prefix)
    for step in range(1, count):
        data = protocol.encode(OutboxBatch(replica_id="r", incarnation="i", step=step))
        await gateway.redis.xadd(key, {protocol.STREAM_FIELD: data})
    await gateway.redis.xadd(key, {protocol.STREAM_FIELD: b"no batch"})
    async with reading(gateway, steps, save, [], begin) as reader:
        await write(gateway, reader, count)
        await until(lambda: len(steps) == count)
        assert steps == [*range(1, count + 1)]
        assert seen[:MAX_SCANNED] == [f"{step} after 0" for step in range(1, MAX_SCANNED + 1)]
        assert len(seen) < count
        await trimmed(gateway, reader)
