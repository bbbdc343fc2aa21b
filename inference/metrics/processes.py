"""What each gateway and worker process says of itself: the process's own families and Django's.

`prometheus_client` keeps these in each process. So that a scrape of any gateway shows them all,
every process writes its own to Redis now and then, under a key that expires.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from prometheus_client import REGISTRY, Metric
from redis.asyncio import Redis

EVERY_S = 10.0
#: A process that is silent for so long has ended.
EXPIRE_S = 45
PROCESS = "process"


class Snapshot(msgspec.Struct, array_like=True):
    """One family of one process. `samples`: name, labels, value."""

    name: str
    help: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]


_decoder = msgspec.msgpack.Decoder(list[Snapshot])


def own_families() -> bytes:
    """This process's, encoded. Reads /proc: a few milliseconds, fit for a thread."""
    found = []
    for metric in REGISTRY.collect():
        samples = [
            (sample.name, dict(sample.labels), float(sample.value))
            for sample in metric.samples
            if not sample.name.endswith("_created")
        ]
        if samples:
            found.append(Snapshot(metric.name, metric.documentation, metric.type, samples))
    return msgspec.msgpack.encode(found)


def _key(prefix: str, process: str) -> str:
    return f"{prefix}:metrics:process:{process}"


def _names_key(prefix: str) -> str:
    return f"{prefix}:metrics:processes"


async def publish(redis: Redis, prefix: str, process: str, families: bytes) -> None:
    """Write what this process says. Raises redis.RedisError."""
    now = time.time()
    pipeline = redis.pipeline(transaction=False)
    pipeline.set(_key(prefix, process), families, ex=EXPIRE_S)
    pipeline.zadd(_names_key(prefix), {process: now})
    pipeline.zremrangebyscore(_names_key(prefix), "-inf", now - EXPIRE_S)
    await pipeline.execute()


async def published(redis: Redis, prefix: str) -> dict[str, bytes]:
    """What all live processes have written, by process. Raises redis.RedisError."""
    found: Any = await redis.zrange(_names_key(prefix), 0, -1)
    names = [name.decode() for name in found]
    if not names:
        return {}
    values: Any = await redis.mget([_key(prefix, name) for name in names])
    return {name: value for name, value in zip(names, values, strict=True) if value is not None}


def merged(families: Iterable[tuple[str, bytes]]) -> Iterator[Metric]:
    """Each family once, with the samples of all processes, told apart by the label `process`."""
    found: dict[str, Metric] = {}
    for process, encoded in families:
        for family in _decoder.decode(encoded):
            metric = found.get(family.name)
            if metric is None:
                metric = found[family.name] = Metric(family.name, family.help, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, {PROCESS: process, **labels}, value)
    yield from found.values()
