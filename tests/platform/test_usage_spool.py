"""Each request's usage reaches the ledger once, whatever fails on its way."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis
from django.db import DatabaseError, OperationalError
from django.db.backends.signals import connection_created

from metering import drain, settlement
from metering.access import UsageRecord, settle
from metering.admission import UNLIMITED
from metering.drain import LedgerWriter, Spool, drain_once, write
from metering.ledger import LEDGER_ROWS as ROWS
from metering.ledger import insert_records
from metering.models import UsageEntry
from metering.redis_scripts import redis_key, sync_client
from metering.settlement import spool_key
from metering.usage_record import decode_record, encode_record
from tests.platform.conftest import World
from tests.services import running_redis
from tests.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True)]
database = pytest.mark.database


def record(world: World, request_id: str = "r1", **values: Any) -> UsageRecord:
    defaults: dict[str, Any] = {
        "tenant_id": world.acme.pk,
        "key_id": world.key.pk,
        "endpoint": "chat",
        "model": "m",
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "completion_tokens": 5,
        "finish_reason": "stop",
        "status": 200,
        "started_at": datetime(2026, 2, 28, 23, 59, 59, tzinfo=UTC),
        "ttft_ms": 3.5,
        "duration_ms": 20.0,
        "stream": True,
    }
    return UsageRecord(request_id=request_id, **{**defaults, **values})


@pytest.fixture
def client(redis_server: str) -> redis.Redis:
    return sync_client()


@database
def test_a_settled_request_becomes_a_row(world: World, client: redis.Redis) -> None:
    asyncio.run(settle(record(world)))
    assert UsageEntry.objects.count() == 0  # no database on a request's way
    assert drain_once(client) == 1
    row = UsageEntry.objects.get()
    assert (row.request_id, row.tenant, row.api_key) == ("r1", world.acme, world.key)
    assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (10, 4, 5)
    assert row.total_tokens == 15
    assert row.started_at == datetime(2026, 2, 28, 23, 59, 59, tzinfo=UTC)
    assert (row.status, row.finish_reason, row.stream, row.ttft_ms) == (200, "stop", True, 3.5)
    assert client.xlen(spool_key()) == 0


@database
def test_a_request_without_a_reservation_is_settled_too(world: World, client: redis.Redis) -> None:
    asyncio.run(settle(record(world), UNLIMITED))
    asyncio.run(settle(record(world), UNLIMITED))
    assert drain_once(client) == 2
    assert UsageEntry.objects.get().total_tokens == 15


@database
def test_more_rows_than_a_statement_takes_are_written(world: World) -> None:
    records = [record(world, f"r{n}") for n in range(2 * ROWS + 1)]
    insert_records([*records, *records[:3]])
    insert_records(records[:ROWS])
    insert_records([])
    assert UsageEntry.objects.count() == 2 * ROWS + 1


@database
def test_tokens_of_images_are_in_the_ledger(world: World) -> None:
    insert_records([record(world, image_tokens=6), record(world, "r2")])
    entries = UsageEntry.objects.order_by("request_id").values_list("image_tokens", flat=True)
    assert list(entries) == [6, 0]
    with pytest.raises(ValueError, match="image_tokens"):
        record(world, image_tokens=-1)


@database
def test_fault_28_duplicates_are_billed_once(world: World, client: redis.Redis) -> None:
    for _ in range(3):
        asyncio.run(settle(record(world)))
    asyncio.run(settle(record(world, "r2")))
    assert drain_once(client) == 4
    asyncio.run(settle(record(world)))
    drain_once(client)
    assert UsageEntry.objects.count() == 2


@database
def test_fault_28_a_drainer_that_dies_between_insert_and_ack_doubles_nothing(
    world: World, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(settle(record(world)))
    dying = Spool(client, "dying")
    dying.ensure_group()

    def die(ids: object) -> None:
        raise SystemExit("killed")

    monkeypatch.setattr(dying, "done", die)
    with pytest.raises(SystemExit):
        write(dying, dying.read(block_ms=None))
    assert UsageEntry.objects.count() == 1
    assert client.xlen(spool_key()) == 1
    assert drain_once(client, claim_idle_ms=0) == 1
    assert UsageEntry.objects.count() == 1
    assert client.xlen(spool_key()) == 0


@database
def test_fault_28_a_drainer_that_dies_before_the_insert_loses_nothing(
    world: World, client: redis.Redis
) -> None:
    asyncio.run(settle(record(world)))
    dead = Spool(client, "dead")
    dead.ensure_group()
    assert len(dead.read(block_ms=None)) == 1
    assert drain_once(client) == 0  # it may be alive and busy
    assert drain_once(client, claim_idle_ms=0) == 1
    assert UsageEntry.objects.count() == 1


@database
def test_fault_35_what_a_dead_drainer_took_is_claimed_though_redis_has_its_clock_set_back(
    world: World, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(settle(record(world)))
    dead, alive = Spool(client, "dead"), Spool(client, "alive")
    dead.ensure_group()
    dead.read(block_ms=None)
    pending = client.xpending_range

    def pending_in_the_future(*args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        return [{**one, "time_since_delivered": 0} for one in pending(*args, **kwargs)]

    monkeypatch.setattr(client, "xpending_range", pending_in_the_future)
    now = [100.0]
    watch = drain.PendingAge(lambda: now[0])
    assert alive.claim(30_000, watch) == []
    now[0] += 29
    assert alive.claim(30_000, watch) == []
    now[0] += 1
    assert write(alive, alive.claim(30_000, watch)) == 1
    assert UsageEntry.objects.count() == 1
    assert client.xpending(spool_key(), drain.GROUP)["pending"] == 0


@database
def test_what_was_trimmed_while_a_dead_drainer_had_it_is_forgotten(
    world: World, client: redis.Redis
) -> None:
    asyncio.run(settle(record(world)))
    dead = Spool(client, "dead")
    dead.ensure_group()
    ((name, _),) = dead.read(block_ms=None)
    client.xdel(spool_key(), name)
    assert drain_once(client, claim_idle_ms=0) == 0
    assert client.xpending(spool_key(), drain.GROUP)["pending"] == 0
    assert client.xlen(redis_key("usage:dead")) == 0


@database
def test_a_drainer_whose_connection_broke_writes_what_it_had_taken(
    world: World, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(settle(record(world)))
    read, broken = Spool.read, threading.Event()

    def break_after_the_first(spool: Spool, *, block_ms: int | None) -> Any:
        entries = read(spool, block_ms=block_ms)
        if entries and not broken.is_set():
            broken.set()
            raise redis.exceptions.ReadOnlyError("READONLY You can't write against a replica.")
        return entries

    monkeypatch.setattr(Spool, "read", break_after_the_first)
    drainer = LedgerWriter()  # nothing is claimed within this test's time
    drainer.start()
    try:
        wait_until(UsageEntry.objects.exists, "the row is there")
    finally:
        drainer.stop()
    assert broken.is_set()


def test_fault_29_with_the_database_down_usage_waits_and_is_then_written(
    world: World, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "BLOCK_MS", 20)
    down = True
    tried = 0

    def insert(records: list[UsageRecord]) -> None:
        nonlocal tried
        tried += 1
        if down:
            raise OperationalError("the database is down")
        insert_records(records)

    monkeypatch.setattr(drain, "insert_records", insert)
    drainer = LedgerWriter()
    drainer.start()
    try:
        for number in range(20):
            asyncio.run(settle(record(world, f"r{number}")))
        wait_until(lambda: tried >= 1, "the drainer has tried")
        assert UsageEntry.objects.count() == 0
        assert client.xlen(spool_key()) == 20
        down = False
        wait_until(lambda: UsageEntry.objects.count() == 20, "all rows are there")
        wait_until(lambda: client.xlen(spool_key()) == 0, "the spool is empty")
    finally:
        drainer.stop()
    assert not drainer.is_alive()


def test_fault_29_the_spool_is_bounded(
    world: World, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settlement, "MAX_SPOOLED", 100)

    async def settle_many() -> None:
        for number in range(1000):
            await settle(record(world, f"r{number}"))

    asyncio.run(settle_many())
    assert client.xlen(spool_key()) < 400  # trimmed by whole nodes of the stream


def test_fault_28_without_redis_usage_goes_straight_to_the_database(
    world: World, settings: Any
) -> None:
    settings.REDIS_URL = "unix:///nowhere/redis.sock"
    asyncio.run(settle(record(world)))
    assert UsageEntry.objects.count() == 1


def test_fault_29_without_redis_and_database_usage_waits_in_memory(
    world: World, settings: Any, redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(records: list[UsageRecord]) -> None:
        raise DatabaseError("down")

    with monkeypatch.context() as patched:
        patched.setattr(settlement, "insert_records", down)
        patched.setattr(settlement, "MAX_WAITING", 3)
        settings.REDIS_URL = "unix:///nowhere/redis.sock"
        for number in range(5):
            asyncio.run(settle(record(world, f"r{number}")))
    settings.REDIS_URL = redis_server
    with monkeypatch.context() as patched:
        patched.setattr(drain, "insert_records", down)
        with pytest.raises(DatabaseError):
            drain.write_waiting()
    assert drain_once(sync_client()) == 3
    names = UsageEntry.objects.order_by("request_id").values_list("request_id", flat=True)
    assert list(names) == ["r2", "r3", "r4"]  # the oldest gave way, and the log said so
    assert drain.write_waiting() == 0


def test_a_drainer_keeps_its_connection_from_batch_to_batch(
    world: World, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "BLOCK_MS", 20)
    monkeypatch.setattr(drain, "GATHER_S", 0.0)
    opened: list[str] = []

    def record_connection(**_: object) -> None:
        opened.append(threading.current_thread().name)

    connection_created.connect(record_connection)
    drainer = LedgerWriter()
    drainer.start()
    try:
        for number in range(4):
            asyncio.run(settle(record(world, f"r{number}")))
            wait_until(lambda n=number: UsageEntry.objects.count() == n + 1, "the row is there")  # type: ignore[misc]
    finally:
        drainer.stop()
        connection_created.disconnect(record_connection)
    assert opened.count("quire-usage") == 1


def test_fault_28_a_redis_that_lost_everything_gets_its_group_again(
    world: World, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "BLOCK_MS", 20)
    drainer = LedgerWriter()
    drainer.start()
    try:
        wait_until(lambda: client.exists(spool_key()), "the group is there")
        client.delete(spool_key())
        asyncio.run(settle(record(world)))
        wait_until(lambda: UsageEntry.objects.count() == 1, "the row is there")
    finally:
        drainer.stop()


@pytest.mark.service
def test_fault_28_a_restarted_redis_is_found_again(
    world: World, short_tmp: Path, settings: Any, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "BLOCK_MS", 20)
    settings.QUIRE = settings.QUIRE.replace(key_prefix=key_prefix)
    with running_redis(short_tmp / "restart") as url:
        settings.REDIS_URL = url
        drainer = LedgerWriter()
        drainer.start()
        asyncio.run(settle(record(world)))
        wait_until(lambda: UsageEntry.objects.count() == 1, "the first row")
    asyncio.run(settle(record(world, "r2")))  # while it's down
    with running_redis(short_tmp / "restart"):
        asyncio.run(settle(record(world, "r3")))
        wait_until(lambda: UsageEntry.objects.count() == 3, "all rows")
        drainer.stop()


def test_records_that_come_one_after_the_other_are_written_together(
    world: World, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []

    def insert(records: list[UsageRecord]) -> None:
        batches.append(len(records))
        insert_records(records)

    monkeypatch.setattr(drain, "insert_records", insert)
    monkeypatch.setattr(drain, "GATHER_S", 1.0)
    drainer = LedgerWriter()
    drainer.start()
    try:
        for n in range(5):
            asyncio.run(settle(record(world, f"r{n}")))
            time.sleep(0.01)
        wait_until(lambda: UsageEntry.objects.count() == 5, "all rows")
    finally:
        drainer.stop()
    assert len(batches) <= 2


@database
def test_several_drainers_share_the_work(
    world: World, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "BLOCK_MS", 20)
    monkeypatch.setattr(drain, "BATCH", 7)
    drainers = [LedgerWriter() for _ in range(3)]
    for drainer in drainers:
        drainer.start()

    async def settle_many() -> None:
        await asyncio.gather(*[settle(record(world, f"r{n % 150}")) for n in range(300)])

    asyncio.run(settle_many())
    wait_until(lambda: client.xlen(spool_key()) == 0, "the spool is empty")
    for drainer in drainers:
        drainer.stop()
    assert UsageEntry.objects.count() == 150
    consumers = client.xinfo_consumers(spool_key(), drain.GROUP)
    assert consumers == []


@database
@pytest.mark.parametrize("fields", [{"r": b"\xff\x00garbage"}, {"x": b"1"}, {"r": b"\x80"}])
def test_an_entry_that_is_no_record_is_set_apart_and_stops_nothing(
    world: World, client: redis.Redis, fields: dict[str, bytes]
) -> None:
    client.xadd(spool_key(), fields)
    asyncio.run(settle(record(world)))
    assert drain_once(client) == 1
    assert UsageEntry.objects.count() == 1
    assert client.xlen(spool_key()) == 0
    assert client.xlen(redis_key("usage:dead")) == 1


@database
def test_a_row_outlives_its_key_and_an_unknown_tenant_blocks_nothing(
    world: World, client: redis.Redis
) -> None:
    asyncio.run(settle(record(world, "r1", tenant_id=999_999, key_id=888_888, user_id=777_777)))
    asyncio.run(settle(record(world, "r2")))
    assert drain_once(client) == 2
    assert UsageEntry.objects.get(request_id="r1").tenant_id == 999_999


@database
def test_hostile_text_is_made_plain(world: World, client: redis.Redis) -> None:
    asyncio.run(settle(record(world, "r\0\ud800" + "x" * 500, model="m\0" * 300)))
    assert drain_once(client) == 1
    row = UsageEntry.objects.get()
    assert "\0" not in row.request_id + row.model
    assert len(row.request_id) <= 200


def test_records_come_back_from_the_wire_unchanged(world: World) -> None:
    sent = record(world, started_at=1_700_000_000.25)
    assert sent.started_at == datetime.fromtimestamp(1_700_000_000.25, UTC)
    assert decode_record(encode_record(sent)) == sent


@pytest.mark.parametrize("values", [{"prompt_tokens": -1}, {"completion_tokens": 2**63}])
def test_counts_out_of_range_are_refused(world: World, values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        record(world, **values)


def test_a_record_needs_a_request_id(world: World) -> None:
    with pytest.raises(ValueError, match="request_id"):
        record(world, "")


async def test_a_gateways_drainer_starts_once_and_stops(
    world: World, live_redis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "BLOCK_MS", 20)
    drain.start_drainer()
    first = drain._drainer
    drain.start_drainer()
    assert drain._drainer is first
    await drain.stop_drainer()
    assert first is not None
    assert not first.is_alive()
    assert drain._drainer is None
