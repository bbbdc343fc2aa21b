"""Adds this process's measurements to the installation's, one pipeline a second."""

from __future__ import annotations

import asyncio
import logging
import time

from redis.asyncio import Redis
from redis.exceptions import RedisError

from history.buckets import add_counts
from inference.metrics.history import history
from inference.metrics.labels import bounded, prune
from inference.metrics.processes import EVERY_S, own_families, publish
from inference.metrics.recorder import recorder
from inference.settings import gateway_settings

logger = logging.getLogger(__name__)

FLUSH_EVERY_S = 1.0
PRUNE_EVERY_S = 3600.0


def metrics_key(prefix: str) -> str:
    """The hash that all gateways add to."""
    return f"{prefix}:metrics:counts"


async def flush(redis: Redis, prefix: str) -> None:
    """Write what is new. Raises redis.RedisError; then it is kept for the next time."""
    increments, counts = recorder.take(), history.take()
    if not increments and not counts:
        return
    key = metrics_key(prefix)
    try:
        counted = await bounded(redis, prefix, increments, gateway_settings().metrics_tenants)
        pipeline = redis.pipeline(transaction=True)
        for field, amount in counted.items():
            pipeline.hincrbyfloat(key, field, amount)
        if counts:
            add_counts(pipeline, counts, time.time(), prefix)
        await pipeline.execute()
    except RedisError:
        recorder.give_back(increments)
        history.give_back(counts)
        raise


class Flusher:
    """Flushes every second, and does what is due more seldom.

    Args:
        process: this process's name among those of the installation.
    """

    def __init__(self, redis: Redis, prefix: str, process: str) -> None:
        self._redis, self._prefix, self._process = redis, prefix, process
        self._publish_at = self._prune_at = 0.0

    async def run(self) -> None:
        """For ever. Without Redis the numbers wait in this process."""
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
            families = await asyncio.to_thread(own_families)
            await publish(self._redis, self._prefix, self._process, families)
            self._publish_at = now + EVERY_S
        if now >= self._prune_at:
            await prune(self._redis, self._prefix, metrics_key(self._prefix))
            self._prune_at = now + PRUNE_EVERY_S
