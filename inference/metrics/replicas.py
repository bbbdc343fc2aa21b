"""Metric families by replica, from the replicas' heartbeats.

A replica's totals start at zero when it restarts, which Prometheus handles as a counter reset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from engine.contract.lora import TIERS, AdapterStatus
from engine.contract.messages import EngineStats, Heartbeat
from engine.contract.metrics import ENGINE_HISTOGRAMS
from inference.metrics.definitions import PREFIX, cumulative

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
    """Adapters that requests use and wait for, where all are stored, and what loading them cost."""
    yield _in_use(beats)
    tiers = GaugeMetricFamily(
        "quire:adapters", "LoRA adapters that a replica knows.", labels=(*_LABELS, "tier")
    )
    num_bytes = GaugeMetricFamily(
        "quire:adapter_bytes", "Device memory that LoRA adapters have.", labels=_LABELS
    )
    for beat in beats:
        labels = [beat.model.name, beat.replica_id]
        num_bytes.add_metric(labels, beat.stats.adapter_bytes)
        for tier in TIERS:
            tiers.add_metric(
                [*labels, tier], sum(adapter.tier == tier for adapter in beat.adapters)
            )
    yield from (tiers, num_bytes)
    for name, (text, value) in _TOTALS.items():
        counter = CounterMetricFamily(name, text, labels=_LABELS)
        for beat in beats:
            counter.add_metric([beat.model.name, beat.replica_id], value(beat.stats))
        yield counter


def _in_use(beats: list[Heartbeat]) -> Metric:
    """vLLM's format: a time, with `max_loras` (0: no limit) and two lists of names."""
    family = GaugeMetricFamily(
        PREFIX + "lora_requests_info",
        "Running stats on LoRA requests.",
        labels=(*_LABELS, "max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    )
    for beat in beats:
        running = _names(adapter for adapter in beat.adapters if adapter.num_running)
        waiting = _names(adapter for adapter in beat.adapters if adapter.num_waiting)
        slots = str(beat.stats.adapter_slots)
        family.add_metric([beat.model.name, beat.replica_id, slots, running, waiting], beat.at)
    return family


def _names(adapters: Iterator[AdapterStatus]) -> str:
    return ",".join(sorted({adapter.name or adapter.digest[:12] for adapter in adapters}))


Value = Callable[[EngineStats], float]
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
    "num_requests_swapped": (
        "Number of requests swapped to CPU.",
        lambda s: s.num_requests_swapped,
    ),
    "gpu_cache_usage_perc": (
        "KV-cache usage. 1 means 100 percent usage.",
        lambda s: s.kv_cache_usage_perc,
    ),
    "kv_cache_usage_perc": (
        "KV-cache usage. 1 means 100 percent usage.",
        lambda s: s.kv_cache_usage_perc,
    ),
    "avg_prompt_throughput_toks_per_s": (
        "Prompt tokens a second, over five seconds.",
        lambda s: s.avg_prompt_throughput_toks_per_s,
    ),
    "avg_generation_throughput_toks_per_s": (
        "Generated tokens a second, over five seconds.",
        lambda s: s.avg_generation_throughput_toks_per_s,
    ),
    "cpu_cache_usage_perc": (
        "Usage of the host memory for KV blocks. 1 means 100 percent usage.",
        lambda s: s.cpu_cache_usage_perc,
    ),
    "spec_decode_draft_acceptance_rate": (
        "Accepted draft tokens to draft tokens.",
        lambda s: (
            s.spec_decode_num_accepted_tokens_total / max(1, s.spec_decode_num_draft_tokens_total)
        ),
    ),
    "spec_decode_efficiency": (
        "Tokens of rows with drafts, as a share of what they would be if all drafts were accepted.",
        lambda s: (
            (s.spec_decode_num_accepted_tokens_total + s.spec_decode_num_drafts_total)
            / max(1, s.spec_decode_num_draft_tokens_total + s.spec_decode_num_drafts_total)
        ),
    ),
}
TOTALS: dict[str, tuple[str, Value]] = {
    "num_preemptions": ("Cumulative number of preemptions.", lambda s: s.num_preemptions_total),
    "prompt_tokens": ("Number of prefill tokens processed.", lambda s: s.prompt_tokens_total),
    "prompt_tokens_cached": (
        "Prompt tokens found in the prefix cache.",
        lambda s: s.prefix_cache_hits_total,
    ),
    "generation_tokens": (
        "Number of generation tokens processed.",
        lambda s: s.generation_tokens_total,
    ),
    "tokens": (
        "Number of prefill tokens and generation tokens processed.",
        lambda s: s.prompt_tokens_total + s.generation_tokens_total,
    ),
    "prefix_cache_queries": (
        "Prefix cache queries, in tokens.",
        lambda s: s.prefix_cache_queries_total,
    ),
    "prefix_cache_hits": ("Prefix cache hits, in tokens.", lambda s: s.prefix_cache_hits_total),
    "mm_cache_queries": (
        "Images, videos and sounds that sequences needed encoded.",
        lambda s: s.mm_cache_queries_total,
    ),
    "mm_cache_hits": (
        "Images, videos and sounds that were encoded already.",
        lambda s: s.mm_cache_hits_total,
    ),
    "external_prefix_cache_queries": (
        "Prompt tokens looked up in KV tiers.",
        lambda s: s.external_prefix_cache_queries_total,
    ),
    "external_prefix_cache_hits": (
        "Prompt tokens loaded from KV tiers.",
        lambda s: s.external_prefix_cache_hits_total,
    ),
    "gpu_prefix_cache_queries": (
        "The older name of vllm:prefix_cache_queries.",
        lambda s: s.prefix_cache_queries_total,
    ),
    "gpu_prefix_cache_hits": (
        "The older name of vllm:prefix_cache_hits.",
        lambda s: s.prefix_cache_hits_total,
    ),
    "spec_decode_num_drafts": (
        "Rows of steps that had drafts.",
        lambda s: s.spec_decode_num_drafts_total,
    ),
    "spec_decode_num_draft_tokens": (
        "Number of draft tokens.",
        lambda s: s.spec_decode_num_draft_tokens_total,
    ),
    "spec_decode_num_accepted_tokens": (
        "Number of accepted draft tokens.",
        lambda s: s.spec_decode_num_accepted_tokens_total,
    ),
    "spec_decode_num_emitted_tokens": (
        "Tokens of rows with drafts: accepted drafts, and one more each.",
        lambda s: s.spec_decode_num_accepted_tokens_total + s.spec_decode_num_drafts_total,
    ),
}
#: Legacy names of histograms.
_OLDER = {"time_in_queue_requests": "request_queue_time_seconds"}
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


def replica_metrics(beats: list[Heartbeat]) -> Iterator[Metric]:
    """All metric families of the replicas' engines."""
    yield from _numbers(beats)
    yield from _by_reason(beats)
    yield from _tiers(beats)
    yield from _ranks(beats)
    yield from _histograms(beats)
    yield _sleep_state(beats)
    yield from adapter_metrics(beats)
    info = InfoMetricFamily(
        PREFIX + "cache_config", "Information of the cache.", labels=ENGINE_LABELS
    )
    for beat in beats:
        settings = {
            "kv_capacity_tokens": str(beat.model.kv_capacity_tokens),
            "dtype": beat.model.dtype,
            "num_gpu_blocks": str(beat.stats.num_blocks),
        }
        info.add_metric(_labels(beat), settings | beat.model.cache_config)
    yield info


def _labels(beat: Heartbeat) -> list[str]:
    return [beat.model.name, beat.replica_id]


def _numbers(beats: list[Heartbeat]) -> Iterator[Metric]:
    for name, (text, value) in GAUGES.items():
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=ENGINE_LABELS)
        for beat in beats:
            gauge.add_metric(_labels(beat), value(beat.stats))
        yield gauge
    for name, (text, value) in TOTALS.items():
        counter = CounterMetricFamily(PREFIX + name, text, labels=ENGINE_LABELS)
        for beat in beats:
            counter.add_metric(_labels(beat), value(beat.stats))
        yield counter


