"""Reads the history as series of points in any of `RANGES`. `history.queries` checks
permissions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from django.db.models import Max, Sum

from history.buckets import (
    GRACE_S,
    MIN_WIDTH_S,
    RETENTION_BY_WIDTH,
    TimeRange,
    merge_histograms,
    percentile,
    start_of,
)
from history.models import SUMS, PoolSample, TrafficSample
from history.write import GAUGES

#: Maximum number of separate groups; the rest are added up as "other".
MAX_GROUPS = 8
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
GROUPS = ("model", "tenant_id", "adapter")


@dataclass(frozen=True, kw_only=True)
class TrafficQuery:
    """A query of the traffic history.

    Attributes:
        range: one of `RANGES`.
        tenants: ids to include; None for all.
        models: names to include; None for all.
        adapter: name to include; None for requests with any adapter or none.
    """

    range: TimeRange
    tenants: Sequence[int] | None = None
    models: Sequence[str] | None = None
    adapter: str | None = None

    @property
    def is_all_tenants(self) -> bool:
        """Whether the rows that sum up all tenants answer the query."""
        return self.tenants is None and self.adapter is None


@dataclass
class Series:
    """Sums by index of the point; 0 where there is no data."""

    sums: dict[str, list[int]]
    first_token: list[dict[int, int]] = field(default_factory=list)
    gaps: list[dict[int, int]] = field(default_factory=list)


def complete_until(now: float | None = None) -> int:
    """Time up to which the history is complete, if workers keep up."""
    now = time.time() if now is None else now
    return start_of(now - MIN_WIDTH_S - GRACE_S, MIN_WIDTH_S)


def latest(tenant_id: int) -> dict[str, int]:
    """Data of the topic `history`: the time up to which the history is complete."""
    return {"until": complete_until()}


def time_points(time_range: TimeRange, now: float | None = None) -> list[int]:
    """Start times of the points, oldest first; the last point may be incomplete."""
    last = start_of(complete_until(now) - 1, time_range.step)
    count = -(-time_range.seconds // time_range.step)
    return [last - n * time_range.step for n in reversed(range(count))]


def traffic(query: TrafficQuery, timestamps: Sequence[int]) -> Series:
    """Return traffic sums and latency histograms at the points of `time_points`."""
    line = Series(
        {name: [0] * len(timestamps) for name in SUMS},
        [{} for _ in timestamps],
        [{} for _ in timestamps],
    )
    for rows in _ranges_by_width(TrafficSample, query.range, timestamps[0]):
        for row in _narrowed(rows, query).values("start", *SUMS, "first_token", "gaps"):
            index = (row["start"] - timestamps[0]) // query.range.step
            if 0 <= index < len(timestamps):
                for name in SUMS:
                    line.sums[name][index] += row[name]
                merge_histograms(line.first_token[index], row["first_token"])
                merge_histograms(line.gaps[index], row["gaps"])
    return line


def group_traffic(
    query: TrafficQuery, by: str, timestamps: Sequence[int]
) -> dict[Any, dict[str, list[int]]]:
    """Return sums by model, tenant_id or adapter at each point; smaller groups are added up under
    None.
    """
    groups: dict[Any, dict[str, list[int]]] = {}
    for rows in _ranges_by_width(TrafficSample, query.range, timestamps[0]):
        narrow = _narrowed(rows, query, by_tenant=by != "model")
        sums = {f"sum_{name}": Sum(name) for name in SUMS}
        for row in narrow.order_by().values(by, "start").annotate(**sums):
            index = (row["start"] - timestamps[0]) // query.range.step
            if 0 <= index < len(timestamps):
                line = groups.setdefault(row[by], {name: [0] * len(timestamps) for name in SUMS})
                for name in SUMS:
                    line[name][index] += row[f"sum_{name}"]
    return _largest(groups)


def pools(query: TrafficQuery, timestamps: Sequence[int]) -> dict[str, list[float | None]]:
    """Return KV pool usage at each point; None where there is no sample."""
    seen: list[dict[int, dict[str, float]]] = [{} for _ in timestamps]
    for rows in _ranges_by_width(PoolSample, query.range, timestamps[0]):
        if query.models is not None:
            rows = rows.filter(model__in=query.models)
        sums = {f"sum_{name}": Sum(name) for name in GAUGES}
        for row in rows.order_by().values("start").annotate(**sums):
            index = (row["start"] - timestamps[0]) // query.range.step
            if 0 <= index < len(timestamps):
                seen[index][row["start"]] = {name: row[f"sum_{name}"] for name in GAUGES}
    return {name: [_mean(samples, name) for samples in seen] for name in GAUGES}


def percentiles(spreads: Sequence[dict[int, int]]) -> dict[str, list[float | None]]:
    """Return milliseconds at each point for each of `PERCENTILES`."""
    return {
        name: [None if (s := percentile(spread, part)) is None else s * 1000 for spread in spreads]
        for name, part in PERCENTILES.items()
    }


def _mean(samples: dict[int, dict[str, float]], name: str) -> float | None:
    if not samples:
        return None
    return sum(sample[name] for sample in samples.values()) / len(samples)


def _ranges_by_width(model: Any, time_range: TimeRange, begin: int) -> Iterator[Any]:
    """Yield the rows since `begin`: the widest suitable buckets, then finer ones after their end.

    A wide bucket is written only when it's over; until then finer buckets cover its time.
    """
    widths = sorted((w for w in RETENTION_BY_WIDTH if w <= time_range.width), reverse=True)
    edge = begin
    for width, finer in pairwise([*widths, 0]):
        rows = model.objects.filter(width=width, start__gte=edge)
        yield rows
        if finer >= MIN_WIDTH_S:
            last = rows.aggregate(Max("start"))["start__max"]
            edge = edge if last is None else last + width


def _narrowed(rows: Any, query: TrafficQuery, *, by_tenant: bool = False) -> Any:
    if query.tenants is not None:
        rows = rows.filter(tenant_id__in=query.tenants)
    elif query.is_all_tenants and not by_tenant:
        rows = rows.filter(tenant_id=0)
    else:
        rows = rows.exclude(tenant_id=0)
    if query.models is not None:
        rows = rows.filter(model__in=query.models)
    return rows if query.adapter is None else rows.filter(adapter=query.adapter)


def _largest(groups: dict[Any, dict[str, list[int]]]) -> dict[Any, dict[str, list[int]]]:
    """Return the groups with the most tokens; the rest are added up under None."""

    def size(group: Any) -> int:
        line = groups[group]
        return sum(line["prompt_tokens"]) + sum(line["completion_tokens"]) + sum(line["requests"])

    order = sorted(groups, key=size, reverse=True)
    largest = {group: groups[group] for group in order[:MAX_GROUPS]}
    for group in order[MAX_GROUPS:]:
        rest = largest.setdefault(
            None, {name: [0] * len(series) for name, series in groups[group].items()}
        )
        for name, values in groups[group].items():
            rest[name] = [a + b for a, b in zip(rest[name], values, strict=True)]
    return largest
