"""The books of encoder outputs: budgets, references, evictions."""

from __future__ import annotations

import random
from dataclasses import replace

from engine.contract.messages import MediaItem
from engine.scheduler.encoder_cache import EncoderCacheManager, EncoderItem


def item(name: str, start: int, count: int) -> EncoderItem:
    """A picture of so many vectors."""
    return EncoderItem(MediaItem("image", name.encode(), ((start, count),)), name.encode(), 0)


def test_a_step_encodes_no_more_than_its_budget_but_always_one_item() -> None:
    cache = EncoderCacheManager(capacity=100, max_step_vectors=10)
    items = [item("a", 2, 6), item("b", 10, 6), item("c", 20, 30)]
    cache.start_step()
    assert cache.limit_tokens(items, 0, 60) == 10  # before b
    assert [task.key for task in cache.schedule(1, items, 0, 10)] == [b"a"]
    cache.start_step()
    assert cache.limit_tokens(items, 10, 50) == 10  # before c
    assert [task.key for task in cache.schedule(1, items, 10, 10)] == [b"b"]
    cache.start_step()
    assert cache.limit_tokens(items, 20, 40) == 40  # larger than a step's budget, but the first
    cache.schedule(1, items, 20, 40)
    cache.check_integrity()


def test_beside_decodes_a_step_encodes_one_item_or_those_that_are_fast_enough() -> None:
    cache = EncoderCacheManager(capacity=100, max_step_vectors=40)
    first, second = item("a", 0, 6), item("b", 0, 6)
    cache.start_step()
    assert cache.limit_tokens([first], 0, 6, max_vectors=0) == 6
    cache.schedule(1, [first], 0, 6)
    assert cache.limit_tokens([second], 0, 6, max_vectors=5) == 0
    assert cache.limit_tokens([second], 0, 6, max_vectors=6) == 6


def test_tokens_that_see_each_other_are_computed_in_one_step() -> None:
    cache = EncoderCacheManager(capacity=100, max_step_vectors=100)
    spans = MediaItem("image", b"a", ((10, 16), (30, 4)))
    picture = EncoderItem(spans, b"a", 0, bidirectional=True)
    chunks = [(0, 8), (0, 10), (0, 12), (10, 1), (12, 5), (20, 30), (20, 12), (31, 1)]
    limits = [cache.limit_tokens([picture], start, count) for start, count in chunks]
    assert limits == [8, 10, 10, 16, 14, 30, 10, 3]
    assert [cache.limit_tokens([picture], 12, count) for count in (0, -3)] == [0, 0]
    parted = EncoderItem(spans, b"a", 0)
    assert cache.limit_tokens([parted], 12, 5) == 5


def test_what_is_needed_stays_and_the_rest_goes_oldest_first() -> None:
    cache = EncoderCacheManager(capacity=20, max_step_vectors=100)
    for seq_id, name in enumerate("ab"):
        cache.start_step()
        cache.schedule(seq_id, [item(name, 0, 10)], 0, 10)
    assert cache.limit_tokens([item("c", 0, 10)], 0, 10) == 0  # both are needed
    cache.release(0)
    cache.start_step()
    assert cache.limit_tokens([item("c", 0, 10)], 0, 10) == 10
    assert [task.key for task in cache.schedule(2, [item("c", 0, 10)], 0, 10)] == [b"c"]
    assert cache.pop_dropped() == [b"a"]
    assert not cache.schedule(3, [item("b", 0, 10)], 0, 10)  # a hit
    assert (cache.num_hits, cache.num_queries) == (1, 4)
    cache.check_integrity()
    cache.release(2)
    assert not cache.drop_unused()  # b is needed
    assert cache.pop_dropped() == [b"c"]
    for seq_id in (1, 3):
        cache.release(seq_id)
    assert cache.drop_unused()
    cache.check_integrity()


def test_a_tenants_flood_pushes_out_its_own_outputs_before_anothers() -> None:
    cache = EncoderCacheManager(capacity=50, max_step_vectors=100)
    for seq_id, name in enumerate(["quiet", *(f"flood{number}" for number in range(20))]):
        picture = replace(item(name, 0, 10), tenant=name.rstrip("0123456789"))
        cache.start_step()
        cache.schedule(seq_id, [picture], 0, 10)
        cache.release(seq_id)
    assert cache.pop_dropped() == [f"flood{number}".encode() for number in range(16)]
    cache.check_integrity()


def test_any_order_of_events_keeps_the_books_and_the_capacity() -> None:
    rng = random.Random(5)
    cache = EncoderCacheManager(capacity=64, max_step_vectors=24)
    sizes = {name: rng.randrange(1, 40) for name in "abcdefghij"}
    progress: dict[int, tuple[list[EncoderItem], int]] = {}
    at_worker: set[bytes] = set()
    for seq_id in range(400):
        start, items = 0, []
        for name in rng.choices("abcdefghij", k=rng.randrange(1, 4)):
            start += rng.randrange(3)
            items.append(item(name, start, sizes[name]))
            start += sizes[name]
        progress[seq_id] = items, 0
        cache.start_step()
        planned = []
        for running in list(progress):
            items, done = progress[running]
            end = items[-1].item.end
            count = cache.limit_tokens(items, done, min(rng.randrange(1, 30), end - done))
            tasks = cache.schedule(running, items, done, count) if count else []
            planned += tasks
            at_worker |= {task.key for task in tasks}
            needed = {e.key for e in items if e.item.start < done + count and e.item.end > done}
            at_worker -= set(cache.pop_dropped()) - needed
            assert not count or needed <= at_worker
            progress[running] = items, done + count
            if done + count == end or rng.random() < 0.05:  # done, aborted or preempted
                cache.release(running)
                del progress[running]
        if rng.random() < 0.05:  # the step failed: all of its sequences begin anew
            cache.forget(planned)
            for running in progress:
                cache.release(running)
            progress.clear()
        cache.check_integrity()
        assert cache.num_vectors <= cache.capacity
