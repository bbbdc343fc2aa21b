"""One replica's metrics for Prometheus, as the Gateway API's inference extension reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.contract.lora import AdapterStatus
from engine.contract.messages import Heartbeat

_LABELS = ("model_name", "engine")


def exposition(beat: Heartbeat) -> bytes:
    """vLLM's gauges of a replica in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_HeartbeatCollector(beat))
    return generate_latest(registry)


class _HeartbeatCollector(Collector):
    def __init__(self, beat: Heartbeat) -> None:
        self._beat = beat

    def collect(self) -> Iterator[Metric]:
        """The metrics of the extension's model server protocol."""
        beat, stats = self._beat, self._beat.stats
        values = {
            "num_requests_waiting": ("Number of requests waiting.", stats.num_requests_waiting),
            "num_requests_running": ("Number of requests running.", stats.num_requests_running),
            "kv_cache_usage_perc": (
                "KV-cache usage. 1 means 100 percent usage.",
                stats.kv_cache_usage_perc,
            ),
        }
        for name, (text, value) in values.items():
            yield self._gauge(name, text, {}, value)
        yield self._gauge(
            "cache_config_info", "The KV cache's settings.", beat.model.cache_config, 1
        )
        adapters = {
            "max_lora": str(stats.adapter_slots),
            "running_lora_adapters": _names(a for a in beat.adapters if a.num_running),
            "waiting_lora_adapters": _names(a for a in beat.adapters if a.num_waiting),
        }
        yield self._gauge("lora_requests_info", "Adapters in use.", adapters, beat.at)

    def _gauge(self, name: str, text: str, labels: dict[str, str], value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=(*_LABELS, *labels))
        family.add_metric([self._beat.model.name, self._beat.replica_id, *labels.values()], value)
        return family


def _names(adapters: Iterable[AdapterStatus]) -> str:
    return ",".join(sorted({adapter.name or adapter.digest[:12] for adapter in adapters}))
