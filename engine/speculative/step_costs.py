"""`StepCosts`: how long steps take by their width, as they were measured."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass

#: The weight of a new step in its average.
_NEW = 0.1
#: A width is known once so many steps of it were measured: one slow step mustn't end all drafts.
_KNOWN = 3
#: So many steps of a width are known by the fastest of them: what else ran made none faster.
_FIRST = 4
#: A step counts as at most so many times slower or faster than the average.
_OUTLIER = 2.0
#: Steps are at most so much wider than the widest known one, or than it by an eighth: what trying
#: costs is little, even where each token more takes its time.
_WIDER = 4
#: After so many steps of other widths it isn't known any more: the machine may be another by then.
_OLD = 5000


@dataclass(slots=True)
class _Width:
    """Steps of one width."""

    seconds: float
    last: int
    count: int = 1


class StepCosts:
    """Seconds of steps in which all rows decode, by how many tokens they compute.

    Widths are kept apart up to 16, then by sixteenths of a power of two. Between two that are known
    it is as a line goes. Beyond the widest it goes on as from the known one of half that width; as
    if the rest were free, where there is none: so wider steps are tried, and from then on known.
    """

    def __init__(self, unknown: float = 1.0) -> None:
        """`unknown`: seconds before any width is known."""
        self._unknown = unknown
        self._known: list[int] = []
        self._widths: dict[int, _Width] = {}
        self._num_steps = 0

    def note(self, width: int, seconds: float) -> None:
        """A step of `width` tokens took so long."""
        place = _rounded(width)
        self._num_steps += 1
        if self._num_steps % _OLD == 0:
            self._forget_old()
        before = self._widths.get(place)
        if before is None:
            self._widths[place] = _Width(seconds, self._num_steps)
            return
        before.count += 1
        before.last = self._num_steps
        if before.count == _KNOWN:
            insort(self._known, place)
        if before.count <= _FIRST:
            before.seconds = min(before.seconds, seconds)
            return
        bounded = min(max(seconds, before.seconds / _OUTLIER), before.seconds * _OUTLIER)
        before.seconds += _NEW * (bounded - before.seconds)

    @property
    def widest(self) -> int:
        """Of the widths that are known; 0: none."""
        return self._known[-1] if self._known else 0

    @property
    def most(self) -> int:
        """The widest step that is worth a trial."""
        return self.widest + max(_WIDER, self.widest // 8)

    def seconds(self, width: int) -> float:
        """What a step of `width` tokens takes."""
        if not self._known:
            return self._unknown
        at = bisect_left(self._known, width)
        if at == len(self._known):
            return self._beyond(width)
        above = self._known[at]
        high = self._widths[above].seconds
        if above == width or at == 0:
            return high
        below = self._known[at - 1]
        low = self._widths[below].seconds
        return low + (high - low) * (width - below) / (above - below)

    def _beyond(self, width: int) -> float:
        widest = self._known[-1]
        high, at = self._widths[widest].seconds, bisect_right(self._known, widest // 2)
        if at == 0:
            return high
        half = self._known[at - 1]
        slope = max(0.0, high - self._widths[half].seconds) / (widest - half)
        return high + slope * (width - widest)

    def _forget_old(self) -> None:
        old = self._num_steps - _OLD
        self._widths = {place: each for place, each in self._widths.items() if each.last > old}
        self._known = [place for place in self._known if place in self._widths]


def _rounded(width: int) -> int:
    """The width that stands for its like."""
    step = 1 << max(0, width.bit_length() - 5)
    return width // step * step
