"""Expected times of steps, by their width."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from math import sqrt
from statistics import median

#: Minimum weight of a new step in its width's average, and its weight in the speed factor.
_WIDTH_RATE, _SPEED_RATE = 0.1, 0.15
#: A width is known after this many steps, so that one slow step doesn't end drafting.
_MIN_STEPS = 3
#: A step counts as at most this many times slower or faster than expected.
_MAX_OUTLIER = 2.0
#: A step may be this many tokens, or an eighth, wider than the widest known one.
_MAX_WIDER = 4
#: A width not measured for this many steps is tried again, as the machine may have changed; the
#: interval doubles after each trial, up to the second value.
_TRIAL_INTERVAL, _MAX_TRIAL_INTERVAL = 128, 4096
#: A width that now takes less than this fraction of its old time was measured on a busy machine.
_BUSY = 0.75
#: Initial mean relative deviation of steps, weight of a new deviation, and the number of deviations
#: that one step is uncertain by; for n steps that is divided by sqrt(n).
_NOISE, _NOISE_RATE, _DOUBT = 0.15, 0.04, 2.0


@dataclass(slots=True)
class _Width:
    """Measurements of one width.

    Attributes:
        seconds: average seconds of a step, at the machine's initial speed.
        last: number of the last step of this width.
        first: seconds of the steps before the width was known.
        num_compared: number of steps right after a step of another width, including the first.
        last_trial: number of the step before the last trial.
        interval: number of steps until the next trial.
    """

    seconds: float
    last: int
    count: int
    first: list[float]
    num_compared: int = 1
    last_trial: int = 0
    interval: int = _TRIAL_INTERVAL


@dataclass(slots=True)
class SpeedFactor:
    """Current time of steps relative to their initial time.

    Attributes:
        num_steps: number of steps so far, without those of a draft model.
        last_width: the `StepTimes` and width of the last step that updated it.
    """

    value: float = 1.0
    num_steps: int = 0
    last_width: tuple[int, int] = (0, 0)


class StepTimes:
    """Seconds of steps in which all rows decode, by width (number of tokens that they compute).

    A machine's speed changes with its other load, and wide steps are rare. So each step is compared
    with the steps just before it, and one `SpeedFactor`, which follows the newest steps, applies to
    all widths, and to a draft model's steps too.

    Widths are distinct up to 31, then in steps of a sixteenth of a power of two. Between two known
    widths time is interpolated linearly. Beyond the widest one it grows as from the known width of
    half that size; without one it stays constant, so that wider steps are tried and measured.
    """

    def __init__(self, speed: SpeedFactor | None = None, *, is_draft: bool = False) -> None:
        """`speed`: shared with other steps on the machine; `is_draft`: of a draft model, whose
        steps are part of another step and seem free before any width is known.
        """
        self._is_draft, self._unknown = is_draft, 0.0 if is_draft else 1.0
        self._measured_widths: list[int] = []
        self._widths: dict[int, _Width] = {}
        self._noise = _NOISE
        self.speed = speed or SpeedFactor()

    def record(self, width: int, seconds: float) -> None:
        """Record a step of `width` tokens."""
        width, seconds = _rounded(width), max(seconds, 1e-9)
        self.speed.num_steps += not self._is_draft
        if not self._replace_if_busy(width, seconds):
            entry = self._widths.setdefault(width, _Width(0.0, 0, 0, []))
            entry.last = self.speed.num_steps
            entry.count += 1
            if entry.count > _MIN_STEPS:
                self._update(entry, width, seconds / entry.seconds)
            else:
                entry.first.append(seconds / self.speed.value)
                if entry.count == _MIN_STEPS:
                    self._add(entry, width)
        self.speed.last_width = id(self), width

    def trial_age(self, width: int) -> int:
        """Return the number of steps since the next wider known width was measured or tried, if a
        new trial is due; else 0.
        """
        index = bisect_right(self._measured_widths, _rounded(width)) if width else 0
        if index == len(self._measured_widths):
            return 0
        entry = self._widths[self._measured_widths[index]]
        age = self.speed.num_steps - max(entry.last, entry.last_trial)
        return age if age >= entry.interval else 0

    def record_trial(self, width: int, count: int) -> None:
        """Record that the next step is a trial, `count` tokens wider than `width`."""
        first = bisect_right(self._measured_widths, _rounded(width)) if width else 0
        last = bisect_left(self._measured_widths, _rounded(width + count))
        for measured in self._measured_widths[first : last + 1]:
            entry = self._widths[measured]
            entry.last_trial = self.speed.num_steps
            entry.interval = min(2 * entry.interval, _MAX_TRIAL_INTERVAL)

    def _replace_if_busy(self, width: int, seconds: float) -> bool:
        """Whether the old measurement of this width was taken on a busy machine. If so, this step
        replaces it, and old measurements that are wider or seem slower are dropped.
        """
        index = bisect_left(self._measured_widths, width)
        if index == len(self._measured_widths) or not self._is_old(self._measured_widths[index]):
            return False
        if seconds >= _BUSY * self.seconds(width):
            return False
        seconds /= self.speed.value
        for measured in list(self._measured_widths):
            slower = measured >= width or self._widths[measured].seconds > seconds
            if slower and self._is_old(measured):
                del self._widths[measured]
        self._widths[width] = _Width(seconds, self.speed.num_steps, 1, [seconds])
        self._measured_widths = [
            measured
            for measured in self._measured_widths
            if measured in self._widths and measured != width
        ]
        insort(self._measured_widths, width)
        return True

    def _is_old(self, width: int) -> bool:
        return self.speed.num_steps - self._widths[width].last >= _TRIAL_INTERVAL

    def _add(self, entry: _Width, width: int) -> None:
        entry.seconds = median(entry.first)
        if width not in self._measured_widths:
            index = bisect_left(self._measured_widths, width)
            if index < len(self._measured_widths):
                entry.interval = self._widths[self._measured_widths[index]].interval
            self._measured_widths.insert(index, width)

    def _update(self, entry: _Width, width: int, factor: float) -> None:
        """`factor`: the step's seconds divided by the width's."""
        speed = self.speed.value
        factor = min(max(factor, speed / _MAX_OUTLIER), speed * _MAX_OUTLIER)
        self._noise += _NOISE_RATE * (abs(factor / speed - 1.0) - self._noise)
        if self.speed.last_width != (id(self), width):  # only other widths show the speed
            entry.num_compared += 1
            rate = max(_WIDTH_RATE, 1.0 / (1 + entry.num_compared))
            change = 1.0 + rate * (factor / speed - 1.0)
            entry.seconds *= change
            factor /= change  # the remainder is the machine's speed
        self.speed.value += _SPEED_RATE * (factor - self.speed.value)

    def clear(self) -> None:
        """Forget all measurements."""
        self._measured_widths, self._widths, self._noise, self.speed.value = [], {}, _NOISE, 1.0

    @property
    def widest(self) -> int:
        """Widest known width; 0: none."""
        return self._measured_widths[-1] if self._measured_widths else 0

    @property
    def max_width(self) -> int:
        """Maximum width of a step."""
        return self.widest + max(_MAX_WIDER, self.widest // 8)

    def seconds(self, width: int) -> float:
        """Return the expected seconds of a step of `width` tokens."""
        measured = self._measured_widths
        if not measured:
            return self._unknown
        index = bisect_left(measured, width)
        if index == len(measured):
            seconds = self._widths[measured[-1]].seconds
            if measured[0] <= measured[-1] // 2:  # otherwise too close for a slope
                seconds += self._slope() * (width - measured[-1])
            return self.speed.value * seconds
        above = measured[index]
        seconds = self._widths[above].seconds
        if above != width and index:
            below = measured[index - 1]
            low = self._widths[below].seconds
            seconds = low + (seconds - low) * (width - below) / (above - below)
        return self.speed.value * seconds

    def seconds_with_drafts(self, width: int, count: int, prompt_tokens: int = 0) -> float:
        """Return the expected seconds of a step of `width` rows with `count` drafts. In a step with
        prompts a draft costs what a token costs in wide steps: the weights are read anyway.
        """
        if not prompt_tokens:
            return self.seconds(width + count)
        return self.seconds(width) + self.speed.value * count * self._slope()

    def uncertainty(self, width: int) -> float:
        """Relative uncertainty of `seconds`: among many widths, one always seems too fast."""
        if not self._measured_widths:
            return 0.0
        if width > self.widest:
            return _DOUBT * _NOISE / sqrt(_MIN_STEPS)
        entry = self._widths.get(_rounded(width))
        count = _MIN_STEPS if entry is None else max(_MIN_STEPS, entry.count)
        return _DOUBT * self._noise / sqrt(count)

    def _slope(self) -> float:
        """Return the seconds per additional token in the widest known steps."""
        if not self._measured_widths:
            return self._unknown
        widest = self._measured_widths[-1]
        seconds = self._widths[widest].seconds
        index = bisect_right(self._measured_widths, widest // 2)
        if index == 0:
            return seconds / widest
        half = self._measured_widths[index - 1]
        return max(0.0, seconds - self._widths[half].seconds) / (widest - half)


def _rounded(width: int) -> int:
    """Return the width under which a width is measured."""
    return width >> (shift := max(0, width.bit_length() - 5)) << shift
