"""What of a worker reads messages: it waits while Redis can't serve, and the worker stays."""

from __future__ import annotations

import logging
import time
from typing import Any

import redis
from celery.worker.consumer import Consumer
from celery.worker.state import maybe_shutdown
from django.conf import settings

from engine.contract import redis_clients
from engine.contract.redis_link import is_temporary

logger = logging.getLogger(__name__)

#: Between two looks whether Redis takes writes again.
LOOK_EVERY_S = 0.25


class PatientConsumer(Consumer):  # type: ignore[misc]
    """Connects once Redis takes writes.

    Celery's own begins anew at once where a write is refused, five times a second with a connection
    lost each time, and pauses longer and longer while nothing answers.
    """

    def connect(self) -> Any:
        """Raises WorkerShutdown when the worker is told to end meanwhile."""
        wait_for_writes(settings.REDIS_URL)
        return super().connect()


def wait_for_writes(url: str) -> None:
    """Return when Redis takes a write, or refuses it for good (then who comes next says why)."""
    client = redis_clients.sync_client(url)
    told = False
    try:
        while (error := _refusal(client)) is not None:
            if not told:
                logger.warning("messages wait until Redis takes writes: %s", error)
            told = True
            maybe_shutdown()
            time.sleep(LOOK_EVERY_S)
    finally:
        client.close()
    if told:
        logger.warning("Redis takes writes again")


def _refusal(client: redis.Redis) -> redis.RedisError | None:
    try:
        client.set(f"{settings.QUIRE['KEY_PREFIX']}:celery:takes-writes", "", px=1000)
    except redis.RedisError as error:
        return error if is_temporary(error) else None
    return None
