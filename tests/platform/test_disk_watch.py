"""FAULTS 56: a full disk takes nothing down, and what was half written is never used."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest
import redis

from config import embedded_redis
from config import embedded_redis as disk_watch
from config.embedded_redis import DiskWatch


@pytest.fixture
def unharmed(short_tmp: Path) -> str:
    """The server, which a write beyond its limit fails instead of ending it, as ENOSPC does."""
    path = short_tmp / "server"
    path.write_text(f"#!/bin/sh\ntrap '' XFSZ\nexec {embedded_redis.find_server()} \"$@\"\n")
    path.chmod(0o700)
    return str(path)


def fails(client: redis.Redis) -> bool:
    """Whether Redis refuses to take anything. Waits for it: it writes once a turn of its loop."""
    for _ in range(500):
        try:
            client.set("filler", "x" * 4096)
        except redis.ResponseError as error:
            return "MISCONF" in str(error)
        time.sleep(0.01)
    return False


@pytest.mark.service
def test_fault_56_redis_goes_on_without_its_disk_and_writes_again_when_there_is_room(
    short_tmp: Path, unharmed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_watch, "EVERY_S", 0.0)
    budget = 0
    monkeypatch.setattr(disk_watch, "free_bytes", lambda folder: budget)
    data_dir = short_tmp / "data"
    process, url = embedded_redis.start(data_dir, binary=unharmed)
    watch, client = DiskWatch(url, data_dir), redis.Redis.from_url(url)
    try:
        client.set("before", "1")
        watch.tick()
        assert not watch.suspended
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
        assert fails(client), "the test's limit does nothing"
        watch.tick()
        assert watch.suspended
        client.set("meanwhile", "2")
        watch.tick()
        assert watch.suspended, "there's still no room"
        budget = disk_watch.ENOUGH_BYTES
        resource.prlimit(
            process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        )
        watch.tick()
        assert not watch.suspended
        client.set("after", "3")
        for _ in range(1000):
            if not client.info("persistence")["aof_rewrite_in_progress"]:
                break
            time.sleep(0.01)
        watch.tick()
        assert not watch.suspended
    finally:
        watch.close()
        client.close()
        process.stop()
    process, url = embedded_redis.start(data_dir, binary=unharmed)
    client = redis.Redis.from_url(url)
    try:
        assert client.mget("before", "meanwhile", "after") == [b"1", b"2", b"3"]
    finally:
        client.close()
        process.stop()


def test_a_redis_that_is_away_is_no_reason_to_end(short_tmp: Path) -> None:
    watch = DiskWatch(f"unix://{short_tmp}/nobody", short_tmp)
    watch.tick()
    assert not watch.suspended
