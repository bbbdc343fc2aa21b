"""A replica's histograms, with vLLM's bucket bounds. Torch-free."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import msgspec

# fmt: off
#: Seconds, for requests and their phases.
REQUEST_LATENCY = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)
TIME_TO_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
INTER_TOKEN_LATENCY = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)
KV_RESIDENCY = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0,
    120.0, 300.0, 600.0, 1200.0, 1800.0,
)
# fmt: on
ITERATION_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))
#: Equal for all models, whatever their context: gateways add up counts.
REQUEST_TOKENS = (*(step * 10.0**power for power in range(6) for step in (1, 2, 5)), 1e6)
NUM_PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
SMALL_NUMBERS = (1.0, 2.0, 5.0, 10.0, 20.0)
MODEL_MS = (
    *(step * 10.0**power for power in range(3) for step in (1, 2, 3, 5, 8)),
    *(1000.0, 2000.0, 3000.0),
)
ACCEPTED_LENGTH = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 20.0)


@dataclass(frozen=True)
class HistogramDef:
    """A histogram's help text and bucket bounds, ascending, without +Inf."""

    help: str
    buckets: tuple[float, ...]


#: By name without the prefix `vllm:`; observed per finished output unless the help says otherwise.
ENGINE_HISTOGRAMS = {
    "request_queue_time_seconds": HistogramDef(
        "Seconds that a request waited for its first step.", REQUEST_LATENCY
    ),
    "request_prefill_time_seconds": HistogramDef(
        "Seconds from a request's first step to its first token.", REQUEST_LATENCY
    ),
    "request_decode_time_seconds": HistogramDef(
        "Seconds from a request's first token to its last.", REQUEST_LATENCY
    ),
    "request_inference_time_seconds": HistogramDef(
        "Seconds from a request's first step to its last token.", REQUEST_LATENCY
    ),
    "request_num_preemptions": HistogramDef(
        "How often a request's KV cache was taken for another's.", NUM_PREEMPTIONS
    ),
    "request_prefill_kv_computed_tokens": HistogramDef(
        "Prompt tokens computed for a request; those found in the prefix cache aren't among them.",
        REQUEST_TOKENS,
    ),
    "request_spec_decode_accepted_length": HistogramDef(
        "Tokens that a step with drafts gave a request on average; of requests that had any.",
        ACCEPTED_LENGTH,
    ),
    "model_forward_time_milliseconds": HistogramDef(
        "Milliseconds in the model's forward pass while a request was in the batch; only with "
        "--collect-detailed-traces.",
        MODEL_MS,
    ),
    "model_execute_time_milliseconds": HistogramDef(
        "Milliseconds in the worker, sampling and synchronization included, while a request was in "
        "the batch; only with --collect-detailed-traces.",
        MODEL_MS,
    ),
    "iteration_tokens_total": HistogramDef("Tokens computed in a step.", ITERATION_TOKENS),
    "kv_block_lifetime_seconds": HistogramDef(
        "Seconds from a KV block's allocation to its eviction; of a sample of blocks.", KV_RESIDENCY
    ),
    "kv_block_idle_before_evict_seconds": HistogramDef(
        "Seconds from a KV block's last use to its eviction; of a sample of blocks.", KV_RESIDENCY
    ),
    "kv_block_reuse_gap_seconds": HistogramDef(
        "Seconds between two uses of a KV block; of a sample of blocks.", KV_RESIDENCY
    ),
}


class Histogram(msgspec.Struct, array_like=True):
    """Non-cumulative counts by bucket, the last above all bounds, and the sum of values."""

    counts: list[int]
    total: float = 0.0

    def observe(self, bounds: tuple[float, ...], value: float, times: int = 1) -> None:
        """Count a value `times` times. `bounds`: the histogram's bucket bounds."""
        self.counts[bisect_left(bounds, value)] += times
        self.total += value * times


def empty(bounds: tuple[float, ...]) -> Histogram:
    """Return a histogram without observations."""
    return Histogram([0] * (len(bounds) + 1))


class Histograms:
    """Some of `ENGINE_HISTOGRAMS`, by name."""

    def __init__(self, *names: str) -> None:
        self.by_name = {name: empty(ENGINE_HISTOGRAMS[name].buckets) for name in names}

    def observe(self, name: str, value: float) -> None:
        """Count a value in a histogram."""
        self.by_name[name].observe(ENGINE_HISTOGRAMS[name].buckets, value)
