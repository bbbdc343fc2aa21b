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
#: After so many steps of other widths it's old, and to be tried again: the machine may be another
#: by then. After each trial that goes twice as long, and at most so long.
_OLD, _OLDEST = 128, 4096
#: What is old and now takes less than this part of what it took was measured on a busy machine.
_BUSY = 0.75
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
        compared: so often it was seen just behind another width; it was first measured so, too.
        tried: the number of the step before the last trial.
        lasts: after so many steps it's to be tried again.
    """

    seconds: float
    last: int
    count: int
    first: list[float]
    compared: int = 1
    tried: int = 0
    lasts: int = _OLD


@dataclass(slots=True)
class Pace:
    """So many times as long as at first does everything take now.

    Attributes:
        told_by: whose steps told it last, and of which width.
        steps: so many were run so far, a draft model's left out.
    """

    value: float = 1.0
    steps: int = 0
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

    What is old is to be tried again (`due`). If that takes far less, the machine was busy when it
    was measured, and the old ones that are wider or seem slower are forgotten.
    """

    def __init__(self, pace: Pace | None = None, *, draws: bool = False) -> None:
        """`pace`: of other steps on the machine; `draws`: of a draft model, whose steps are part of
        another's and seem free before any width is known.
        """
        self._draws, self._unknown = draws, 0.0 if draws else 1.0
        self._known: list[int] = []
        self._widths: dict[int, _Width] = {}
        self._noise = _NOISE
        self.pace = pace or Pace()

    def note(self, width: int, seconds: float) -> None:
        """A step of `width` tokens took so long."""
        place, seconds = _rounded(width), max(seconds, 1e-9)
        self.pace.steps += not self._draws
        if not self._was_busy(place, seconds):
            each = self._widths.setdefault(place, _Width(0.0, 0, 0, []))
            each.last = self.pace.steps
            each.count += 1
            if each.count <= _KNOWN:
                self._begin(each, place, seconds / self.pace.value)
            else:
                self._follow(each, place, seconds / each.seconds)
        self.pace.told_by = id(self), place

    def due(self, width: int) -> int:
        """How many steps ago one was measured, or tried, that tells what a step wider than `width`
        takes; 0: not so many that it's to be tried again, or none was.
        """
        at = bisect_right(self._known, _rounded(width)) if width else 0
        if at == len(self._known):
            return 0
        each = self._widths[self._known[at]]
        age = self.pace.steps - max(each.last, each.tried)
        return age if age >= each.lasts else 0

    def note_trial(self, width: int, count: int) -> None:
        """The next step is so many tokens wider than `width` to see what it takes."""
        first = bisect_right(self._known, _rounded(width)) if width else 0
        last = bisect_left(self._known, _rounded(width + count))
        for place in self._known[first : last + 1]:
            each = self._widths[place]
            each.tried, each.lasts = self.pace.steps, min(2 * each.lasts, _OLDEST)

    def _was_busy(self, place: int, seconds: float) -> bool:
        """Whether what tells of such steps is old, and was measured on a busy machine; then this
        step tells it.
        """
        at, known = bisect_left(self._known, place), self._widths
        if at == len(self._known) or not self._is_old(self._known[at]):
            return False
        if seconds >= _BUSY * self.seconds(place):
            return False
        usual = seconds / self.pace.value
        for each in list(self._known):
            if self._is_old(each) and (each >= place or known[each].seconds > usual):
                del known[each]
        known[place] = _Width(usual, self.pace.steps, 1, [usual])
        self._known = [each for each in self._known if each in known and each != place]
        insort(self._known, place)
        return True

    def _is_old(self, width: int) -> bool:
        return self.pace.steps - self._widths[width].last >= _OLD

    def _begin(self, each: _Width, place: int, seconds: float) -> None:
        each.first.append(seconds)
        if each.count == _KNOWN:
            each.seconds = median(each.first)
            if place not in self._known:
                at = bisect_left(self._known, place)
                if at < len(self._known):  # as it was, until it's tried again
                    each.lasts = self._widths[self._known[at]].lasts
                self._known.insert(at, place)

    def _follow(self, each: _Width, place: int, slower: float) -> None:
        """`slower`: so many times as long as it took at first."""
        pace = self.pace.value
        slower = min(max(slower, pace / _OUTLIER), pace * _OUTLIER)
        self._noise += _NEW_NOISE * (abs(slower / pace - 1.0) - self._noise)
        if self.pace.told_by != (id(self), place):  # steps of another width have told the pace
            each.compared += 1
            more = 1.0 + max(_NEW, 1.0 / (1 + each.compared)) * (slower / pace - 1.0)
            each.seconds *= more
            slower /= more  # the rest is the machine's
        self.pace.value += _PACE * (slower - self.pace.value)

    def forget(self) -> None:
        """What was measured so far is no measure."""
        self._known, self._widths, self._noise, self.pace.value = [], {}, _NOISE, 1.0

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

    def with_each(self, width: int, most: int, beside: int = 0) -> tuple[list[float], list[float]]:
        """`with_drafts` of 1, 2, ... `most`, and the most that each may take (`doubt`)."""
        if not self._known:
            each = [self.with_drafts(width, count, beside) for count in range(1, most + 1)]
            return each, each
        if beside:
            now, more = self.seconds(width), self.pace.value * self._slope()
            each = [now + more * count for count in range(1, most + 1)]
        else:
            pace = self.pace.value
            each = [pace * usual for usual in self._usuals(width + 1, width + most)]
        doubts = self._doubts(width + 1, width + most)
        return each, [seconds * more for seconds, more in zip(each, doubts, strict=True)]

    def _doubts(self, first: int, last: int) -> list[float]:
        """One and `doubt` of all widths from `first` to `last`."""
        found = [1.0 + _DOUBT * self._noise / sqrt(_KNOWN)] * (last + 1 - first)
        for place, each in self._widths.items():
            low, high = max(place, first), min(place + _apart(place) - 1, last)
            if low <= high and each.count > _KNOWN:
                doubt = 1.0 + _DOUBT * self._noise / sqrt(each.count)
                found[low - first : high + 1 - first] = [doubt] * (high + 1 - low)
        beyond = max(0, self.widest + 1 - first)
        found[beyond:] = [1.0 + _DOUBT * _NOISE / sqrt(_KNOWN)] * (len(found) - beyond)
        return found

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


def _rounded(width: int) -> int:
    """The width that stands for its like."""
    return width // _apart(width) * _apart(width)


def _apart(width: int) -> int:
    """So many widths from there on are alike."""
    return 1 << max(0, width.bit_length() - 5)
