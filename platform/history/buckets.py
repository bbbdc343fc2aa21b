"""Counts of gateways that aren't in the database yet: a Redis hash for each bucket.

    {prefix}:history:{start}    hash: [tenant id, model, adapter, what] as JSON -> count
    {prefix}:history            sorted set of the starts that are there

`what` is one of `SUMS`, or "t12", "g30": a place of the spread of first tokens or gaps. Gateways
add to the bucket of now; a worker writes those that are over into the database.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.contract.redis_keys import KEY_PREFIX

# Histograms of durations that can be added up: four buckets per doubling, from half a millisecond
# to half an hour, so that a percentile is off by less than a tenth.

MIN_DURATION_S = 0.0005
BUCKETS_PER_DOUBLING = 4
LAST_BUCKET = 87
#: Place of a count -> how often.
LatencyHistogram = Mapping[int, int]


def bucket_index(seconds: float) -> int:
    """Index of a duration's bucket, from 0 to `LAST_BUCKET`."""
    if seconds <= MIN_DURATION_S:
        return 0
    return min(LAST_BUCKET, 1 + int(math.log2(seconds / MIN_DURATION_S) * BUCKETS_PER_DOUBLING))


def percentile(spread: LatencyHistogram, fraction: float) -> float | None:
    """Seconds that `fraction` of the durations stay below; None for no durations."""
    total = sum(spread.values())
    if not total:
        return None
    target, cumulative = fraction * total, 0
    for bucket in sorted(spread):
        count = spread[bucket]
        if cumulative + count >= target:
            inside = (target - cumulative) / count
            return MIN_DURATION_S * 2 ** ((bucket - 1 + inside) / BUCKETS_PER_DOUBLING)
        cumulative += count
    return MIN_DURATION_S * 2 ** (max(spread) / BUCKETS_PER_DOUBLING)


def merge_histograms(into: dict[int, int], spread: Mapping[int, int] | Mapping[str, int]) -> None:
    """Add counts; JSON has their places as text."""
    for bucket, count in spread.items():
        into[int(bucket)] = into.get(int(bucket), 0) + count


#: Seconds of a bucket -> seconds that buckets of that width are kept, the finest first. Each width
#: is a multiple of the one before.
RETENTION_BY_WIDTH = {10: 2 * 3600, 60: 26 * 3600, 600: 8 * 86_400, 7200: 93 * 86_400}
MIN_WIDTH_S = min(RETENTION_BY_WIDTH)


@dataclass(frozen=True)
class TimeRange:
    """A stretch of time up to now, as a page offers it: how long, in points how far apart."""

    name: str
    title: str
    seconds: int
    step: int

    @property
    def width(self) -> int:
        """The coarsest buckets that its points can be made of and that are kept long enough."""
        fit = [
            w
            for w, retention in RETENTION_BY_WIDTH.items()
            if self.step % w == 0 and retention >= self.seconds
        ]
        return max(fit)


RANGES = {
    time_range.name: time_range
    for time_range in (
        TimeRange("5m", "5 minutes", 300, 10),
        TimeRange("30m", "30 minutes", 1800, 30),
        TimeRange("2h", "2 hours", 7200 - 60, 60),
        TimeRange("6h", "6 hours", 6 * 3600, 120),
        TimeRange("24h", "24 hours", 86_400, 600),
        TimeRange("7d", "7 days", 7 * 86_400, 3600),
        TimeRange("30d", "30 days", 30 * 86_400, 14_400),
        TimeRange("90d", "90 days", 90 * 86_400, 43_200),
    )
}


def start_of(moment: float, width: int) -> int:
    """The beginning of the bucket that a moment (seconds since 1970) lies in."""
    return int(moment // width) * width


FIRST_TOKEN, GAP = "t", "g"
#: Tenant, model, adapter. Tenant 0: what was too much to be told apart.
Series = tuple[int, str, str]
#: A gateway may still add to a bucket so long after its end.
GRACE_S = 4
#: While no worker writes, Redis keeps as much as the database would of this width.
TTL_S = RETENTION_BY_WIDTH[MIN_WIDTH_S]


def index_key(prefix: str = KEY_PREFIX) -> str:
    """Key of the set of buckets."""
    return f"{prefix}:history"


def bucket_key(start: int, prefix: str = KEY_PREFIX) -> str:
    """Key of a bucket."""
    return f"{prefix}:history:{start}"


def add_counts(
    pipeline: Any, counts: dict[tuple[Series, str], int], now: float, prefix: str
) -> None:
    """Put the commands that add counts into a pipeline."""
    start = start_of(now, MIN_WIDTH_S)
    key = bucket_key(start, prefix)
    for ((tenant, model, adapter), what), count in counts.items():
        pipeline.hincrby(key, json.dumps([tenant, model, adapter, what]), count)
    pipeline.expire(key, TTL_S)
    pipeline.zadd(index_key(prefix), {str(start): start})
    pipeline.expire(index_key(prefix), TTL_S)


def read_counts(fields: dict[bytes, bytes]) -> dict[Series, dict[str, int]]:
    """A bucket's hash, by series."""
    counts: dict[Series, dict[str, int]] = {}
    for field, count in fields.items():
        tenant, model, adapter, what = json.loads(field)
        counts.setdefault((tenant, model, adapter), {})[what] = int(count)
    return counts