def _by_reason(beats: list[Heartbeat]) -> Iterator[Metric]:
    waiting = GaugeMetricFamily(
        PREFIX + "num_requests_waiting_by_reason",
        "Number of requests waiting, by reason.",
        labels=(*ENGINE_LABELS, "reason"),
    )
    sources = CounterMetricFamily(
        PREFIX + "prompt_tokens_by_source",
        "Prompt tokens by where their keys and values came from.",
        labels=(*ENGINE_LABELS, "source"),
    )
    cold = CounterMetricFamily(
        "quire:prefix_cold",
        "Outputs whose prompt found nothing in the prefix cache, by reason.",
        labels=(*ENGINE_LABELS, "reason"),
    )
    accepted = CounterMetricFamily(
        PREFIX + "spec_decode_num_accepted_tokens_per_pos",
        "Accepted draft tokens, by their position after the row's newest token.",
        labels=(*ENGINE_LABELS, "position"),
    )
    for beat in beats:
        labels, stats = _labels(beat), beat.stats
        waiting.add_metric([*labels, "capacity"], stats.num_requests_waiting)
        waiting.add_metric([*labels, "deferred"], 0)
        sources.add_metric([*labels, "local_compute"], stats.prompt_tokens_total)
        sources.add_metric([*labels, "local_cache_hit"], stats.prefix_cache_hits_total)
        hits = stats.external_prefix_cache_hits_total
        sources.add_metric([*labels, "external_kv_transfer"], hits)
        for reason, count in stats.prefix_cold_total.items():
            cold.add_metric([*labels, reason], count)
        for position, count in enumerate(stats.spec_decode_num_accepted_tokens_per_pos_total):
            accepted.add_metric([*labels, str(position)], count)
    yield from (waiting, sources, cold, accepted)


