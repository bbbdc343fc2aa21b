"""Few combinations of many choices: each two values of two axes meet at least once.

Most faults show where two choices meet, and need no third (Kuhn, Wallace and Gallo 2004, "Software
Fault Interactions and Implications for Software Testing").
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

Choice = tuple[int, ...]


def covering(*, indirect: Sequence[str] = (), **axes: Sequence[Any]) -> pytest.MarkDecorator:
    """`parametrize` by these axes, in few combinations; the others are slow tests.

    `indirect`: those that are fixtures with parameters.
    """
    chosen = set(few(tuple(len(values) for values in axes.values())))
    params = [
        pytest.param(
            *(values[index] for values, index in zip(axes.values(), choice, strict=True)),
            marks=() if choice in chosen else pytest.mark.slow,
        )
        for choice in itertools.product(*(range(len(values)) for values in axes.values()))
    ]
    return pytest.mark.parametrize(tuple(axes), params, indirect=list(indirect))


def few(sizes: tuple[int, ...]) -> list[Choice]:
    """Places of values on axes of these sizes, such that each pair of places comes in one choice.

    Greedy: of all combinations always the first of those that bring most pairs that are missing.
    """
    every = {choice: _pairs(choice) for choice in itertools.product(*map(range, sizes))}
    missing = set().union(*every.values())
    combinations = []
    while missing:
        best = max(every, key=lambda choice: len(every[choice] & missing))
        combinations.append(best)
        missing -= every[best]
    return combinations


def _pairs(choice: Choice) -> set[tuple[tuple[int, int], ...]]:
    """(axis, place) of each two; of each one where there is one axis alone."""
    placed = list(enumerate(choice))
    return set(itertools.combinations(placed, min(2, len(placed))))
