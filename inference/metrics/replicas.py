"""Metric families by replica, from the replicas' heartbeats.

A replica's totals start at zero when it restarts, which Prometheus handles as a counter reset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

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

ENGINE_LABELS = ("model_name", "engine")

#: Name -> help text, and what to read from a replica's stats: a field's name, or a function.
Numbers = dict[str, tuple[str, str | Callable[[EngineStats], float]]]
GAUGES: Numbers = {
    **{
        PREFIX + name: (text, name)
        for name, text in {
            "num_requests_running": "Number of requests currently running.",
            "num_requests_waiting": "Number of requests waiting to be processed.",
            "num_requests_swapped": "Number of requests swapped to CPU.",
            "kv_cache_usage_perc": "KV-cache usage. 1 means 100 percent usage.",
            "avg_prompt_throughput_toks_per_s": "Prompt tokens a second, over five seconds.",
            "avg_generation_throughput_toks_per_s": "Generated tokens a second, over five seconds.",
            "cpu_cache_usage_perc": (
                "Usage of the host memory for KV blocks. 1 means 100 percent usage."
            ),
        }.items()
    },
    PREFIX + "gpu_cache_usage_perc": (
        "KV-cache usage. 1 means 100 percent usage.",
        "kv_cache_usage_perc",
    ),
    PREFIX + "spec_decode_draft_acceptance_rate": (
        "Accepted draft tokens to draft tokens.",
        lambda s: (
            s.spec_decode_num_accepted_tokens_total / max(1, s.spec_decode_num_draft_tokens_total)
        ),
    ),
    PREFIX + "spec_decode_efficiency": (
        "Tokens of rows with drafts, as a share of what they would be if all drafts were accepted.",
        lambda s: (
            (s.spec_decode_num_accepted_tokens_total + s.spec_decode_num_drafts_total)
            / max(1, s.spec_decode_num_draft_tokens_total + s.spec_decode_num_drafts_total)
        ),
    ),
    "quire:adapter_bytes": ("Device memory that LoRA adapters have.", "adapter_bytes"),
}
TOTALS: Numbers = {
    **{
        PREFIX + name: (text, f"{name}_total")
        for name, text in {
            "num_preemptions": "Cumulative number of preemptions.",
            "prompt_tokens": "Number of prefill tokens processed.",
            "generation_tokens": "Number of generation tokens processed.",
            "prefix_cache_queries": "Prefix cache queries, in tokens.",
            "prefix_cache_hits": "Prefix cache hits, in tokens.",
            "mm_cache_queries": "Images, videos and sounds that sequences needed encoded.",
            "mm_cache_hits": "Images, videos and sounds that were encoded already.",
            "external_prefix_cache_queries": "Prompt tokens looked up in KV tiers.",
            "external_prefix_cache_hits": "Prompt tokens loaded from KV tiers.",
            "spec_decode_num_drafts": "Rows of steps that had drafts.",
            "spec_decode_num_draft_tokens": "Number of draft tokens.",
            "spec_decode_num_accepted_tokens": "Number of accepted draft tokens.",
        }.items()
    },
    PREFIX + "prompt_tokens_cached": (
        "Prompt tokens found in the prefix cache.",
        "prefix_cache_hits_total",
    ),
    PREFIX + "tokens": (
        "Number of prefill tokens and generation tokens processed.",
        lambda s: s.prompt_tokens_total + s.generation_tokens_total,
    ),
    PREFIX + "gpu_prefix_cache_queries": (
        "The older name of vllm:prefix_cache_queries.",
        "prefix_cache_queries_total",
    ),
    PREFIX + "gpu_prefix_cache_hits": (
        "The older name of vllm:prefix_cache_hits.",
        "prefix_cache_hits_total",
    ),
    PREFIX + "spec_decode_num_emitted_tokens": (
        "Tokens of rows with drafts: accepted drafts, and one more each.",
        lambda s: s.spec_decode_num_accepted_tokens_total + s.spec_decode_num_drafts_total,
    ),
    "quire:adapter_loads": ("LoRA adapters loaded to the device.", "adapter_loads_total"),
    "quire:adapter_load_seconds": (
        "Seconds that loads of LoRA adapters took.",
        "adapter_load_seconds_total",
    ),
    "quire:adapter_evictions": (
        "LoRA adapters evicted from the device's memory.",
        "adapter_evictions_total",
    ),
}


def _by_tier(beat: Heartbeat, fields: str) -> dict[str, float]:
    """A total by tier, for the tiers from which tokens were loaded."""
    totals = getattr(beat.stats, fields)
    return {tier: totals.get(tier, 0.0) for tier in beat.stats.kv_tier_hit_tokens_total}


_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


#: Numbers with a label besides the replica's: kind, name, help text, label, and a function from a
#: heartbeat to the numbers by the label's value. Replicas without tiers have none of theirs.
LABELLED: tuple[
    tuple[
        type[GaugeMetricFamily | CounterMetricFamily],
        str,
        str,
        str,
        Callable[[Heartbeat], Mapping[str, float]],
    ],
    ...,
] = (
    (
        GaugeMetricFamily,
        PREFIX + "num_requests_waiting_by_reason",
        "Number of requests waiting, by reason.",
        "reason",
        lambda beat: {"capacity": beat.stats.num_requests_waiting, "deferred": 0},
    ),
    (
        CounterMetricFamily,
        PREFIX + "prompt_tokens_by_source",
        "Prompt tokens by where their keys and values came from.",
        "source",
        lambda beat: {
            "local_compute": beat.stats.prompt_tokens_total,
            "local_cache_hit": beat.stats.prefix_cache_hits_total,
            "external_kv_transfer": beat.stats.external_prefix_cache_hits_total,
        },
    ),
    (
        CounterMetricFamily,
        "quire:prefix_cold",
        "Outputs whose prompt found nothing in the prefix cache, by reason.",
        "reason",
        lambda beat: beat.stats.prefix_cold_total,
    ),
    (
        CounterMetricFamily,
        PREFIX + "spec_decode_num_accepted_tokens_per_pos",
        "Accepted draft tokens, by their position after the row's newest token.",
        "position",
        lambda beat: {
            str(position): count
            for position, count in enumerate(
                beat.stats.spec_decode_num_accepted_tokens_per_pos_total
            )
        },
    ),
    (
        GaugeMetricFamily,
        "quire:kv_tier_bytes",
        "Bytes of KV blocks in a tier.",
        "tier",
        lambda beat: beat.stats.kv_tier_bytes,
    ),
    (
        GaugeMetricFamily,
        "quire:kv_tier_capacity_bytes",
        "Bytes that a tier may have.",
        "tier",
        lambda beat: {
            tier: beat.stats.kv_tier_capacity_bytes.get(tier, 0)
            for tier in beat.stats.kv_tier_bytes
        },
    ),
    (
        CounterMetricFamily,
        "quire:kv_tier_hit_tokens",
        "Prompt tokens that were loaded from a tier.",
        "tier",
        lambda beat: beat.stats.kv_tier_hit_tokens_total,
    ),
    (
        CounterMetricFamily,
        "quire:kv_tier_evicted_tokens",
        "Prompt tokens that a tier of 4 times its size would have loaded, too.",
        "tier",
        lambda beat: _by_tier(beat, "kv_tier_evicted_tokens_total"),
    ),
    (
        CounterMetricFamily,
        "quire:kv_tier_saved_seconds",
        "Seconds that computing these tokens would have taken longer, as measured at the start.",
        "tier",
        lambda beat: _by_tier(beat, "kv_tier_saved_seconds_total"),
    ),
    (
        CounterMetricFamily,
        "quire:kv_tier_failures",
        "KV blocks of tiers that couldn't be used or saved, by reason.",
        "reason",
        lambda beat: beat.stats.kv_tier_failures_total,
    ),
    (
        GaugeMetricFamily,
        PREFIX + "engine_sleep_state",
        "1 for the state of a replica: awake, asleep with weights in host memory, or without.",
        "sleep_state",
        lambda beat: {
            state: float(beat.sleep_level == level) for level, state in enumerate(_SLEEP_STATES)
        },
    ),
    (
        GaugeMetricFamily,
        "quire:adapters",
        "LoRA adapters that a replica knows.",
        "tier",
        lambda beat: {
            tier: sum(adapter.tier == tier for adapter in beat.adapters) for tier in TIERS
        },
    ),
)
#: Legacy names of histograms.
_OLDER = {"time_in_queue_requests": "request_queue_time_seconds"}


def replica_metrics(beats: list[Heartbeat]) -> Iterator[Metric]:
    """All metric families of the replicas' engines."""
    yield from _numbers(beats)
    for kind, name, text, label, values in LABELLED:
        labelled = kind(name, text, labels=(*ENGINE_LABELS, label))
        for beat in beats:
            for value, number in values(beat).items():
                labelled.add_metric([*_labels(beat), value], number)
        yield labelled
    yield from _of_some_replicas(beats)
    yield from _histograms(beats)
    yield _adapters_in_use(beats)
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
    for kind, numbers in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, TOTALS)):
        for name, (text, value) in numbers.items():
            family = kind(name, text, labels=ENGINE_LABELS)
            for beat in beats:
                stats = beat.stats
                number = getattr(stats, value) if isinstance(value, str) else value(stats)
                family.add_metric(_labels(beat), number)
            yield family