def _tiers(beats: list[Heartbeat]) -> Iterator[Metric]:
    """KV blocks outside the KV cache; replicas without tiers have no samples."""
    used = GaugeMetricFamily(
        "quire:kv_tier_bytes", "Bytes of KV blocks in a tier.", labels=(*ENGINE_LABELS, "tier")
    )
    capacity = GaugeMetricFamily(
        "quire:kv_tier_capacity_bytes",
        "Bytes that a tier may have.",
        labels=(*ENGINE_LABELS, "tier"),
    )
    saved = CounterMetricFamily(
        "quire:kv_tier_saved_blocks", "KV blocks saved in tiers.", labels=ENGINE_LABELS
    )
    hits = CounterMetricFamily(
        "quire:kv_tier_hit_tokens",
        "Prompt tokens that were loaded from a tier.",
        labels=(*ENGINE_LABELS, "tier"),
    )
    evicted = CounterMetricFamily(
        "quire:kv_tier_evicted_tokens",
        "Prompt tokens that a tier of 4 times its size would have loaded, too.",
        labels=(*ENGINE_LABELS, "tier"),
    )
    saved_seconds = CounterMetricFamily(
        "quire:kv_tier_saved_seconds",
        "Seconds that computing these tokens would have taken longer, as measured at the start.",
        labels=(*ENGINE_LABELS, "tier"),
    )
    failures = CounterMetricFamily(
        "quire:kv_tier_failures",
        "KV blocks of tiers that couldn't be used or saved, by reason.",
        labels=(*ENGINE_LABELS, "reason"),
    )
    for beat in beats:
        labels, stats = _labels(beat), beat.stats
        for tier, size in stats.kv_tier_bytes.items():
            used.add_metric([*labels, tier], size)
            capacity.add_metric([*labels, tier], stats.kv_tier_capacity_bytes.get(tier, 0))
        if stats.kv_tier_bytes:
            saved.add_metric(labels, stats.kv_tier_saved_blocks_total)
        for tier, num_tokens in stats.kv_tier_hit_tokens_total.items():
            hits.add_metric([*labels, tier], num_tokens)
            evicted.add_metric([*labels, tier], stats.kv_tier_evicted_tokens_total.get(tier, 0))
            saved_seconds.add_metric(
                [*labels, tier], stats.kv_tier_saved_seconds_total.get(tier, 0.0)
            )
        for reason, count in stats.kv_tier_failures_total.items():
            failures.add_metric([*labels, reason], count)
    yield from (used, capacity, saved, hits, evicted, saved_seconds, failures)


