"""This process's part of the history: what requests did since it was last taken away."""

from __future__ import annotations

from typing import TYPE_CHECKING

from history.buckets import FIRST_TOKEN, GAP, Series
from history.spread import LAST, place_of

if TYPE_CHECKING:
    from inference.generation.job import Job
    from inference.generation.usage import Usage

#: Series that a process tells apart between two writes; more are counted together by model.
MOST_SERIES = 1000
_FIRST = [f"{FIRST_TOKEN}{place}" for place in range(LAST + 1)]
_GAPS = [f"{GAP}{place}" for place in range(LAST + 1)]


class HistoryCounts:
    """Plain numbers, written on the event loop alone."""

    def __init__(self) -> None:
        self._counts: dict[tuple[Series, str], int] = {}
        self._series: set[Series] = set()

    def first_token(self, job: Job, seconds: float) -> None:
        """A request's first token has come, so long after the request."""
        self._add(job, _FIRST[place_of(seconds)], 1)

    def gap(self, job: Job, seconds: float, num_tokens: int) -> None:
        """So many tokens of an output have come, so long after those before."""
        series = _series_of(job)
        self._count(series, _GAPS[place_of(seconds / num_tokens)], num_tokens)
        self._count(series, "completion_tokens", num_tokens)

    def tokens(self, job: Job, num_tokens: int) -> None:
        """So many tokens of an answer have come, the first ones."""
        self._add(job, "completion_tokens", num_tokens)

    def ended(self, job: Job, usage: Usage, reason: str) -> None:
        """A request is over. Tokens of its answer were counted as they came."""
        self._add(job, "requests", 1)
        if reason == "error":
            self._add(job, "errors", 1)
        self._add(job, "prompt_tokens", usage.prompt_tokens)
        self._add(job, "cached_tokens", usage.cached_tokens)

    def refused(self, job: Job) -> None:
        """Limits or budgets refused a request."""
        self._add(job, "refused", 1)

    def take(self) -> dict[tuple[Series, str], int]:
        """Remove and return all."""
        counts, self._counts, self._series = self._counts, {}, set()
        return counts

    def give_back(self, counts: dict[tuple[Series, str], int]) -> None:
        """Put back what could not be written."""
        for (series, what), count in counts.items():
            self._count(series, what, count)

    def _add(self, job: Job, what: str, count: int) -> None:
        self._count(_series_of(job), what, count)

    def _count(self, series: Series, what: str, count: int) -> None:
        if not count:
            return
        if series not in self._series:
            if len(self._series) >= MOST_SERIES:
                series = (0, series[1], "")
            self._series.add(series)
        self._counts[series, what] = self._counts.get((series, what), 0) + count


def _series_of(job: Job) -> Series:
    served = job.served
    adapter = served.use.name if served.use is not None else ""
    return job.caller.tenant_id, served.base, adapter


history = HistoryCounts()
