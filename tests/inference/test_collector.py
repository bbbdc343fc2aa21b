"""When the garbage collector looks."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from inference import lifespan as collector
from tests.inference.conftest import until


class Knot:
    """Refers to itself."""

    def __init__(self) -> None:
        self.self = self


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    initial_threshold = gc.get_threshold()
    yield
    gc.set_threshold(*initial_threshold)
    gc.unfreeze()


def test_it_looks_at_new_objects_often_and_at_older_ones_seldom() -> None:
    collector.set_gc_thresholds()
    assert gc.get_threshold()[:2] == (collector.GEN0_THRESHOLD, collector.GEN1_THRESHOLD)
    assert gc.get_freeze_count() > 1000


async def test_older_garbage_goes_once_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "IDLE_CHECK_INTERVAL_S", 0.001)
    monkeypatch.setattr(collector, "IDLE_S", 0.001)
    monkeypatch.setattr(collector, "GEN0_THRESHOLD", 1_000_000)
    collector.set_gc_thresholds()
    idle = False
    probes = 0

    def is_idle() -> bool:
        nonlocal probes
        probes += 1
        return idle

    knot = Knot()
    retained_ref = weakref.ref(knot)
    for _ in range(collector.OLDER_WHEN_IDLE_AFTER + 1):
        gc.collect(0)
    del knot
    task = asyncio.create_task(collector.collect_when_idle(is_idle))
    try:
        await until(lambda: probes > 3)
        assert retained_ref() is not None
        idle = True
        await until(lambda: retained_ref() is None)
    finally:
        task.cancel()


async def test_a_moment_between_two_crowds_is_no_quiet_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "IDLE_CHECK_INTERVAL_S", 0.001)
    monkeypatch.setattr(collector, "IDLE_S", 0.001)
    monkeypatch.setattr(gc, "get_count", lambda: (0, collector.OLDER_WHEN_IDLE_AFTER, 0))
    monkeypatch.setattr(gc, "collect", lambda: collected.append(len(probes)))
    probes: list[bool] = []
    collected: list[int] = []

    def is_idle() -> bool:
        probes.append(len(probes) not in (1, 3))  # busy again a moment later, twice
        return probes[-1]

    task = asyncio.create_task(collector.collect_when_idle(is_idle))
    try:
        await until(lambda: collected)
    finally:
        task.cancel()
    assert collected[0] == 6
