"""What followed the last time that the newest tokens stood there."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.speculative.ngram import MultiTextNgramIndex, NgramIndex, copy_continuation


def slow(tokens: list[int], newest: list[int], shortest: int, longest: int) -> int | None:
    """By comparing every place."""
    for length in range(longest, shortest - 1, -1):
        run = newest[-length:]
        for end in range(len(tokens) - 1, length - 1, -1):
            if len(run) == length and tokens[end - length : end] == run:
                return end
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
    lookup = NgramIndex(shortest, shortest + more)
    for cut in sorted(cuts):
        lookup.extend(tokens[:cut])
    lookup.extend(tokens)
    assert lookup.find(tokens) == slow(tokens, tokens, shortest, shortest + more)


_TEXT = st.lists(st.integers(0, 3), max_size=12)


@settings(deadline=None)
@given(st.lists(_TEXT, max_size=6), st.integers(0, 6), _TEXT, st.integers(1, 3), st.integers(0, 3))
def test_of_several_texts_the_newest_tells(
    texts: list[list[int]], dropped: int, newest: list[int], shortest: int, more: int
) -> None:
    lookup, lengths = MultiTextNgramIndex(shortest, shortest + more), (shortest, shortest + more)
    for text in texts:
        lookup.add(text)
    for text in texts[:dropped]:  # the oldest
        lookup.drop(text)
    retained_texts = texts[dropped:]
    expected = next(
        (
            (text, index)
            for length in range(lengths[1], lengths[0] - 1, -1)
            for text in reversed(retained_texts)
            if (index := slow(text, newest, length, length)) is not None
        ),
        None,
    )
    assert lookup.find(newest) == expected
    for text in retained_texts:
        lookup.drop(text)
    assert not any(lookup._after.values())


def test_a_copy_goes_on_where_its_source_ends() -> None:
    assert copy_continuation([9, 1, 2, 1, 2], 3, 5) == [1, 2, 1, 2, 1]
    assert copy_continuation([5, 5], 1, 3) == [5, 5, 5]
    assert copy_continuation([1, 2, 3], 0, 2) == [1, 2]
