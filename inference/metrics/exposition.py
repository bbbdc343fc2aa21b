"""`/metrics`: Prometheus text from the gateways' counts, the replicas and the processes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from prometheus_client import REGISTRY, Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.core import Metric as PrometheusMetric
from prometheus_client.utils import floatToGoString
from redis.asyncio import Redis

from engine.contract.messages import Heartbeat
from inference.metrics.definitions import FAMILIES, Family, cumulative
from inference.metrics.queues import TaskQueue, queue_metrics
from inference.metrics.recorder import split_field
from inference.metrics.replicas import process_metrics, replica_metrics

EVERY_S = 10.0
#: Seconds without a report after which a process counts as ended.
EXPIRE_S = 45
PROCESS = "process"


class Snapshot(msgspec.Struct, array_like=True):
    """One metric family of one process. `samples`: name, labels, value."""

    name: str
    help: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]


_decoder = msgspec.msgpack.Decoder(list[Snapshot])


def process_metric_families() -> bytes:
    """This process's own metrics and Django's, encoded.

    `prometheus_client` keeps these per process. So that a scrape of any gateway shows them all,
    each process writes its own to Redis, under a key that expires. Reads /proc, which takes a few
    milliseconds, so call it in a thread.
    """
    snapshots = []
    for metric in REGISTRY.collect():
        samples = [
            (sample.name, dict(sample.labels), float(sample.value))
            for sample in metric.samples
            if not sample.name.endswith("_created")
        ]
        if samples:
            snapshots.append(Snapshot(metric.name, metric.documentation, metric.type, samples))
    return msgspec.msgpack.encode(snapshots)


def _key(prefix: str, process: str) -> str:
    return f"{prefix}:metrics:process:{process}"


def _names_key(prefix: str) -> str:
    return f"{prefix}:metrics:processes"


async def publish(redis: Redis, prefix: str, process: str, families: bytes) -> None:
    """Write this process's metrics. Raises redis.RedisError."""
    now = time.time()
    pipeline = redis.pipeline(transaction=False)
    pipeline.set(_key(prefix, process), families, ex=EXPIRE_S)
    pipeline.zadd(_names_key(prefix), {process: now})
    pipeline.zremrangebyscore(_names_key(prefix), "-inf", now - EXPIRE_S)
    await pipeline.execute()


async def published(redis: Redis, prefix: str) -> dict[str, bytes]:
    """Metrics of all live processes, by process. Raises redis.RedisError."""
    encoded_names: Any = await redis.zrange(_names_key(prefix), 0, -1)
    names = [name.decode() for name in encoded_names]
    if not names:
        return {}
    values: Any = await redis.mget([_key(prefix, name) for name in names])
    return {name: value for name, value in zip(names, values, strict=True) if value is not None}


def merged(families: Iterable[tuple[str, bytes]]) -> Iterator[Metric]:
    """Each family once, with the samples of all processes, distinguished by the label `process`."""
    metrics: dict[str, Metric] = {}
    for process, encoded in families:
        for family in _decoder.decode(encoded):
            metric = metrics.get(family.name)
            if metric is None:
                metric = metrics[family.name] = Metric(family.name, family.help, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, {PROCESS: process, **labels}, value)
    yield from metrics.values()


Parts = dict[tuple[str, ...], dict[str, float]]


def exposition(
    stored: Mapping[str, float],
    beats: Iterable[Heartbeat],
    processes: Mapping[str, bytes] | None = None,
    queues: Iterable[TaskQueue] = (),
) -> bytes:
    """The exposition text.

    Args:
        stored: the fields of the Redis hash, named as in `Recorder.drain`.
        beats: heartbeats of the live replicas.
        processes: metrics of gateways and workers (`published`).
        queues: Celery's queues.
    """
    live = list(beats)
    families = [*_stored(stored), *replica_metrics(live), *queue_metrics(queues)]
    families += _processes(live, processes or {})
    return text_format(families)


#: Suffixes of metric names in Prometheus' text, by OpenMetrics type.
SUFFIXES = {"counter": "_total", "info": "_info"}
TEXT_TYPES = {"info": "gauge", "unknown": "untyped"}


def text_format(families: Iterable[Metric]) -> bytes:
    """Prometheus' text, as `prometheus_client.generate_latest` writes it for names that need no
    escaping.

    The library checks every label name of every sample, which takes four times as long and holds
    the interpreter's lock.
    """
    lines = []
    for family in families:
        name = family.name + SUFFIXES.get(family.type, "")
        kind = TEXT_TYPES.get(family.type, family.type)
        description = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
        lines.append(f"# HELP {name} {description}\n# TYPE {name} {kind}\n")
        for sample in family.samples:
            labels = ",".join(
                [f'{label}="{_escape(value)}"' for label, value in sorted(sample.labels.items())]
            )
            braces = f"{{{labels}}}" if labels else ""
            lines.append(f"{sample.name}{braces} {floatToGoString(sample.value)}\n")
    return "".join(lines).encode()


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _stored(stored: Mapping[str, float]) -> Iterator[PrometheusMetric]:
    """All metric families of the gateways, with samples or without."""
    series: dict[str, Parts] = {name: {} for name in FAMILIES}
    for field, amount in stored.items():
        name, labels, part = split_field(field)
        # A gateway of another version may count metrics that this one doesn't know.
        if name in series and len(labels) == len(FAMILIES[name].labels):
            series[name].setdefault(labels, {})[part] = amount
    for name, family in FAMILIES.items():
        yield _family(name, family, series[name])


def _family(name: str, family: Family, series: Parts) -> PrometheusMetric:
    if family.kind == "counter":
        counter = CounterMetricFamily(name, family.help, labels=family.labels)
        for labels, parts in series.items():
            counter.add_metric(labels, parts.get("", 0.0))
        return counter
    if family.kind == "summary":
        summary = SummaryMetricFamily(name, family.help, labels=family.labels)
        for labels, parts in series.items():
            summary.add_metric(labels, int(parts.get("0", 0.0)), parts.get("sum", 0.0))
        return summary
    histogram = HistogramMetricFamily(name, family.help, labels=family.labels)
    for labels, parts in series.items():
        counts = [parts.get(str(index), 0.0) for index in range(len(family.buckets) + 1)]
        histogram.add_metric(labels, cumulative(family.buckets, counts), parts.get("sum", 0.0))
    return histogram


def _processes(beats: list[Heartbeat], written: Mapping[str, bytes]) -> Iterator[PrometheusMetric]:
    """Metrics of gateway, worker and replica processes, each family once."""
    families = {metric.name: metric for metric in merged(written.items())}
    for process, process_metric in process_metrics(beats):
        metric = families.setdefault(
            process_metric.name,
            PrometheusMetric(
                process_metric.name, process_metric.documentation, process_metric.type
            ),
        )
        for sample in process_metric.samples:
            metric.add_sample(sample.name, {PROCESS: process, **sample.labels}, sample.value)
    yield from families.values()