def _ranks(beats: list[Heartbeat]) -> Iterator[Metric]:
    """Replicas whose model is split over several processes; others have no samples."""
    ranks = GaugeMetricFamily(
        "quire:ranks", "Number of processes that share a replica's model.", labels=ENGINE_LABELS
    )
    waited = CounterMetricFamily(
        "quire:collective_seconds",
        "Seconds that a replica's first rank has waited for what the others compute.",
        labels=ENGINE_LABELS,
    )
    for beat in beats:
        if beat.model.num_ranks > 1:
            ranks.add_metric(_labels(beat), beat.model.num_ranks)
            waited.add_metric(_labels(beat), beat.stats.collective_seconds_total)
    yield from (ranks, waited)


def _histograms(beats: list[Heartbeat]) -> Iterator[Metric]:
    names = {name: name for name in ENGINE_HISTOGRAMS} | _OLDER
    for name, today in names.items():
        definition = ENGINE_HISTOGRAMS[today]
        family = HistogramMetricFamily(PREFIX + name, definition.help, labels=ENGINE_LABELS)
        for beat in beats:
            seen = beat.stats.histograms.get(today)
            if seen is not None and len(seen.counts) == len(definition.buckets) + 1:
                buckets = cumulative(definition.buckets, seen.counts)
                family.add_metric(_labels(beat), buckets, seen.total)
        yield family


def _sleep_state(beats: list[Heartbeat]) -> Metric:
    family = GaugeMetricFamily(
        PREFIX + "engine_sleep_state",
        "1 for the state of a replica: awake, asleep with weights in host memory, or without.",
        labels=(*ENGINE_LABELS, "sleep_state"),
    )
    for beat in beats:
        for level, state in enumerate(_SLEEP_STATES):
            family.add_metric([*_labels(beat), state], float(beat.sleep_level == level))
    return family


def process_metrics(beats: list[Heartbeat]) -> Iterator[tuple[str, Metric]]:
    """Metric families of the replicas' processes, each with its process."""
    for beat in beats:
        stats = beat.process
        gauges = {
            "process_resident_memory_bytes": stats.resident_bytes,
            "process_virtual_memory_bytes": stats.virtual_bytes,
            "process_start_time_seconds": stats.start_time,
            "process_open_fds": stats.open_fds,
            "process_max_fds": stats.max_fds,
        }
        for name, value in gauges.items():
            gauge = GaugeMetricFamily(name, name)
            gauge.add_metric([], value)
            yield beat.replica_id, gauge
        seconds = CounterMetricFamily("process_cpu_seconds", "process_cpu_seconds")
        seconds.add_metric([], stats.cpu_seconds)
        yield beat.replica_id, seconds
        for name, counts in (
            ("python_gc_collections", stats.gc_collections),
            ("python_gc_objects_collected", stats.gc_collected),
            ("python_gc_objects_uncollectable", stats.gc_uncollectable),
        ):
            counter = CounterMetricFamily(name, name, labels=("generation",))
            for generation, count in enumerate(counts):
                counter.add_metric([str(generation)], count)
            yield beat.replica_id, counter
