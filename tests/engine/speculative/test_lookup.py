"""What followed the last time that the newest tokens stood there."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.speculative.lookup import TokenLookup, continued


def slow(tokens: list[int], shortest: int, longest: int) -> tuple[int, int] | None:
    """By comparing every place."""
    for length in range(longest, shortest - 1, -1):
        newest = tokens[-length:]
        for end in range(len(tokens) - 1, length - 1, -1):
            if len(newest) == length and tokens[end - length : end] == newest:
                return end, length
    return None


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.integers(1, 3),
    st.integers(0, 3),
    st.lists(st.integers(0, 40), max_size=5),
)
def test_the_longest_run_is_found_where_it_stood_last(
    tokens: list[int], shortest: int, more: int, cuts: list[int]
) -> None:
    lookup = TokenLookup(shortest, shortest + more)
    for cut in sorted(cuts):
        lookup.extend(tokens[:cut])
    lookup.extend(tokens)
    assert lookup.find(tokens, tokens) == slow(tokens, shortest, shortest + more)


def test_a_copy_goes_on_where_its_source_ends() -> None:
    assert continued([9, 1, 2, 1, 2], 3, 5) == [1, 2, 1, 2, 1]
    assert continued([5, 5], 1, 3) == [5, 5, 5]
    assert continued([1, 2, 3], 0, 2) == [1, 2]
