"""Durations counted by how long they were, so that counts of many places can be added up.

Four counts to each doubling, from half a millisecond to half an hour: a percentile that is read
from them is off by less than a tenth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

SHORTEST_S = 0.0005
A_DOUBLING = 4
LAST = 87
#: Place of a count -> how often.
Spread = Mapping[int, int]


def place_of(seconds: float) -> int:
    """Where a duration is counted: from 0 to `LAST`."""
    if seconds <= SHORTEST_S:
        return 0
    return min(LAST, 1 + int(math.log2(seconds / SHORTEST_S) * A_DOUBLING))


def percentile(spread: Spread, fraction: float) -> float | None:
    """Seconds that `fraction` of the durations stay below; None for no durations."""
    total = sum(spread.values())
    if not total:
        return None
    wanted, before = fraction * total, 0
    for place in sorted(spread):
        count = spread[place]
        if before + count >= wanted:
            inside = (wanted - before) / count
            return SHORTEST_S * 2 ** ((place - 1 + inside) / A_DOUBLING)
        before += count
    return SHORTEST_S * 2 ** (max(spread) / A_DOUBLING)


def add(into: dict[int, int], spread: Mapping[int, int] | Mapping[str, int]) -> None:
    """Add counts; JSON has their places as text."""
    for place, count in spread.items():
        into[int(place)] = into.get(int(place), 0) + count
