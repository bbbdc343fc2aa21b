"""`StepCosts`: how long steps take by their width, as they were measured."""

from __future__ import annotations

from bisect import bisect_left

#: The weight of a new step in its average.
_NEW = 0.1
#: So many steps of a width are known by the fastest of them.
_FIRST = 4
#: A step counts as at most so many times slower or faster than the average.
_OUTLIER = 2.0


class StepCosts:
    """Seconds of steps in which all rows decode, by how many tokens they compute.

    Widths are kept apart up to 16, then by sixteenths of a power of two. Between two that were
    measured it is as a line goes, beyond the widest as if the rest were free: so wider steps are
    tried, and from then on known.
    """

    def __init__(self, unknown: float = 1.0) -> None:
        """`unknown`: seconds before anything was measured."""
        self._unknown = unknown
        self._widths: list[int] = []
        self._seconds: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def note(self, width: int, seconds: float) -> None:
        """A step of `width` tokens took so long."""
        place = _rounded(width)
        before = self._seconds.get(place)
        if before is None:
            self._widths.insert(bisect_left(self._widths, place), place)
            self._seconds[place], self._counts[place] = seconds, 1
            return
        if self._counts[place] < _FIRST:
            # Whatever else ran then made it no faster: one slow step mustn't end all drafts.
            self._counts[place] += 1
            self._seconds[place] = min(before, seconds)
            return
        bounded = min(max(seconds, before / _OUTLIER), before * _OUTLIER)
        self._seconds[place] = before + _NEW * (bounded - before)

    @property
    def widest(self) -> int:
        """Of the widths that were measured; 0: none."""
        return self._widths[-1] if self._widths else 0

    def seconds(self, width: int) -> float:
        """What a step of `width` tokens takes."""
        if not self._widths:
            return self._unknown
        at = bisect_left(self._widths, width)
        if at == len(self._widths):
            return self._seconds[self._widths[-1]]
        above = self._widths[at]
        if above == width or at == 0:
            return self._seconds[above]
        below = self._widths[at - 1]
        low, high = self._seconds[below], self._seconds[above]
        return low + (high - low) * (width - below) / (above - below)


def _rounded(width: int) -> int:
    """The width that stands for its like."""
    step = 1 << max(0, width.bit_length() - 5)
    return width // step * step