def _of_some_replicas(beats: list[Heartbeat]) -> Iterator[Metric]:
    """Numbers of replicas with KV tiers, or with several ranks; others have no samples."""
    saved = CounterMetricFamily(
        "quire:kv_tier_saved_blocks", "KV blocks saved in tiers.", labels=ENGINE_LABELS
    )
    ranks = GaugeMetricFamily(
        "quire:ranks", "Number of processes that share a replica's model.", labels=ENGINE_LABELS
    )
    waited = CounterMetricFamily(
        "quire:collective_seconds",
        "Seconds that a replica's first rank has waited for what the others compute.",
        labels=ENGINE_LABELS,
    )
    for beat in beats:
        if beat.stats.kv_tier_bytes:
            saved.add_metric(_labels(beat), beat.stats.kv_tier_saved_blocks_total)
        if beat.model.num_ranks > 1:
            ranks.add_metric(_labels(beat), beat.model.num_ranks)
            waited.add_metric(_labels(beat), beat.stats.collective_seconds_total)
    yield from (saved, ranks, waited)


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


def _adapters_in_use(beats: list[Heartbeat]) -> Metric:
    """vLLM's format: a time, with `max_loras` (0: no limit) and two lists of names."""
    family = GaugeMetricFamily(
        PREFIX + "lora_requests_info",
        "Running stats on LoRA requests.",
        labels=(*ENGINE_LABELS, "max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    )
    for beat in beats:
        running = _names(adapter for adapter in beat.adapters if adapter.num_running)
        waiting = _names(adapter for adapter in beat.adapters if adapter.num_waiting)
        slots = str(beat.stats.adapter_slots)
        family.add_metric([*_labels(beat), slots, running, waiting], beat.at)
    return family


def _names(adapters: Iterator[AdapterStatus]) -> str:
    return ",".join(sorted({adapter.name or adapter.digest[:12] for adapter in adapters}))


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
