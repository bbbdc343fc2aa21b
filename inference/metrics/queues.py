"""Metrics of Celery's queues for `/metrics`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import msgspec
from django.conf import settings
from prometheus_client.core import GaugeMetricFamily
from redis.asyncio import Redis

#: Header of a task's message with its send time, in seconds since the epoch.
SENT_AT = "quire_sent_at"


class TaskQueue(msgspec.Struct):
    """One of Celery's queues. `age_s`: how long its oldest message has waited, 0 without one."""

    name: str
    length: int
    age_s: float


class _Message(msgspec.Struct):
    """The fields of kombu's messages that are read."""

    headers: dict[str, Any]


_decode_message = msgspec.json.Decoder(_Message).decode


async def read_queues(redis: Redis) -> list[TaskQueue]:
    """All queues, empty ones too. Raises redis.RedisError."""
    names = sorted({route["queue"] for route in settings.CELERY_TASK_ROUTES.values()})
    prefix = settings.CELERY_BROKER_TRANSPORT_OPTIONS["global_keyprefix"]
    pipeline = redis.pipeline(transaction=False)
    for name in names:
        pipeline.llen(prefix + name)
        pipeline.lindex(prefix + name, -1)  # messages are pushed on the left
    replies = await pipeline.execute()
    return [
        TaskQueue(name, length, _age_s(oldest))
        for name, length, oldest in zip(names, replies[::2], replies[1::2], strict=True)
    ]


def _age_s(message: bytes | None) -> float:
    if message is None:
        return 0.0
    sent_at = _decode_message(message).headers.get(SENT_AT)
    return max(0.0, time.time() - sent_at) if sent_at is not None else 0.0


def queue_metrics(queues: Iterable[TaskQueue]) -> list[GaugeMetricFamily]:
    length = GaugeMetricFamily(
        "quire_task_queue_length", "Tasks that wait for a worker.", labels=["queue"]
    )
    age = GaugeMetricFamily(
        "quire_task_queue_age_seconds",
        "Seconds that the oldest task of a queue has waited for a worker.",
        labels=["queue"],
    )
    for queue in queues:
        length.add_metric([queue.name], queue.length)
        age.add_metric([queue.name], queue.age_s)
    return [length, age]
