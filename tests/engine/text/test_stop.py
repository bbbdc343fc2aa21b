"""Stop strings across the borders of tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.stop_strings import StopChecker

STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=5)


def run(stops, chunks, include=False):
    checker = StopChecker(stops, include)
    out, stop = "", None
    for chunk in chunks:
        text, stop = checker.append(chunk)
        out += text
    return out + checker.flush(), stop


def reference(stops, text, include):
    """The stop that's complete first; of several, the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    stops=STOPS,
    text=st.text("abc", max_size=30),
    cuts=st.lists(st.integers(0, 30)),
    include=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_any_split_gives_what_the_whole_gives(stops, text, cuts, include):
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    chunks = [text[a:b] for a, b in pairwise(edges)]
    want = reference(stops, text, include)
    assert run(stops, chunks, include) == want
    assert run(stops, [text], include) == want
    assert run(stops, list(text), include) == want


@given(stops=STOPS, text=st.text("abc", max_size=30))
@settings(deadline=None)
def test_holds_back_no_more_than_could_become_a_stop(stops, text):
    checker = StopChecker(stops)
    out = ""
    for k, char in enumerate(text, start=1):
        part, result = checker.append(char)
        out += part
        if result:
            return
        allocated_text = text[len(out) : k]
        assert not allocated_text or any(stop.startswith(allocated_text) for stop in stops)


def test_fault_11_a_match_split_over_tokens_is_trimmed_exactly():
    checker = StopChecker(["\n\nUser:"])
    assert checker.append("Hello\n") == ("Hello", None)
    assert checker.append("\nUs") == ("", None)
    assert checker.append("er: hi") == ("", "\n\nUser:")
    assert checker.flush() == ""


def test_a_near_match_is_given_out_again():
    checker = StopChecker(["\n\nUser:"])
    assert checker.append("Hello\n\nUse") == ("Hello", None)
    assert checker.append("less") == ("\n\nUseless", None)


def test_included_stop_string_ends_the_text():
    assert run(["STOP"], ["a ST", "OP b"], include=True) == ("a STOP", "STOP")


def test_after_a_match_nothing_more_comes():
    checker = StopChecker(["x"])
    assert checker.append("axb") == ("a", "x")
    assert checker.append("more") == ("", "x")
    assert checker.flush() == ""


def test_first_complete_stop_wins_then_the_longest():
    assert run(["abcde", "cd"], ["abcde"]) == ("ab", "cd")
    assert run(["cd", "abcd"], ["abcd"]) == ("", "abcd")
    assert run(["b", "b"], ["ab"]) == ("a", "b")


def test_unmatched_rest_is_flushed():
    assert run(["END"], ["the E", "N"]) == ("the EN", None)


@pytest.mark.parametrize("stops", [None, []])
def test_without_stops_everything_passes_at_once(stops):
    checker = StopChecker(stops)
    assert checker.append("abc") == ("abc", None)
    assert checker.flush() == ""


def test_min_tokens_lets_early_stop_strings_pass():
    checker = StopChecker(["END"])
    assert checker.append("aEND", may_stop=False) == ("aEND", None)
    assert checker.append("bE", may_stop=False) == ("b", None)
    assert checker.append("ND") == ("", "END")


def test_fault_11_many_long_stops_cost_linear_work():
    """64 stops of 4096 characters that all but match: character steps are counted."""
    stops = ["a" * (4095 - k) + "b" for k in range(64)]
    checker = StopChecker(stops)
    out = ""
    for _ in range(200):
        text, stop = checker.append("a" * 50)
        assert stop is None
        out += text
    assert len(out) == 10_000 - 4095
    assert sum(len(matcher._fail) for matcher in checker._matchers) <= 64 * 4097
    assert checker.append("b") == ("", stops[0])
