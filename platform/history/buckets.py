"""Gateways' counts that aren't in the database yet: one Redis hash per bucket of time.

    {prefix}:history:{start}    hash: [tenant id, model, adapter, what] as JSON -> count
    {prefix}:history            sorted set of the start times of existing buckets

`what` is one of `SUMS`, or "t12", "g30": a bucket of the histogram of times to first token or of
gaps between tokens. Gateways add to the current bucket; a worker writes past ones into the
database.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.contract.redis_keys import KEY_PREFIX

# Latency histograms that can be added up: four buckets per doubling, from half a millisecond to
# half an hour, so that a percentile's error is below 10%.

MIN_DURATION_S = 0.0005
BUCKETS_PER_DOUBLING = 4
LAST_BUCKET = 87
#: Bucket index -> count.
LatencyHistogram = Mapping[int, int]


def bucket_index(seconds: float) -> int:
    """Index of a duration's bucket, from 0 to `LAST_BUCKET`."""
    if seconds <= MIN_DURATION_S:
        return 0
    return min(LAST_BUCKET, 1 + int(math.log2(seconds / MIN_DURATION_S) * BUCKETS_PER_DOUBLING))


def percentile(spread: LatencyHistogram, fraction: float) -> float | None:
    """The duration in seconds that `fraction` of the durations stay below; None if empty."""
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
    """Add the counts of `spread`, whose keys are text if it comes from JSON."""
    for bucket, count in spread.items():
        into[int(bucket)] = into.get(int(bucket), 0) + count


#: Width of a bucket in seconds -> retention in seconds, finest first. Each width is a multiple of
#: the previous one.
RETENTION_BY_WIDTH = {10: 2 * 3600, 60: 26 * 3600, 600: 8 * 86_400, 7200: 93 * 86_400}
MIN_WIDTH_S = min(RETENTION_BY_WIDTH)


@dataclass(frozen=True)
class TimeRange:
    """A time range up to now that a page offers: its length and the distance of its points."""

    name: str
    title: str
    seconds: int
    step: int

    @property
    def width(self) -> int:
        """The widest buckets that divide `step` and whose retention covers the range."""
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
    """The start of the bucket that contains `moment` (seconds since the epoch)."""
    return int(moment // width) * width


FIRST_TOKEN, GAP = "t", "g"
#: Tenant id, model, adapter. Tenant 0: sum of a gateway's series beyond its limit, by model.
Series = tuple[int, str, str]
#: Seconds after a bucket's end during which gateways may still add to it.
GRACE_S = 4
#: Retention in Redis while no worker writes: that of the finest width in the database.
TTL_S = RETENTION_BY_WIDTH[MIN_WIDTH_S]


def index_key(prefix: str = KEY_PREFIX) -> str:
    """Redis key of the sorted set of buckets."""
    return f"{prefix}:history"


def bucket_key(start: int, prefix: str = KEY_PREFIX) -> str:
    return f"{prefix}:history:{start}"


def add_counts(
    pipeline: Any, counts: dict[tuple[Series, str], int], now: float, prefix: str
) -> None:
    """Add the commands that add `counts` to a pipeline."""
    start = start_of(now, MIN_WIDTH_S)
    key = bucket_key(start, prefix)
    for ((tenant, model, adapter), what), count in counts.items():
        pipeline.hincrby(key, json.dumps([tenant, model, adapter, what]), count)
    pipeline.expire(key, TTL_S)
    pipeline.zadd(index_key(prefix), {str(start): start})
    pipeline.expire(index_key(prefix), TTL_S)


def read_counts(fields: dict[bytes, bytes]) -> dict[Series, dict[str, int]]:
    """Parse a bucket's hash into counts by series."""
    counts: dict[Series, dict[str, int]] = {}
    for field, count in fields.items():
        tenant, model, adapter, what = json.loads(field)
        counts.setdefault((tenant, model, adapter), {})[what] = int(count)
    return counts
