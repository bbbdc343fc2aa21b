"""Adds this process's measurements to the shared counts, in one pipeline a second."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from history.buckets import add_counts
from inference.metrics.definitions import ENGINE, FAMILIES, OTHER, TENANT
from inference.metrics.exposition import EVERY_S, process_metric_families, publish
from inference.metrics.recorder import field_of, history, recorder, split_field

logger = logging.getLogger(__name__)

#: Seconds without measurements after which a tenant's or replica's series are dropped.
LABEL_TTL_S = 24 * 3600
#: KEYS: a sorted set of names by when they last sent. ARGV: now, the limit, names. Returns 1 for
#: each name within the limit.
_ADMIT = """
local places = {}
for i = 3, #ARGV do
  local known = redis.call('ZSCORE', KEYS[1], ARGV[i])
  if known or redis.call('ZCARD', KEYS[1]) < tonumber(ARGV[2]) then
    redis.call('ZADD', KEYS[1], ARGV[1], ARGV[i])
    places[#places + 1] = 1
  else
    places[#places + 1] = 0
  end
end
return places
"""


def label_key(prefix: str, label: str) -> str:
    """Key of the values of a label and when each was last used."""
    return f"{prefix}:metrics:labels:{label}"


async def limit_label_values(
    redis: Redis, prefix: str, increments: dict[str, float], max_tenants: int
) -> dict[str, float]:
    """The increments, with tenants beyond the limit as "other". Raises redis.RedisError."""
    split = [(*split_field(field), amount) for field, amount in increments.items()]
    is_admitted = await _admit_values(redis, prefix, split, max_tenants)
    merged: dict[str, float] = {}
    for name, labels, part, amount in split:
        if name in _OF_TENANTS:
            # If a metric has a tenant label, it is the first one.
            tenant = labels[0] if is_admitted[labels[0]] else OTHER
            labels = (tenant, *labels[1:])
        field = field_of(name, labels, part)
        merged[field] = merged.get(field, 0) + amount
    return merged


_OF_TENANTS = frozenset(name for name, family in FAMILIES.items() if TENANT in family.labels)
_OF_ENGINES = frozenset(name for name, family in FAMILIES.items() if ENGINE in family.labels)


async def _admit_values(
    redis: Redis,
    prefix: str,
    split: list[tuple[str, tuple[str, ...], str, float]],
    max_tenants: int,
) -> dict[str, bool]:
    """Which tenants have series of their own; replicas always have."""
    now = time.time()
    engines = {labels[1]: now for name, labels, *_ in split if name in _OF_ENGINES}
    tenants = sorted({labels[0] for name, labels, *_ in split if name in _OF_TENANTS})
    if engines:
        await redis.zadd(label_key(prefix, ENGINE), engines)
    if not tenants:
        return {}
    admit = redis.register_script(_ADMIT)
    key = label_key(prefix, TENANT)
    answers = await admit(keys=[key], args=[now, max_tenants, *tenants])
    return {tenant: bool(answer) for tenant, answer in zip(tenants, answers, strict=True)}


async def prune(redis: Redis, prefix: str, hash_key: str) -> None:
    """Drop the series of inactive tenants and replicas. Raises redis.RedisError."""
    limit = time.time() - LABEL_TTL_S
    for label, position, names in ((TENANT, 0, _OF_TENANTS), (ENGINE, 1, _OF_ENGINES)):
        key = label_key(prefix, label)
        silent_values: Any = await redis.zrangebyscore(key, "-inf", limit)
        silent = {value.decode() for value in silent_values}
        if not silent:
            continue
        dropped: list[bytes] = []
        fields: Any = await redis.hkeys(hash_key)
        for field in fields:
            name, labels, _ = split_field(field.decode())
            if name in names and labels[position] in silent:
                dropped.append(field)
        if dropped:
            await redis.hdel(hash_key, *dropped)
        await redis.zrem(key, *silent)


FLUSH_EVERY_S = 1.0
PRUNE_EVERY_S = 3600.0
#: Tenants with series of their own, so that Prometheus' memory is bounded; the rest are "other".
MAX_TENANTS = 100


def metrics_key(prefix: str) -> str:
    """The hash that all gateways add to."""
    return f"{prefix}:metrics:counts"


async def flush(redis: Redis, prefix: str) -> None:
    """Write new increments. If it raises redis.RedisError, they stay for the next call."""
    increments, counts = recorder.drain(), history.drain()
    if not increments and not counts:
        return
    key = metrics_key(prefix)
    try:
        counted = await limit_label_values(redis, prefix, increments, MAX_TENANTS)
        pipeline = redis.pipeline(transaction=True)
        for field, amount in counted.items():
            pipeline.hincrbyfloat(key, field, amount)
        if counts:
            add_counts(pipeline, counts, time.time(), prefix)
        await pipeline.execute()
    except RedisError:
        recorder.restore(increments)
        history.restore(counts)
        raise


class Flusher:
    """Flushes every second, and runs less frequent tasks when they are due.

    Args:
        process: this process's name within the installation.
    """

    def __init__(self, redis: Redis, prefix: str, process: str) -> None:
        self._redis, self._prefix, self._process = redis, prefix, process
        self._publish_at = self._prune_at = 0.0

    def publish_soon(self) -> None:
        """Publish this process's metrics within a second."""
        self._publish_at = 0.0

    async def run(self) -> None:
        """Run forever. Without Redis the numbers accumulate in this process."""
        failing = False
        while True:
            await asyncio.sleep(FLUSH_EVERY_S)
            try:
                await self._tick()
                failing = False
            except RedisError as error:
                if not failing:
                    logger.warning("Metrics wait in this process: %s", error)
                failing = True

    async def _tick(self) -> None:
        await flush(self._redis, self._prefix)
        now = time.monotonic()
        if now >= self._publish_at:
            families = await asyncio.to_thread(process_metric_families)
            await publish(self._redis, self._prefix, self._process, families)
            self._publish_at = now + EVERY_S
        if now >= self._prune_at:
            await prune(self._redis, self._prefix, metrics_key(self._prefix))
            self._prune_at = now + PRUNE_EVERY_S
