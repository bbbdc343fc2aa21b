"""Adds this process's measurements to the installation's, one pipeline a second."""

from __future__ import annotations

import asyncio
import logging

from redis.asyncio import Redis
from redis.exceptions import RedisError

from inference.metrics.recorder import recorder

logger = logging.getLogger(__name__)

FLUSH_EVERY_S = 1.0


def metrics_key(prefix: str) -> str:
    """The hash that all gateways add to."""
    return f"{prefix}:metrics"


async def flush(redis: Redis, prefix: str) -> None:
    """Write what is new. Raises redis.RedisError; then it is kept for the next time."""
    increments = recorder.take()
    if not increments:
        return
    pipeline = redis.pipeline(transaction=True)
    key = metrics_key(prefix)
    for field, amount in increments.items():
        pipeline.hincrbyfloat(key, field, amount)
    try:
        await pipeline.execute()
    except RedisError:
        recorder.give_back(increments)
        raise


async def run_flusher(redis: Redis, prefix: str) -> None:
    """Flush for ever. Without Redis the numbers wait in this process."""
    failing = False
    while True:
        await asyncio.sleep(FLUSH_EVERY_S)
        try:
            await flush(redis, prefix)
            failing = False
        except RedisError as error:
            if not failing:
                logger.warning("Metrics wait in this process: %s", error)
            failing = True
