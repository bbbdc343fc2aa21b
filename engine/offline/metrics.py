"""The engine's metrics with vLLM's names, as `get_metrics` returns them."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.contract.lora import AdapterStatus
from engine.contract.metrics import (
    ENGINE_HISTOGRAMS,
    INTER_TOKEN_LATENCY,
    REQUEST_LATENCY,
    REQUEST_TOKENS,
    TIME_TO_FIRST_TOKEN,
    empty,
)
from engine.contract.metrics import Histogram as Counts
from engine.contract.replica_state import EngineStats

BUCKETS = {
    "time_to_first_token_seconds": TIME_TO_FIRST_TOKEN,
    "inter_token_latency_seconds": INTER_TOKEN_LATENCY,
    "request_time_per_output_token_seconds": INTER_TOKEN_LATENCY,
    "e2e_request_latency_seconds": REQUEST_LATENCY,
    "request_prompt_tokens": REQUEST_TOKENS,
    "request_generation_tokens": REQUEST_TOKENS,
}


class RequestMetricsCollector:
    """Histograms of requests. Times are in seconds since the epoch."""

    def __init__(self) -> None:
        self.by_name: dict[str, Counts] = {name: empty(bounds) for name, bounds in BUCKETS.items()}

    def token(self, arrival: float, last: float | None, now: float) -> None:
        """Count new tokens of a request's first output. `last` is the time of the previous ones;
        None for the first.
        """
        if last is None:
            self._observe("time_to_first_token_seconds", now - arrival)
        else:
            self._observe("inter_token_latency_seconds", now - last)

    def end(
        self, arrival: float, tokens_from: float, now: float, num_prompt: int, num_new: int
    ) -> None:
        """Count a finished request. `tokens_from` is the time of its first token."""
        self._observe("e2e_request_latency_seconds", now - arrival)
        self._observe("request_prompt_tokens", num_prompt)
        self._observe("request_generation_tokens", num_new)
        if num_new > 1:
            seconds_per_token = (now - tokens_from) / (num_new - 1)
            self._observe("request_time_per_output_token_seconds", seconds_per_token)

    def _observe(self, name: str, value: float) -> None:
        self.by_name[name].observe(BUCKETS[name], max(0.0, value))


@dataclass(frozen=True)
class Metric:
    """A metric. `labels` distinguish metrics of the same name."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Counter(Metric):
    """A value that only increases."""

    value: int = 0


@dataclass(frozen=True)
class Gauge(Metric):
    """A current value."""

    value: float = 0.0


@dataclass(frozen=True)
class Vector(Metric):
    """Values by position that only increase."""

    values: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Histogram(Metric):
    """A histogram. `buckets` are cumulative counts by upper bound as text; the last is "+Inf"."""

    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)


_GAUGES = {
    "vllm:num_requests_running": "num_requests_running",
    "vllm:num_requests_waiting": "num_requests_waiting",
    "vllm:kv_cache_usage_perc": "kv_cache_usage_perc",
}
_COUNTERS = {
    "vllm:num_preemptions": "num_preemptions_total",
    "vllm:prompt_tokens": "prompt_tokens_total",
    "vllm:generation_tokens": "generation_tokens_total",
    "vllm:prefix_cache_queries": "prefix_cache_queries_total",
    "vllm:prefix_cache_hits": "prefix_cache_hits_total",
    "vllm:spec_decode_num_drafts": "spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens": "spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens": "spec_decode_num_accepted_tokens_total",
}


def adapter_metrics(
    adapters: Sequence[AdapterStatus], max_loras: int | None, model: str
) -> Iterator[Metric]:
    """Yield the adapters of running and waiting requests as vLLM does: a gauge with the current
    time as its value, and two lists as labels.
    """
    labels = {
        "model_name": model,
        "max_lora": str(max_loras or 0),
        "running_lora_adapters": _names(adapters, running=True),
        "waiting_lora_adapters": _names(adapters, running=False),
    }
    yield Gauge("vllm:lora_requests_info", labels, time.time())


def _names(adapters: Sequence[AdapterStatus], *, running: bool) -> str:
    used = [
        adapter for adapter in adapters if (adapter.num_running if running else adapter.num_waiting)
    ]
    return ",".join(sorted({adapter.name or adapter.digest[:12] for adapter in used}))


def histogram(
    name: str, labels: dict[str, str], bounds: Sequence[float], seen: Counts, max_model_len: int
) -> Histogram:
    """Return a histogram with these bounds, for token counts only those within the context."""
    sums = list(itertools.accumulate(seen.counts))
    limit = max_model_len if bounds is REQUEST_TOKENS else math.inf
    buckets = {
        str(bound): num_up_to
        for bound, num_up_to in zip(bounds, sums[:-1], strict=True)
        if bound <= limit
    }
    buckets["+Inf"] = sums[-1]
    return Histogram(f"vllm:{name}", labels, sums[-1], seen.total, buckets)


def request_metrics(
    figures: RequestMetricsCollector, model: str, max_model_len: int
) -> Iterator[Metric]:
    """Yield the histograms of requests."""
    for name, seen in figures.by_name.items():
        yield histogram(name, {"model_name": model}, BUCKETS[name], seen, max_model_len)


def metrics_of(stats: EngineStats, model: str, max_model_len: int) -> Iterator[Metric]:
    """Yield the metrics of a snapshot, labeled with the model's name."""
    labels = {"model_name": model}
    for name, attribute in _GAUGES.items():
        yield Gauge(name, labels, float(getattr(stats, attribute)))
    for name, attribute in _COUNTERS.items():
        yield Counter(name, labels, getattr(stats, attribute))
    for reason, count in sorted(stats.requests_finished_total.items()):
        yield Counter("vllm:request_success", {**labels, "finished_reason": reason}, count)
    accepted = stats.spec_decode_num_accepted_tokens_per_pos_total
    if accepted:
        yield Vector("vllm:spec_decode_num_accepted_tokens_per_pos", labels, list(accepted))
    for name, seen in sorted(stats.histograms.items()):
        yield histogram(name, labels, ENGINE_HISTOGRAMS[name].buckets, seen, max_model_len)
