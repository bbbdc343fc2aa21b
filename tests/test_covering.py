"""Of few combinations each two values of two axes meet, and nothing is left out for good."""

from __future__ import annotations

import itertools

import pytest

from tests.covering import covering, few


@pytest.mark.parametrize("sizes", [(3,), (2, 5), (3, 3, 5), (2, 2, 2, 2), (1, 4, 6)])
def test_each_two_values_meet(sizes: tuple[int, ...]) -> None:
    chosen = few(sizes)
    for one, other in itertools.combinations(range(len(sizes)), 2):
        met = {(choice[one], choice[other]) for choice in chosen}
        assert met == set(itertools.product(range(sizes[one]), range(sizes[other])))
    assert {choice[0] for choice in chosen} == set(range(sizes[0]))
    assert (
        len(chosen)
        == len(set(chosen))
        <= 2 * max([a * b for a, b in itertools.combinations(sizes, 2)], default=sizes[0])
    )


def test_all_other_combinations_are_slow_tests() -> None:
    mark = covering(a=[1, 2, 3], b="xy", c=[None, 0]).mark
    names, params = mark.args
    assert names == ("a", "b", "c")
    assert {param.values for param in params} == set(itertools.product([1, 2, 3], "xy", [None, 0]))
    slow = [param.values for param in params if param.marks]
    assert 0 < len(slow) == len(params) - len(few((3, 2, 2)))
