"""`/metrics`: Prometheus text from the installation's hash and the replicas' heartbeats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from engine.contract.protocol import EngineStats, Heartbeat
from inference.metrics.definitions import COUNTERS, HISTOGRAMS, PREFIX

Value = Callable[[EngineStats], float]

#: By replica: totals start anew with each, which Prometheus must see in a series of its own.
ENGINE_LABELS = ("model_name", "engine")
GAUGES: dict[str, tuple[str, Value]] = {
    "num_requests_running": (
        "Number of requests currently running.",
        lambda s: s.num_requests_running,
    ),
    "num_requests_waiting": (
        "Number of requests waiting to be processed.",
        lambda s: s.num_requests_waiting,
    ),
    # There is no swapping here: preempted requests are recomputed. The names stay for dashboards.
    "num_requests_swapped": ("Number of requests swapped to CPU.", lambda s: 0),
    "gpu_cache_usage_perc": (
        "KV-cache usage. 1 means 100 percent usage.",
        lambda s: s.kv_cache_usage_perc,
    ),
    "kv_cache_usage_perc": (
        "KV-cache usage. 1 means 100 percent usage.",
        lambda s: s.kv_cache_usage_perc,
    ),
    "cpu_cache_usage_perc": ("CPU swap space usage. 1 means 100 percent usage.", lambda s: 0),
}
TOTALS: dict[str, tuple[str, Value]] = {
    "num_preemptions": ("Cumulative number of preemptions.", lambda s: s.num_preemptions_total),
    "prompt_tokens": ("Number of prefill tokens processed.", lambda s: s.prompt_tokens_total),
    "generation_tokens": (
        "Number of generation tokens processed.",
        lambda s: s.generation_tokens_total,
    ),
    "prefix_cache_queries": (
        "Prefix cache queries, in tokens.",
        lambda s: s.prefix_cache_queries_total,
    ),
    "prefix_cache_hits": ("Prefix cache hits, in tokens.", lambda s: s.prefix_cache_hits_total),
}


def exposition(stored: dict[str, float], beats: Iterable[Heartbeat]) -> bytes:
    """The text. `stored`: the hash's fields as `Recorder.take` names them."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot([*_stored_metrics(stored), *_engine_metrics(list(beats))]))
    return generate_latest(registry)


class _Snapshot(Collector):
    """Metrics that are ready."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _engine_metrics(beats: list[Heartbeat]) -> Iterator[Metric]:
    for name, (text, value) in GAUGES.items():
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=ENGINE_LABELS)
        for beat in beats:
            gauge.add_metric([beat.model.name, beat.replica_id], value(beat.stats))
        yield gauge
    for name, (text, value) in TOTALS.items():
        counter = CounterMetricFamily(PREFIX + name, text, labels=ENGINE_LABELS)
        for beat in beats:
            counter.add_metric([beat.model.name, beat.replica_id], value(beat.stats))
        yield counter
    cold = CounterMetricFamily(
        "quire:prefix_cold",
        "Outputs whose prompt found nothing in the prefix cache, by why.",
        labels=(*ENGINE_LABELS, "reason"),
    )
    for beat in beats:
        for reason, count in beat.stats.prefix_cold_total.items():
            cold.add_metric([beat.model.name, beat.replica_id, reason], count)
    yield cold
    info = InfoMetricFamily(
        PREFIX + "cache_config", "Information of the cache.", labels=ENGINE_LABELS
    )
    for beat in beats:
        info.add_metric(
            [beat.model.name, beat.replica_id],
            {
                "num_gpu_blocks": str(beat.stats.num_blocks),
                "kv_capacity_tokens": str(beat.model.kv_capacity_tokens),
                "dtype": beat.model.dtype,
            },
        )
    yield info


def _stored_metrics(stored: dict[str, float]) -> Iterator[Metric]:
    by_series: dict[tuple[str, str, str], dict[str, float]] = {}
    for field, amount in stored.items():
        kind, name, model, part = field.split("|", 3)
        by_series.setdefault((kind, name, model), {})[part] = amount
    for name, (label, text) in COUNTERS.items():
        counter = CounterMetricFamily(PREFIX + name, text, labels=("model_name", label))
        for (kind, of, model), parts in by_series.items():
            if (kind, of) == ("c", name):
                for value, amount in parts.items():
                    counter.add_metric([model, value], amount)
        yield counter
    for name, definition in HISTOGRAMS.items():
        histogram = HistogramMetricFamily(PREFIX + name, definition.help, labels=("model_name",))
        for (kind, of, model), parts in by_series.items():
            if (kind, of) == ("h", name):
                histogram.add_metric(
                    [model], _cumulative(definition.buckets, parts), parts.get("sum", 0.0)
                )
        yield histogram


def _cumulative(bounds: tuple[float, ...], parts: dict[str, float]) -> list[tuple[str, float]]:
    """Prometheus's buckets: each with all that is below it."""
    buckets, total = [], 0.0
    for place, bound in enumerate((*map(str, bounds), "+Inf")):
        total += parts.get(str(place), 0.0)
        buckets.append((bound, total))
    return buckets
