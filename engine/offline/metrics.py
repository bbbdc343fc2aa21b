"""What `get_metrics` gives: the engine's figures under vLLM's names."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.contract.adapters import AdapterState
from engine.contract.histograms import ENGINE_HISTOGRAMS
from engine.contract.histograms import Histogram as Counts
from engine.contract.replica_state import EngineStats
from engine.offline.request_figures import BUCKETS, RequestFigures


@dataclass(frozen=True)
class Metric:
    """A figure. `labels` tells several of one name apart."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Counter(Metric):
    """It only grows."""

    value: int = 0


@dataclass(frozen=True)
class Gauge(Metric):
    """As it is now."""

    value: float = 0.0


@dataclass(frozen=True)
class Vector(Metric):
    """Several figures that only grow, by their place."""

    values: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Histogram(Metric):
    """`buckets`: how many were at most each bound, by its text; the last is "+Inf"."""

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
    adapters: Sequence[AdapterState], max_loras: int | None, model: str
) -> Iterator[Metric]:
    """Which adapters requests run with and wait for, as vLLM tells it: a time with two lists."""
    labels = {
        "model_name": model,
        "max_lora": str(max_loras or 0),
        "running_lora_adapters": _names(adapters, running=True),
        "waiting_lora_adapters": _names(adapters, running=False),
    }
    yield Gauge("vllm:lora_requests_info", labels, time.time())


def _names(adapters: Sequence[AdapterState], *, running: bool) -> str:
    used = [each for each in adapters if (each.num_running if running else each.num_waiting)]
    return ",".join(sorted({each.name or each.digest[:12] for each in used}))


def histogram(
    name: str, labels: dict[str, str], bounds: Sequence[float], seen: Counts
) -> Histogram:
    """A histogram of these bounds."""
    sums = list(itertools.accumulate(seen.counts))
    buckets = dict(zip([*map(str, bounds), "+Inf"], sums, strict=True))
    return Histogram(f"vllm:{name}", labels, sums[-1], seen.total, buckets)


def request_metrics(figures: RequestFigures, model: str) -> Iterator[Metric]:
    """What requests came to."""
    for name, seen in figures.by_name.items():
        yield histogram(name, {"model_name": model}, BUCKETS[name], seen)


def metrics_of(stats: EngineStats, model: str) -> Iterator[Metric]:
    """The figures of a snapshot, labelled with the model's name."""
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
        yield histogram(name, labels, ENGINE_HISTOGRAMS[name].buckets, seen)
