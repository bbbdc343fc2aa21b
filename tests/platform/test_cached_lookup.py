"""A bounded cache in front of a look-up."""

import asyncio

import pytest

from common.cached_lookup import AsyncTTLCache


class Clock:
    """Time that tests turn by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def test_an_answer_is_looked_up_once_within_its_time(clock: Clock) -> None:
    cache: AsyncTTLCache[str, int] = AsyncTTLCache(ttl=2, size=10, clock=clock)
    calls = 0

    async def look_up() -> int:
        nonlocal calls
        calls += 1
        return calls

    assert [await cache.get("k", look_up) for _ in range(3)] == [1, 1, 1]
    clock.now += 2.1
    assert await cache.get("k", look_up) == 2


async def test_waiters_share_one_look_up() -> None:
    cache: AsyncTTLCache[str, int] = AsyncTTLCache(ttl=2, size=10)
    started = asyncio.Event()
    release = asyncio.Event()
    calls = 0

    async def look_up() -> int:
        nonlocal calls
        calls += 1
        started.set()
        await release.wait()
        return 7

    waiters = [asyncio.create_task(cache.get("k", look_up)) for _ in range(50)]
    await started.wait()
    release.set()
    assert await asyncio.gather(*waiters) == [7] * 50
    assert calls == 1


async def test_a_waiter_that_leaves_does_not_fail_the_others() -> None:
    cache: AsyncTTLCache[str, int] = AsyncTTLCache(ttl=2, size=10)
    release = asyncio.Event()

    async def look_up() -> int:
        await release.wait()
        return 7

    first = asyncio.create_task(cache.get("k", look_up))
    second = asyncio.create_task(cache.get("k", look_up))
    await asyncio.sleep(0)
    first.cancel()
    release.set()
    assert await second == 7
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_the_longest_unused_answer_leaves_first() -> None:
    cache: AsyncTTLCache[int, int] = AsyncTTLCache(ttl=60, size=3)
    for key in (1, 2, 3):
        cache.store(key, key)
    assert cache.peek(1) == 1
    cache.store(4, 4)
    assert len(cache) == 3
    assert cache.peek(2) is None
    assert [cache.peek(key) for key in (1, 3, 4)] == [1, 3, 4]


async def test_a_failed_look_up_reaches_every_waiter_and_is_not_kept() -> None:
    cache: AsyncTTLCache[str, int] = AsyncTTLCache(ttl=60, size=3)

    async def fail() -> int:
        raise OSError("away")

    results = await asyncio.gather(
        *[cache.get("k", fail) for _ in range(3)], return_exceptions=True
    )
    assert all(isinstance(result, OSError) for result in results)

    async def work() -> int:
        return 1

    assert await cache.get("k", work) == 1


async def test_an_answer_that_was_on_its_way_when_the_cache_was_cleared_is_not_kept() -> None:
    cache: AsyncTTLCache[str, str] = AsyncTTLCache(ttl=60, size=3)
    release = asyncio.Event()

    async def old() -> str:
        await release.wait()
        return "old"

    waiter = asyncio.create_task(cache.get("k", old))
    await asyncio.sleep(0)
    cache.clear()
    release.set()
    assert await waiter == "old"
    assert cache.peek("k") is None


def test_loops_of_their_own_do_not_wait_for_each_other() -> None:
    cache: AsyncTTLCache[str, int] = AsyncTTLCache(ttl=60, size=3)

    async def never() -> int:
        await asyncio.Event().wait()
        return 0

    async def abandon() -> None:
        task = asyncio.create_task(cache.get("k", never))
        await asyncio.sleep(0)
        task.cancel()

    async def work() -> int:
        return 5

    asyncio.run(abandon())
    assert asyncio.run(cache.get("k", work)) == 5


async def test_all_may_be_forgotten_from_another_thread_in_any_moment(clock: Clock) -> None:
    cache: AsyncTTLCache[str, int] = AsyncTTLCache(ttl=2, size=10, clock=lambda: moment())

    def moment() -> float:
        cache.clear()  # as a commit in another thread does, between two lines here
        return clock.now

    cache._answers["k"] = (clock.now, 7)
    assert cache.peek("k") in (None, 7)
    assert len(cache) == 0


async def test_who_asks_often_enough_waits_for_no_look_up(clock: Clock) -> None:
    cache: AsyncTTLCache[str, int] = AsyncTTLCache(ttl=2, size=10, clock=clock)
    calls, may_answer = 0, asyncio.Event()

    async def look_up() -> int:
        nonlocal calls
        calls += 1
        if calls > 1:
            await may_answer.wait()
        return calls

    assert await cache.get("k", look_up) == 1
    clock.now += 0.9
    assert await cache.get("k", look_up) == 1
    await asyncio.sleep(0)
    assert calls == 1  # young enough
    clock.now += 0.2
    assert [await cache.get("k", look_up) for _ in range(3)] == [1, 1, 1]
    await asyncio.sleep(0)
    assert calls == 2  # asked once, and nobody waits for it
    may_answer.set()
    await asyncio.sleep(0.01)
    assert await cache.get("k", look_up) == 2


async def test_a_look_up_ahead_of_time_that_fails_takes_nothing_away(clock: Clock) -> None:
    cache: AsyncTTLCache[str, int] = AsyncTTLCache(ttl=2, size=10, clock=clock)

    async def look_up() -> int:
        return 1

    async def fail() -> int:
        raise OSError("away")

    await cache.get("k", look_up)
    clock.now += 1.5
    assert await cache.get("k", fail) == 1
    await asyncio.sleep(0.01)
    assert await cache.get("k", fail) == 1
    clock.now += 0.6
    with pytest.raises(OSError, match="away"):
        await cache.get("k", fail)
