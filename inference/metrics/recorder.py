"""`Recorder`: this process's measurements since they were last taken away."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from inference.metrics.definitions import HISTOGRAMS

if TYPE_CHECKING:
    from inference.generation.job import Job
    from inference.generation.usage import Usage


class _Histogram:
    """Counts by bucket (not cumulative; the last is +Inf) and the sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Recorder:
    """Plain numbers, written on the event loop alone: an observation costs about a microsecond."""

    def __init__(self) -> None:
        self._histograms: dict[tuple[str, str], _Histogram] = {}
        self._counters: dict[tuple[str, str, str], int] = {}

    def observe(self, name: str, model: str, value: float, times: int = 1) -> None:
        """Add `times` observations of `value` to a histogram of `definitions.HISTOGRAMS`."""
        histogram = self._histograms.get((name, model))
        if histogram is None:
            histogram = self._histograms[name, model] = _Histogram(HISTOGRAMS[name].buckets)
        histogram.observe(value, times)

    def count(self, name: str, model: str, label: str) -> None:
        """Add one to a counter of `definitions.COUNTERS`."""
        key = (name, model, label)
        self._counters[key] = self._counters.get(key, 0) + 1

    def request_ended(
        self, job: Job, usage: Usage, reason: str, duration_s: float, *, finished: bool
    ) -> None:
        """All that is known once a request is over."""
        model = job.served.name
        self.count("request_success" if finished else "request_failure", model, reason)
        self.observe("e2e_request_latency_seconds", model, duration_s)
        self.observe("request_prompt_tokens", model, usage.prompt_tokens)
        self.observe("request_generation_tokens", model, usage.completion_tokens)
        self.observe("request_params_n", model, job.sampling.n)
        self.observe("request_params_best_of", model, job.sampling.num_sequences)

    def take(self) -> dict[str, float]:
        """Remove and return the increments, by the field of the hash that they belong to.

        Fields: `h|name|model|<bucket number or "sum">` and `c|name|model|label`.
        """
        increments: dict[str, float] = {}
        for (name, model), histogram in self._histograms.items():
            start = f"h|{name}|{model}|"
            for place, count in enumerate(histogram.counts):
                if count:
                    increments[f"{start}{place}"] = count
            increments[f"{start}sum"] = histogram.total
        for (name, model, label), count in self._counters.items():
            increments[f"c|{name}|{model}|{label}"] = count
        self._histograms, self._counters = {}, {}
        return increments

    def give_back(self, increments: dict[str, float]) -> None:
        """Put increments back that could not be written."""
        for field, amount in increments.items():
            kind, name, model, part = field.split("|")
            if kind == "c":
                key = (name, model, part)
                self._counters[key] = self._counters.get(key, 0) + int(amount)
                continue
            histogram = self._histograms.setdefault(
                (name, model), _Histogram(HISTOGRAMS[name].buckets)
            )
            if part == "sum":
                histogram.total += amount
            else:
                histogram.counts[int(part)] += int(amount)


recorder = Recorder()
