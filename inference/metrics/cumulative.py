"""Prometheus's buckets from ours."""

from __future__ import annotations

from collections.abc import Sequence


def cumulative(bounds: tuple[float, ...], counts: Sequence[float]) -> list[tuple[str, float]]:
    """(upper bound, all that is not above it). `counts`: by bucket, one more than bounds."""
    buckets, total = [], 0.0
    for bound, count in zip((*map(str, bounds), "+Inf"), counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets
