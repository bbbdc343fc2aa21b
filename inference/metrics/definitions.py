"""Metrics of gateways: names, help texts, labels and buckets; vLLM's where vLLM has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.contract.metrics import (
    INTER_TOKEN_LATENCY,
    REQUEST_LATENCY,
    REQUEST_TOKENS,
    SMALL_NUMBERS,
    TIME_TO_FIRST_TOKEN,
)


def cumulative(bounds: tuple[float, ...], counts: Sequence[float]) -> list[tuple[str, float]]:
    """(upper bound, count up to it). `counts`: by bucket, one more than bounds."""
    buckets, total = [], 0.0
    for bound, count in zip((*map(str, bounds), "+Inf"), counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets


PREFIX = "vllm:"
TENANT = "tenant"
ENGINE = "engine"
#: Label for tenants beyond the limit, and for unknown values.
OTHER, NONE = "other", "none"


@dataclass(frozen=True)
class Family:
    """A metric.

    Attributes:
        kind: "counter", "histogram", or "summary" with only a count and a sum.
        labels: label names, in order.
        buckets: upper bounds of a histogram, ascending; +Inf is implied.
    """

    kind: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


#: `engine` is the last replica that served a request, "" for none.
_MODEL = ("model_name", ENGINE)
_BY_TENANT = (TENANT, "model_name")


def _histogram(text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = _MODEL) -> Family:
    return Family("histogram", text, labels, buckets)


_VLLM = {
    "time_to_first_token_seconds": _histogram(
        "Seconds from a request's arrival to its first token.", TIME_TO_FIRST_TOKEN
    ),
    "inter_token_latency_seconds": _histogram(
        "Seconds between two tokens of an output.", INTER_TOKEN_LATENCY
    ),
    "time_per_output_token_seconds": _histogram(
        "The older name of vllm:inter_token_latency_seconds.", INTER_TOKEN_LATENCY
    ),
    "request_time_per_output_token_seconds": _histogram(
        "Seconds a token of a request after its first one, on average.", INTER_TOKEN_LATENCY
    ),
    "e2e_request_latency_seconds": _histogram(
        "Seconds from a request's arrival to its end.", REQUEST_LATENCY
    ),
    "request_prompt_tokens": _histogram("Tokens of a request's prompts.", REQUEST_TOKENS),
    "request_generation_tokens": _histogram(
        "Tokens generated for a request, over all outputs.", REQUEST_TOKENS
    ),
    "request_max_num_generation_tokens": _histogram(
        "Tokens of a request's longest output.", REQUEST_TOKENS
    ),
    "request_params_n": _histogram("The n of requests.", SMALL_NUMBERS),
    "request_params_best_of": _histogram("The best_of of requests.", SMALL_NUMBERS),
    "request_params_max_tokens": _histogram("The max_tokens of requests.", REQUEST_TOKENS),
    "request_success": Family(
        "counter", "Requests that finished, by reason.", (*_MODEL, "finished_reason")
    ),
    "request_failure": Family(
        "counter", "Requests that ended early: aborted, refused or failed.", (*_MODEL, "reason")
    ),
    "tool_call_parser_invocations": Family(
        "counter",
        "Outputs parsed for tool calls, by whether there was one.",
        ("model_name", "mode", "outcome", "request_type"),
    ),
    "admission_rejections": Family(
        "counter", "Requests refused because too many waited.", ("model_name", "reason")
    ),
}
_TENANTS = {
    "quire:tenant_requests": Family(
        "counter", "A tenant's requests, by how they ended.", (*_BY_TENANT, "finished_reason")
    ),
    "quire:tenant_refusals": Family(
        "counter", "A tenant's requests that limits and budgets refused.", (*_BY_TENANT, "code")
    ),
    "quire:tenant_prompt_tokens": Family("counter", "A tenant's prompt tokens.", _BY_TENANT),
    "quire:tenant_cached_tokens": Family(
        "counter", "Those of them that were found in the prefix cache.", _BY_TENANT
    ),
    "quire:tenant_generation_tokens": Family(
        "counter", "Tokens generated for a tenant.", _BY_TENANT
    ),
    "quire:tenant_time_to_first_token_seconds": _histogram(
        "Seconds from the arrival of a tenant's request to its first token.",
        (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0),
        _BY_TENANT,
    ),
}
#: Metrics of the API; the pages' are django-prometheus's. `handler` is the path's pattern.
_HTTP = {
    "http_requests": Family("counter", "Requests to the API.", ("handler", "method", "status")),
    "http_request_duration_seconds": _histogram(
        "Seconds to a response's end.", (0.1, 0.5, 1.0), ("handler", "method")
    ),
    "http_request_duration_highr_seconds": _histogram(
        "Seconds to a response's end, in many buckets.",
        (
            *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0),
            *(4.5, 5.0, 7.5, 10.0, 30.0, 60.0),
        ),
        (),
    ),
    "http_request_size_bytes": Family("summary", "Bytes of requests' bodies.", ("handler",)),
    "http_response_size_bytes": Family("summary", "Bytes of responses' bodies.", ("handler",)),
}

_TASKS = {
    "quire_tasks": Family(
        "counter", "Tasks of workers that ended, by Celery's state.", ("task", "state")
    ),
    "quire_task_seconds": _histogram(
        "Seconds that tasks of workers took.",
        (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0),
        ("task",),
    ),
}

FAMILIES = {PREFIX + name: family for name, family in _VLLM.items()} | _TENANTS | _HTTP | _TASKS
