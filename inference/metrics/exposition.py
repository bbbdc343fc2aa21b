"""`/metrics`: Prometheus text from the installation's counts, its replicas and its processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from engine.contract.protocol import Heartbeat
from inference.metrics.cumulative import cumulative
from inference.metrics.definitions import FAMILIES, Family
from inference.metrics.processes import PROCESS, merged
from inference.metrics.recorder import split_field
from inference.metrics.replicas import process_metrics, replica_metrics

Parts = dict[tuple[str, ...], dict[str, float]]


def exposition(
    stored: Mapping[str, float],
    beats: Iterable[Heartbeat],
    processes: Mapping[str, bytes] | None = None,
) -> bytes:
    """The text.

    Args:
        stored: the hash's fields as `Recorder.take` names them.
        beats: of the live replicas.
        processes: what gateways and workers say of themselves (`processes.published`).
    """
    live = list(beats)
    families = [*_stored(stored), *replica_metrics(live), *_processes(live, processes or {})]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Ready(families))
    return generate_latest(registry)


class _Ready(Collector):
    """Metrics that are there already."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _stored(stored: Mapping[str, float]) -> Iterator[Metric]:
    """Every family of the gateways, with series or without."""
    series: dict[str, Parts] = {name: {} for name in FAMILIES}
    for field, amount in stored.items():
        name, labels, part = split_field(field)
        # An older or newer gateway may count what this one doesn't know.
        if name in series and len(labels) == len(FAMILIES[name].labels):
            series[name].setdefault(labels, {})[part] = amount
    for name, family in FAMILIES.items():
        yield _family(name, family, series[name])


def _family(name: str, family: Family, series: Parts) -> Metric:
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
        counts = [parts.get(str(place), 0.0) for place in range(len(family.buckets) + 1)]
        histogram.add_metric(labels, cumulative(family.buckets, counts), parts.get("sum", 0.0))
    return histogram


def _processes(beats: list[Heartbeat], written: Mapping[str, bytes]) -> Iterator[Metric]:
    """Gateways', workers' and replicas' processes, each family once."""
    found = {metric.name: metric for metric in merged(written.items())}
    for process, own in process_metrics(beats):
        metric = found.setdefault(own.name, Metric(own.name, own.documentation, own.type))
        for sample in own.samples:
            metric.add_sample(sample.name, {PROCESS: process, **sample.labels}, sample.value)
    yield from found.values()
