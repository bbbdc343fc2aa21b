"""What is measured: names, help texts and buckets, as vLLM has them."""

from __future__ import annotations

from dataclasses import dataclass

PREFIX = "vllm:"


@dataclass(frozen=True)
class HistogramDef:
    """A histogram by model. `buckets`: upper bounds, ascending; +Inf is understood."""

    help: str
    buckets: tuple[float, ...]


def buckets_1_2_5(limit: float) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `limit`."""
    bounds: list[float] = []
    scale = 1.0
    while True:
        for step in (1, 2, 5):
            if step * scale > limit:
                return tuple(bounds)
            bounds.append(step * scale)
        scale *= 10


# One list for all models: a hash in Redis can't change its buckets with a model's context.
_TOKENS = buckets_1_2_5(1_000_000)
_FAST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_WHOLE = (1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
_SMALL = (1.0, 2.0, 5.0, 10.0, 20.0)

HISTOGRAMS = {
    "time_to_first_token_seconds": HistogramDef("Time to first token in seconds.", _FAST),
    "time_per_output_token_seconds": HistogramDef("Time per output token in seconds.", _PER_TOKEN),
    "e2e_request_latency_seconds": HistogramDef("End to end request latency in seconds.", _WHOLE),
    "request_prompt_tokens": HistogramDef("Number of prefill tokens processed.", _TOKENS),
    "request_generation_tokens": HistogramDef("Number of generation tokens processed.", _TOKENS),
    "request_params_best_of": HistogramDef("The best_of request parameter.", _SMALL),
    "request_params_n": HistogramDef("The n request parameter.", _SMALL),
}

#: Counters by model and one more label.
COUNTERS = {
    "request_success": ("finished_reason", "Count of successfully processed requests."),
    "request_failure": ("reason", "Count of requests that ended early: aborted or failed."),
}
