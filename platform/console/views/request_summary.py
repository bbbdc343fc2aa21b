"""Aggregates over recent requests: the list's facets and histogram, a model's speed and cost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlencode

from django.db.models import QuerySet
from django.http import QueryDict
from django.utils import timezone

from common.rates import decode_tokens_per_s
from metering.models import RequestEntry

#: Maximum number of requests summed up, newest first, so that the time stays bounded.
MAX_SAMPLED = 1000
#: The same for all models together.
MAX_SAMPLED_OF_ALL = 5000
#: Lower bounds of the histogram's bars, in milliseconds.
EDGES_MS = (0, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000)
MAX_FACETS = 6
LAST_HOUR = timedelta(hours=1)


@dataclass(frozen=True)
class Choice:
    """A link that narrows the list. `percent`: its count relative to the largest one."""

    label: str
    count: int
    query: str
    percent: float = 0.0

    @property
    def top(self) -> float:
        """Y coordinate of the top of its bar in a drawing 100 units high."""
        return 100 - self.percent


@dataclass(frozen=True)
class Summary:
    """Counts over the newest `sampled` matching requests; `is_partial`: there may be more."""

    sampled: int
    is_partial: bool
    durations: list[Choice]
    facets: dict[str, list[Choice]]


@dataclass(frozen=True)
class LastHour:
    """Requests since `since`; only the newest of them if `is_partial`.

    `failed`: those with a status of 500 or higher. `slowest_id`, `slowest_ms`: None without
    requests.
    """

    since: datetime
    requests: int
    failed: int
    slowest_id: str | None
    slowest_ms: float | None
    is_partial: bool

    @property
    def slowest(self) -> str:
        """The longest duration with its unit."""
        milliseconds = self.slowest_ms or 0.0
        return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.1f} s"


@dataclass(frozen=True)
class Speed:
    """Figures of the newest requests; `is_partial`: there may be more. Times are in milliseconds.

    A figure is None if no request has a value for it.

    `tokens_per_s`: median of a request's output tokens per second after its first.
    """

    requests: int
    failed: int
    median_ttft_ms: float | None
    p95_ttft_ms: float | None
    tokens_per_s: float | None
    cost_nanos: int
    is_partial: bool


def summarize_last_hour(rows: QuerySet[RequestEntry]) -> LastHour:
    """Sum up the newest `MAX_SAMPLED_OF_ALL` requests of the last hour."""
    since = timezone.now() - LAST_HOUR
    newest = rows.filter(started_at__gte=since).order_by("-started_at")
    columns = ("duration_ms", "request_id", "status", "times")
    sample = list(newest.values_list(*columns)[:MAX_SAMPLED_OF_ALL])
    slowest = max(sample, default=(None, None))
    return LastHour(
        since=since,
        requests=sum(times for *_, times in sample),
        failed=sum(times for _, _, status, times in sample if status >= 500),
        slowest_id=slowest[1],
        slowest_ms=slowest[0],
        is_partial=len(sample) == MAX_SAMPLED_OF_ALL,
    )


def summarize_speed(rows: QuerySet[RequestEntry]) -> Speed:
    """Sum up the newest `MAX_SAMPLED` requests."""
    sample = rows.order_by("-started_at").values_list(*_SPEED_COLUMNS)[:MAX_SAMPLED]
    return _speed_of(list(sample), is_partial=len(sample) == MAX_SAMPLED)


def summarize_speed_by_model(rows: QuerySet[RequestEntry]) -> dict[str, Speed]:
    """Sum up the newest `MAX_SAMPLED_OF_ALL` requests, by model."""
    newest = rows.order_by("-started_at").values_list("model", *_SPEED_COLUMNS)
    samples = defaultdict(list)
    for model, *figures in (sample := newest[:MAX_SAMPLED_OF_ALL]):
        samples[model].append(figures)
    is_partial = len(sample) == MAX_SAMPLED_OF_ALL
    return {model: _speed_of(rows, is_partial=is_partial) for model, rows in samples.items()}


_SPEED_COLUMNS = ("status", "ttft_ms", "duration_ms", "completion_tokens", "cost_nanos")


def _speed_of(sample: Sequence[Sequence[Any]], *, is_partial: bool) -> Speed:
    ttfts = [ttft for _, ttft, *_ in sample if ttft is not None]
    rates = [
        rate
        for _, ttft, duration, tokens, _ in sample
        if ttft is not None
        and (rate := decode_tokens_per_s(tokens, (duration - ttft) / 1000)) is not None
    ]
    return Speed(
        requests=len(sample),
        failed=sum(status >= 500 for status, *_ in sample),
        median_ttft_ms=median(ttfts) if ttfts else None,
        p95_ttft_ms=quantiles(ttfts, n=20, method="inclusive")[-1] if len(ttfts) > 1 else None,
        tokens_per_s=median(rates) if rates else None,
        cost_nanos=sum(cost for *_, cost in sample),
        is_partial=is_partial,
    )


def summarize(rows: QuerySet[RequestEntry], query: QueryDict) -> Summary:
    """Count the newest matching requests by duration, model, key and status.

    Args:
        query: of the page; each link adds one condition to it.
    """
    columns = ("duration_ms", "model", "api_key__name", "status")
    sample = list(rows.order_by("-started_at").values_list(*columns)[:MAX_SAMPLED])
    bars = Counter(max(edge for edge in EDGES_MS if edge <= row[0]) for row in sample)
    facets = {
        "model": Counter(row[1] for row in sample if row[1]),
        "key": Counter(row[2] for row in sample if row[2]),
        "status": Counter(f"{row[3] // 100}xx" for row in sample if row[3] != 499),
    }
    return Summary(
        sampled=len(sample),
        is_partial=len(sample) == MAX_SAMPLED,
        durations=[
            Choice(
                label=f"\u2265{_duration(edge)}" if end is None else f"<{_duration(end)}",
                count=bars[edge],
                query=_narrowed(query, slower_ms=edge or "", faster_ms=end or ""),
                percent=100 * bars[edge] / max(bars.values(), default=1),
            )
            for edge, end in zip(EDGES_MS, (*EDGES_MS[1:], None), strict=True)
        ],
        facets={
            name: [
                Choice(value, count, _narrowed(query, **{name: value}))
                for value, count in counts.most_common(MAX_FACETS)
            ]
            for name, counts in facets.items()
            if len(counts) > 1
        },
    )


def _narrowed(query: QueryDict, **conditions: object) -> str:
    values = {name: value for name, value in query.items() if name != "page" and value}
    values |= {name: str(value) for name, value in conditions.items()}
    return urlencode({name: value for name, value in values.items() if value})


def _duration(milliseconds: int) -> str:
    return f"{milliseconds} ms" if milliseconds < 1000 else f"{milliseconds // 1000} s"
