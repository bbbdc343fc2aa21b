"""`StepCosts`: how long steps take by their width, as they were measured."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from math import sqrt
from statistics import median

#: The least weight of a new step in its width's average.
_NEW = 0.1
#: The weight of a new step in the machine's pace.
_PACE = 0.15
#: A width is known once so many steps of it were measured: one slow step mustn't end all drafts.
_KNOWN = 3
#: A step counts as at most so many times slower or faster than was expected.
_OUTLIER = 2.0
#: Steps are at most so much wider than the widest known one, or than it by an eighth: what trying
#: costs is little, even where each token more takes its time.
_WIDER = 4
#: After so many steps of other widths it isn't known any more: the machine may be another by then.
_OLD = 5000
#: By how much steps are off on average, as a part of what they take, before any were measured; the
#: weight of a new one in that. An average of one step is in doubt by so many times as much, of n
#: steps by a root of n less.
_NOISE, _NEW_NOISE, _DOUBT = 0.15, 0.04, 2.0


@dataclass(slots=True)
class _Width:
    """Steps of one width.

    Attributes:
        seconds: of one, at the pace that the machine had when it was first measured.
        last: the number of the last one.
        first: what those took that came before it was known.
    """

    seconds: float
    last: int
    count: int
    first: list[float]


@dataclass(slots=True)
class Pace:
    """So many times as long as at first does everything take now.

    Attributes:
        told_by: whose steps told it last, and of which width.
    """

    value: float = 1.0
    told_by: tuple[int, int] = (0, 0)


class StepCosts:
    """Seconds of steps in which all rows decode, by how many tokens they compute.

    A machine is faster and slower with what else it does, and wide steps are rare: what they took
    is compared with the steps just before them. So each width is known by how much more it takes
    than others, and one pace, which follows the newest steps, stands for all. A draft model's steps
    have the same pace: while nobody drafts, those of its target tell it.

    Widths are kept apart up to 16, then by sixteenths of a power of two. Between two that are known
    it is as a line goes. Beyond the widest it goes on as from the known one of half that width; as
    if the rest were free, where there is none: so wider steps are tried, and from then on known.
    """

    def __init__(self, unknown: float = 1.0, pace: Pace | None = None) -> None:
        """`unknown`: seconds before any width is known; `pace`: of other steps on the machine."""
        self._unknown = unknown
        self._known: list[int] = []
        self._widths: dict[int, _Width] = {}
        self._num_steps = 0
        self._noise = _NOISE
        #: While all is measured anew: how many times as long as was known do steps take.
        self._anew: list[float] | None = None
        self.pace = pace or Pace()

    def note(self, width: int, seconds: float) -> None:
        """A step of `width` tokens took so long."""
        place, seconds = _rounded(width), max(seconds, 1e-9)
        if self._anew is not None and self._known:
            self._renew(self._anew, seconds / self.seconds(width))
            return
        self._num_steps += 1
        if self._num_steps % _OLD == 0:
            self._forget_old()
        each = self._widths.setdefault(place, _Width(0.0, 0, 0, []))
        each.last = self._num_steps
        each.count += 1
        if each.count <= _KNOWN:
            self._begin(each, place, seconds / self.pace.value)
        else:
            self._follow(each, place, seconds / each.seconds)
        self.pace.told_by = id(self), place

    def _begin(self, each: _Width, place: int, seconds: float) -> None:
        each.first.append(seconds)
        if each.count == _KNOWN:
            each.seconds = median(each.first)
            insort(self._known, place)

    def _follow(self, each: _Width, place: int, slower: float) -> None:
        """`slower`: so many times as long as it took at first."""
        pace = self.pace.value
        slower = min(max(slower, pace / _OUTLIER), pace * _OUTLIER)
        self._noise += _NEW_NOISE * (abs(slower / pace - 1.0) - self._noise)
        if self.pace.told_by != (id(self), place):  # steps of another width have told the pace
            more = slower / pace - 1.0
            each.seconds *= 1.0 + max(_NEW, 1.0 / each.count) * more
        self.pace.value += _PACE * (slower - self.pace.value)

    def measure_anew(self) -> None:
        """The next steps tell how many times as long all widths take as is known, at the pace that
        others tell: steps that are rare may have been measured while the machine was busy.
        """
        if self._anew is None:
            self._anew = []

    def _renew(self, anew: list[float], slower: float) -> None:
        anew.append(slower)
        if len(anew) < _KNOWN:
            return
        for each in self._widths.values():
            each.seconds *= median(anew)
        self._anew = None

    def forget(self) -> None:
        """What was measured so far is no measure."""
        self._known, self._widths, self._num_steps, self._noise = [], {}, 0, _NOISE
        self._anew, self.pace.value = None, 1.0

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
        return self.pace.value * self._usual(width)

    def with_drafts(self, width: int, count: int, beside: int = 0) -> float:
        """What a step of so many rows takes once it has so many drafts. Beside prompts' tokens each
        takes what a token more takes the widest steps: what all are read for anyway is the
        prompts' already.
        """
        if not beside:
            return self.seconds(width + count)
        return self.seconds(width) + self.pace.value * count * self._slope()

    def with_each(self, width: int, most: int, beside: int = 0) -> list[float]:
        """`with_drafts` of 1, 2, ... `most`."""
        pace = self.pace.value
        if not self._known:
            return [self.with_drafts(width, count, beside) for count in range(1, most + 1)]
        if beside:
            now, more = self.seconds(width), pace * self._slope()
            return [now + more * count for count in range(1, most + 1)]
        return [pace * usual for usual in self._usuals(width + 1, width + most)]

    def doubt(self, width: int) -> float:
        """By so large a part `seconds` may be off: of many widths one always seems faster than it
        is, and nobody is to choose it for that.
        """
        if not self._known:
            return 0.0
        if width > self.widest:
            return _DOUBT * _NOISE / sqrt(_KNOWN)
        each = self._widths.get(_rounded(width))
        count = _KNOWN if each is None else max(_KNOWN, each.count)
        return _DOUBT * self._noise / sqrt(count)

    def _usual(self, width: int) -> float:
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

    def _usuals(self, first: int, last: int) -> list[float]:
        """`_usual` of all widths from `first` to `last`."""
        found, width = list[float](), first
        for at in range(bisect_left(self._known, first), len(self._known)):
            if width > last:
                return found
            above = self._known[at]
            high, end = self._widths[above].seconds, min(above, last)
            below = self._known[at - 1] if at else 0
            low = self._widths[below].seconds if at else high
            slope = (high - low) / (above - below)
            found += [low + slope * (each - below) for each in range(width, end + 1)]
            width = end + 1
        return found + [self._beyond(each) for each in range(width, last + 1)]

    def _beyond(self, width: int) -> float:
        widest = self._known[-1]
        high = self._widths[widest].seconds
        if self._known[0] > widest // 2:
            return high  # too near to tell
        return high + self._slope() * (width - widest)

    def _slope(self) -> float:
        """Of one token more in the widest steps that are known."""
        if not self._known:
            return self._unknown
        widest = self._known[-1]
        high, at = self._widths[widest].seconds, bisect_right(self._known, widest // 2)
        if at == 0:
            return high / widest
        half = self._known[at - 1]
        return max(0.0, high - self._widths[half].seconds) / (widest - half)

    def _forget_old(self) -> None:
        old = self._num_steps - _OLD
        self._widths = {place: each for place, each in self._widths.items() if each.last > old}
        self._known = [place for place in self._known if place in self._widths]


def _rounded(width: int) -> int:
    """The width that stands for its like."""
    step = 1 << max(0, width.bit_length() - 5)
    return width // step * step
