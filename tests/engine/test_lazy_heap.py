"""The heap whose keys may change."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.lazy_heap import LazyHeap

CHANGES = st.lists(st.tuples(st.sampled_from("abcde"), st.one_of(st.none(), st.integers(0, 9))))


@given(CHANGES)
def test_first_is_the_smallest_key_whatever_changed(
    changes: list[tuple[str, int | None]],
) -> None:
    heap, registered_keys = LazyHeap(), dict[str, int]()
    for name, key in changes:
        if key is None:
            heap.discard(name)
            registered_keys.pop(name, None)
        else:
            heap.put(name, key)
            registered_keys[name] = key
        first = min(((key, name) for name, key in registered_keys.items()), default=None)
        assert heap.first() == (first and first[::-1])
        assert len(heap) == len(registered_keys)
        assert all(name in heap for name in registered_keys)


def test_outdated_entries_do_not_pile_up() -> None:
    heap = LazyHeap()
    heap.put("last", 10**9)
    for key in range(10_000):
        heap.put("busy", 10_000 - key)
    assert len(heap._heap) < 100
    assert heap.first() == ("busy", 1)
