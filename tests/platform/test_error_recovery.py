"""A long-lived thread or coroutine that meets an error which nobody foresaw goes on after it."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import redis

from common import loops
from common.loops import LoopThread, failure_warnings, keep_running
from metering import drain, gateway_recovery, request_log_writer
from metering.drain import LedgerWriter, drain_once
from metering.gateway_recovery import GatewayHeartbeat
from metering.models import UsageEntry
from metering.redis_scripts import redis_key
from metering.request_log_writer import RequestLogWriter
from metering.settlement import settle
from metering.usage_record import UsageRecord
from tests.platform.conftest import World
from tests.platform.test_usage_spool import client, record  # noqa: F401
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def _restarts_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loops, "RESTART_DELAY_S", 0.01)
    monkeypatch.setattr(loops, "_latest", {})
    return


def fail_first(monkeypatch: pytest.MonkeyPatch, holder: Any, name: str) -> threading.Event:
    """Have a function raise what nobody expects at its first call; set at the second."""
    original, calls, again = getattr(holder, name), [], threading.Event()

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) == 1:
            raise RuntimeError("nobody foresaw this")
        again.set()
        return original(*args, **kwargs)

    monkeypatch.setattr(holder, name, call)
    return again


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("thread_class", "module", "function"),
    [
        (LedgerWriter, drain, "write_waiting"),
        (GatewayHeartbeat, gateway_recovery, "send_heartbeat"),
        (RequestLogWriter, request_log_writer, "write_waiting"),
    ],
)
def test_fault_78_a_thread_goes_on_after_an_error_and_health_tells_of_it(
    thread_class: type[LoopThread],
    module: Any,
    function: str,
    redis_server: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    again = fail_first(monkeypatch, module, function)
    thread = thread_class()
    thread.start()
    try:
        assert again.wait(60)
        assert thread.is_alive()
    finally:
        thread.stop()
    assert not thread.is_alive()
    (warning,) = failure_warnings()
    assert re.match(rf"{thread.name} failed \d+ s ago \(RuntimeError\)", warning)
    (logged,) = (line for line in caplog.records if "begins anew" in line.message)
    assert logged.exc_info is not None


@pytest.mark.django_db(transaction=True)
def test_fault_78_usage_is_written_after_an_error(
    world: World,
    client: redis.Redis,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_first(monkeypatch, drain, "insert_records")
    asyncio.run(settle(record(world)))
    writer = LedgerWriter()
    writer.start()
    try:
        wait_until(lambda: UsageEntry.objects.count() == 1, "the row is there")
    finally:
        writer.stop()


@pytest.mark.django_db(transaction=True)
def test_fault_78_a_record_that_no_database_takes_holds_up_no_other(
    world: World,
    client: redis.Redis,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    insert = drain.insert_records

    def refuse(records: Sequence[UsageRecord]) -> None:
        if any(one.request_id == "r1" for one in records):
            raise ValueError("A string literal cannot contain NUL (0x00) characters.")
        insert(records)

    monkeypatch.setattr(drain, "insert_records", refuse)
    for number in range(3):
        asyncio.run(settle(record(world, f"r{number}")))
    assert drain_once(client) == 2
    assert set(UsageEntry.objects.values_list("request_id", flat=True)) == {"r0", "r2"}
    assert client.xlen(redis_key("usage:dead")) == 1


async def test_fault_78_a_coroutine_begins_anew_after_an_error() -> None:
    calls: list[int] = []

    async def run() -> None:
        calls.append(1)
        if len(calls) < 3:
            raise RuntimeError("nobody foresaw this")

    await keep_running("test", run)
    assert len(calls) == 3
    assert failure_warnings() == ["test failed 0 s ago (RuntimeError) and began anew: see the log."]


def test_what_failed_long_ago_is_no_longer_told(monkeypatch: pytest.MonkeyPatch) -> None:
    loops.record_failure("test", ValueError())
    monkeypatch.setattr(loops, "VISIBLE_FOR_S", 0.0)
    assert failure_warnings() == []
