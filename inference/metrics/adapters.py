"""The families about LoRA adapters, from replicas' heartbeats."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.contract.adapters import TIERS, AdapterState
from engine.contract.protocol import EngineStats, Heartbeat
from inference.metrics.definitions import PREFIX

_LABELS = ("model_name", "engine")
_TOTALS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "quire:adapter_loads": (
        "LoRA adapters loaded to the device.",
        lambda s: s.adapter_loads_total,
    ),
    "quire:adapter_load_seconds": (
        "Seconds that loads of LoRA adapters took.",
        lambda s: s.adapter_load_seconds_total,
    ),
    "quire:adapter_evictions": (
        "LoRA adapters evicted from the device's memory.",
        lambda s: s.adapter_evictions_total,
    ),
}


def adapter_metrics(beats: list[Heartbeat]) -> Iterator[Metric]:
    """Which adapters requests run with and wait for, where all lie, and what loading them took."""
    yield _in_use(beats)
    tiers = GaugeMetricFamily(
        "quire:adapters", "LoRA adapters that a replica knows.", labels=(*_LABELS, "tier")
    )
    held = GaugeMetricFamily(
        "quire:adapter_bytes", "Device memory that LoRA adapters have.", labels=_LABELS
    )
    for beat in beats:
        labels = [beat.model.name, beat.replica_id]
        held.add_metric(labels, beat.stats.adapter_bytes)
        for tier in TIERS:
            tiers.add_metric([*labels, tier], sum(each.tier == tier for each in beat.adapters))
    yield from (tiers, held)
    for name, (text, value) in _TOTALS.items():
        counter = CounterMetricFamily(name, text, labels=_LABELS)
        for beat in beats:
            counter.add_metric([beat.model.name, beat.replica_id], value(beat.stats))
        yield counter


def _in_use(beats: list[Heartbeat]) -> Metric:
    """vLLM's: a time, with two lists of names."""
    family = GaugeMetricFamily(
        PREFIX + "lora_requests_info",
        "Running stats on LoRA requests.",
        labels=(*_LABELS, "running_lora_adapters", "waiting_lora_adapters"),
    )
    for beat in beats:
        running = _names(each for each in beat.adapters if each.num_running)
        waiting = _names(each for each in beat.adapters if each.num_waiting)
        family.add_metric([beat.model.name, beat.replica_id, running, waiting], beat.at)
    return family


def _names(adapters: Iterator[AdapterState]) -> str:
    return ",".join(sorted({each.name or each.digest[:12] for each in adapters}))
