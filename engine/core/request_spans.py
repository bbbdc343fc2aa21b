"""A span for each request that the engine ends, by OpenTelemetry's conventions for gen_ai."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from engine.contract.config import EngineConfig
from engine.contract.protocol import WARM_UP, EngineRequest
from engine.contract.tracing import Tracing, context_of
from engine.scheduler import Request

_NS = 1_000_000_000


class RequestSpans:
    """Makes spans named `llm_request`, as vLLM does, below the gateway's. Never holds a prompt."""

    def __init__(self, tracing: Tracing, model: str) -> None:
        self._tracing, self._model = tracing, model

    def ended(self, request: Request) -> None:
        """The request's last output has ended now. The engine's own warm-up is nobody's."""
        from opentelemetry.trace import SpanKind, StatusCode

        if request.message.request_id == WARM_UP:
            return

        now = time.time()
        span = self._tracing.tracer.start_span(
            "llm_request",
            context=context_of(request.message.trace_headers),
            kind=SpanKind.SERVER,
            start_time=int(request.arrived_at * _NS),
            attributes=_asked(request.message, self._model) | _happened(request, now),
        )
        if any(each.finish_reason == "error" for each in request.sequences):
            span.set_status(StatusCode.ERROR)
        span.end(int(now * _NS))

    def close(self) -> None:
        """Send what is left."""
        self._tracing.close()


def spans_of(config: EngineConfig) -> RequestSpans | None:
    """What records requests' spans, where the settings want any."""
    if config.otlp_traces_endpoint is None:
        return None
    instance = f"{socket.gethostname()}-{os.getpid()}"
    return RequestSpans(Tracing(config.otlp_traces_endpoint, "quire-engine", instance), config.name)


def _asked(message: EngineRequest, model: str) -> dict[str, Any]:
    """What the request wanted."""
    params = message.sampling
    found = {
        "gen_ai.operation.name": "text_completion" if message.pooling is None else "embeddings",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.id": message.request_id,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
    }
    if message.pooling is not None:
        return found
    return found | {
        "gen_ai.request.n": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        **({} if params.max_tokens is None else {"gen_ai.request.max_tokens": params.max_tokens}),
    }


def _happened(request: Request, now: float) -> dict[str, Any]:
    """What became of it. Tokens under the names of today and of before."""
    sequences = request.sequences[: request.message.sampling.num_sequences]
    first = sequences[0]
    flight = first.flight
    prompt = first.num_prompt_tokens
    output = sum(sequence.num_output_tokens for sequence in sequences)
    found = {
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": output,
        "gen_ai.usage.prompt_tokens": prompt,
        "gen_ai.usage.completion_tokens": output,
        "gen_ai.usage.num_sequences": len(sequences),
        "gen_ai.usage.cache_read.input_tokens": first.num_cached_tokens,
        "gen_ai.response.finish_reasons": [each.finish_reason or "" for each in sequences],
        "gen_ai.latency.e2e": now - request.arrived_at,
        "gen_ai.latency.time_in_queue": flight.queue_time,
        "gen_ai.latency.time_in_model_prefill": flight.prefill_time,
        "gen_ai.latency.time_in_model_decode": flight.decode_time,
        "gen_ai.latency.time_in_model_inference": flight.prefill_time + flight.decode_time,
        "quire.num_preemptions": sum(sequence.flight.num_preemptions for sequence in sequences),
        "quire.num_steps": flight.num_steps,
    }
    if first.first_token_at:
        waited = first.first_token_at - request.arrived_at
        found["gen_ai.latency.time_to_first_token"] = waited
    return found
