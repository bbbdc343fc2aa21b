"""When the garbage collector looks."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from inference import collector
from tests.inference.conftest import until


class Knot:
    """Refers to itself."""

    def __init__(self) -> None:
        self.self = self


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_it_looks_at_new_objects_often_and_at_older_ones_seldom() -> None:
    collector.look_often(1234)
    assert gc.get_threshold()[:2] == (1234, collector.OLDER_AFTER)
    assert gc.get_freeze_count() > 1000


def test_0_leaves_it_as_python_has_it() -> None:
    before = gc.get_threshold()
    collector.look_often(0)
    assert gc.get_threshold() == before


async def test_older_garbage_goes_once_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "LOOK_FOR_IDLE_EVERY_S", 0.001)
    collector.look_often(1_000_000)
    idle = False
    looks = 0

    def is_idle() -> bool:
        nonlocal looks
        looks += 1
        return idle

    knot = Knot()
    kept = weakref.ref(knot)
    for _ in range(collector.OLDER_WHEN_IDLE_AFTER + 1):
        gc.collect(0)
    del knot
    task = asyncio.create_task(collector.collect_when_idle(is_idle))
    try:
        await until(lambda: looks > 3)
        assert kept() is not None
        idle = True
        await until(lambda: kept() is None)
    finally:
        task.cancel()
