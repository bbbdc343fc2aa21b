"""Writes the history: past buckets, samples of the pools, and wider buckets from finer ones.

Several workers may do this at the same time or repeatedly: existing rows are left unchanged.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, cast

import redis
from django.conf import settings
from django.db import router
from django.db.models import Max, Model, QuerySet

from catalog.heartbeats import read_heartbeats, registered_replicas
from common.db import iterate_by_key
from engine.contract.messages import Heartbeat
from history.buckets import (
    FIRST_TOKEN,
    GAP,
    GRACE_S,
    MIN_WIDTH_S,
    RETENTION_BY_WIDTH,
    bucket_key,
    index_key,
    merge_histograms,
    read_counts,
    start_of,
)
from history.models import SUMS, PoolSample, TrafficSample

ROWS = 500
GAUGES = ("replicas", "running", "waiting", "blocks", "active_blocks", "cached_blocks")
Key = tuple[int, str, str]


def write_history(client: redis.Redis, now: float | None = None) -> list[int]:
    """Write all past buckets that aren't written yet. Returns the start times of new buckets.

    Raises: redis.RedisError, DatabaseError; the next call then continues.
    """
    now = time.time() if now is None else now
    prefix = settings.QUIRE.key_prefix
    members = client.zrangebyscore(index_key(prefix), "-inf", now - MIN_WIDTH_S - GRACE_S)
    starts = [int(start) for start in cast("list[bytes]", members)]
    for start in starts:
        key = bucket_key(start, prefix)
        _insert(TrafficSample, _samples(start, cast("dict[bytes, bytes]", client.hgetall(key))))
        client.zrem(index_key(prefix), str(start))
        client.delete(key)
    beats = read_heartbeats(client, prefix, sorted(registered_replicas(client, prefix))).values()
    _insert(PoolSample, _pools(start_of(now, MIN_WIDTH_S), beats))
    for finer, wider in pairwise(RETENTION_BY_WIDTH):
        _roll_up(finer, wider, now)
    return starts


def delete_expired(now: float | None = None) -> int:
    """Remove rows older than the retention of their width; return their number."""
    now = time.time() if now is None else now
    removed = 0
    for model in (TrafficSample, PoolSample):
        for width, retention in RETENTION_BY_WIDTH.items():
            old = model._default_manager.filter(width=width, start__lt=int(now) - retention)
            removed += old._raw_delete(router.db_for_write(model))
    return removed


def _insert(model: type[Model], rows: Iterable[Model]) -> None:
    model._default_manager.bulk_create(rows, batch_size=ROWS, ignore_conflicts=True)


def _samples(start: int, fields: dict[bytes, bytes]) -> list[TrafficSample]:
    """Build a bucket's rows: one per series, and one per model for all tenants together."""
    rows: dict[Key, TrafficSample] = {}
    for (tenant, model, adapter), counts in read_counts(fields).items():
        for key in {(tenant, model, adapter), (0, model, "")}:
            _count(_row(rows, MIN_WIDTH_S, start, key), counts)
    return list(rows.values())


def _row(rows: dict[Key, TrafficSample], width: int, start: int, key: Key) -> TrafficSample:
    if key not in rows:
        tenant, model, adapter = key
        rows[key] = TrafficSample(
            width=width, start=start, tenant_id=tenant, model=model, adapter=adapter
        )
    return rows[key]


def _count(row: TrafficSample, counts: dict[str, int]) -> None:
    for what, count in counts.items():
        if what in SUMS:
            setattr(row, what, getattr(row, what) + count)
        elif what.startswith((FIRST_TOKEN, GAP)):
            spread = row.first_token if what[0] == FIRST_TOKEN else row.gaps
            spread[what[1:]] = spread.get(what[1:], 0) + count


def _pools(start: int, beats: Iterable[Heartbeat]) -> list[PoolSample]:
    rows: dict[str, PoolSample] = {}
    for beat in beats:
        name, stats = beat.model.name, beat.stats
        row = rows.setdefault(name, PoolSample(width=MIN_WIDTH_S, start=start, model=name))
        active = stats.num_blocks - stats.num_free_blocks
        row.replicas += 1
        row.running += stats.num_requests_running
        row.waiting += stats.num_requests_waiting
        row.blocks += stats.num_blocks
        row.active_blocks += active
        # Some cached blocks are also in use: count only those that aren't.
        row.cached_blocks += min(max(0, stats.num_cached_blocks - active), stats.num_free_blocks)
    return list(rows.values())


def _roll_up(finer: int, wider: int, now: float) -> None:
    """Create the past buckets of the wider width that don't exist yet."""
    end = start_of(now - MIN_WIDTH_S - GRACE_S, wider)
    for model, make in ((TrafficSample, _widen_traffic), (PoolSample, _widen_pools)):
        last = model._default_manager.filter(width=wider).aggregate(Max("start"))["start__max"]
        rows = model._default_manager.filter(width=finer, start__lt=end)
        if last is not None:
            rows = rows.filter(start__gte=last + wider)
        _insert(model, make(rows, wider))


def _widen_traffic(rows: QuerySet[Any], wider: int) -> Iterable[TrafficSample]:
    by_start: dict[int, dict[Key, TrafficSample]] = defaultdict(dict)
    for row in iterate_by_key(rows):
        start = start_of(row.start, wider)
        into = _row(by_start[start], wider, start, (row.tenant_id, row.model, row.adapter))
        for name in SUMS:
            setattr(into, name, getattr(into, name) + getattr(row, name))
        for name in ("first_token", "gaps"):
            spread: dict[int, int] = {}
            merge_histograms(spread, getattr(into, name))
            merge_histograms(spread, getattr(row, name))
            setattr(into, name, spread)
    return [sample for samples in by_start.values() for sample in samples.values()]


def _widen_pools(rows: QuerySet[Any], wider: int) -> Iterable[PoolSample]:
    by_key: dict[tuple[int, str], list[Any]] = defaultdict(list)
    for row in iterate_by_key(rows):
        by_key[start_of(row.start, wider), row.model].append(row)
    return [
        PoolSample(
            width=wider,
            start=start,
            model=model,
            **{name: sum(getattr(r, name) for r in samples) / len(samples) for name in GAUGES},
        )
        for (start, model), samples in by_key.items()
    ]
