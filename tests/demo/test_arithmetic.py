"""The workings of sums are right, digit by digit."""

from __future__ import annotations

from itertools import product

import pytest

from demo.generator.arithmetic import is_fact, value, working

PAIRS = [("+", a, b) for a, b in product(range(100), repeat=2)]
PAIRS += [("-", a, b) for a, b in product(range(100), repeat=2) if a >= b]


def calculate(text: str) -> int:
    """A sum of one sign, from the left."""
    sign = "+" if "+" in text else "-"
    first, *rest = map(int, text.split(f" {sign} "))
    for number in rest:
        first = value(sign, first, number)
    return first


def test_every_step_of_every_working_is_right():
    for sign, a, b in PAIRS:
        for step in working(sign, a, b).replace("so ", "").split(", "):
            formula, right = step.split(" = ")
            assert calculate(formula) == int(right)


def test_every_working_ends_with_the_result():
    for sign, a, b in PAIRS:
        assert working(sign, a, b).endswith(f"{a} {sign} {b} = {value(sign, a, b)}")


def test_facts_need_no_working():
    facts = [pair for pair in PAIRS if is_fact(*pair)]
    assert len(facts) == 200
    assert not [pair for pair in facts if "," in working(*pair)]


@pytest.mark.parametrize(
    ("sign", "a", "b", "text"),
    [
        ("+", 47, 38, "7 + 8 = 15, 4 + 1 + 3 = 8, so 47 + 38 = 85"),
        ("+", 42, 3, "2 + 3 = 5, so 42 + 3 = 45"),
        ("-", 85, 38, "15 - 8 = 7, 8 - 1 - 3 = 4, so 85 - 38 = 47"),
        ("*", 7, 8, "7 * 8 = 56"),
    ],
)
def test_a_working_by_example(sign, a, b, text):
    assert working(sign, a, b) == text
