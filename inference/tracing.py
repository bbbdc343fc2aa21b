"""Spans of the gateway: a request's, and its generations' below it; the engine's follow.

Without an endpoint OpenTelemetry isn't imported, and a request costs one comparison.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django.conf import settings

from common.redaction import without_tokens
from engine.contract.observability import Tracing, context_of, headers_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from engine.contract.sampling_params import SamplingParams
    from inference.request.job import Job, Usage

Scope = MutableMapping[str, Any]
_OPERATIONS = {
    "chat.completions": "chat",
    "responses": "chat",
    "messages": "chat",
    "completions": "text_completion",
}
#: `service.name` of this process's spans.
_service = ["quire-gateway"]


def set_service_name(service: str) -> None:
    """Name this process's service, before its first span."""
    _service[0] = service


@lru_cache(maxsize=1)
def tracing() -> Tracing | None:
    """Tracer of this process; None without an endpoint. Raises `ConfigError`."""
    endpoint = settings.QUIRE.otlp_traces_endpoint
    if not endpoint:
        return None
    return Tracing(endpoint, _service[0], f"{socket.gethostname()}-{os.getpid()}")


def close_tracing() -> None:
    """Send remaining spans, within seconds. Later spans start a new exporter."""
    current = tracing()
    tracing.cache_clear()
    if current is not None:
        current.close()


class RequestSpan:
    """The span of an HTTP request, current while it is being served.

    It continues the trace of the client's `traceparent`.
    """

    def __init__(self, current: Tracing, scope: Scope) -> None:
        from opentelemetry import context, trace

        headers = {
            name.decode("latin1"): value.decode("latin1")
            for name, value in scope["headers"]
            if name in (b"traceparent", b"tracestate")
        }
        self._span = current.tracer.start_span(
            scope["method"], context=context_of(headers), kind=trace.SpanKind.SERVER
        )
        client = scope.get("client") or ("",)
        self._span.set_attributes(
            {
                "http.request.method": scope["method"],
                "url.path": without_tokens(scope["path"]),
                "url.scheme": scope.get("scheme", "http"),
                "client.address": client[0],
            }
        )
        self._context = context
        self._token = context.attach(trace.set_span_in_context(self._span))

    @property
    def response_header(self) -> tuple[bytes, bytes]:
        """`traceresponse`: the request's place in the traces, for the client."""
        return b"traceresponse", headers_of(self._span)["traceparent"].encode()

    @property
    def trace_id(self) -> str:
        """The trace id, for log lines."""
        return f"{self._span.get_span_context().trace_id:032x}"

    def end(self, handler: str, status: int, tenant: str, request_id: str, error: str) -> None:
        """End the span with the response.

        Args:
            handler: the path's pattern, "" if there is none.
            request_id: the value of `x-request-id`. error: the code sent to the client, or "".
        """
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("http.response.status_code", status)
        self._span.set_attribute("quire.request_id", request_id)
        if error:
            self._span.set_attribute("error.type", error)
        if handler:
            self._span.update_name(f"{self._span.name} {handler}")  # type: ignore[attr-defined]
            self._span.set_attribute("http.route", handler)
        if tenant:
            self._span.set_attribute("quire.tenant", tenant)
        if status >= 500:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()
        self._context.detach(self._token)


def _sampling(params: SamplingParams) -> dict[str, Any]:
    return {
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
    }


class GenerationSpan:
    """The span of a job, from admission to its end."""

    def __init__(self, current: Tracing, job: Job) -> None:
        operation = "text_completion" if job.generates else "embeddings"
        operation = _OPERATIONS.get(job.endpoint, operation)
        model = job.model.name
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": job.request_id,
        }
        if job.generates:
            attributes |= _sampling(job.sampling)
        non_empty = {name: value for name, value in attributes.items() if value is not None}
        self._span: Span = current.tracer.start_span(f"{operation} {model}", attributes=non_empty)

    @property
    def headers(self) -> dict[str, str]:
        """Trace headers that make the engine's span a child of this one."""
        return headers_of(self._span)

    def end(
        self, usage: Usage, reasons: list[str], error: str | None, ttft_s: float | None
    ) -> None:
        """End the span with the job. `error`: the code of its error."""
        from opentelemetry.trace import StatusCode

        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "gen_ai.response.finish_reasons": reasons,
            }
        )
        if ttft_s is not None:
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", ttft_s)
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


def current_traceparent() -> str:
    """The `traceparent` of the current span; "" if there is none."""
    if tracing() is None:
        return ""
    from opentelemetry.trace import get_current_span

    return headers_of(get_current_span()).get("traceparent", "")


@contextmanager
def background_span(name: str, origin: str = "", **attributes: str) -> Iterator[Span | None]:
    """A span of background work: a line of a batch, a background response.

    It starts its own trace, linked to the span of `origin`, the `traceparent` of the request that
    enqueued the work. Spans within are its children. It records an exception that leaves it.
    """
    current = tracing()
    if current is None:
        yield None
        return
    from opentelemetry.trace import Link, SpanKind, get_current_span

    named = {f"quire.{key}": value for key, value in attributes.items()}
    asked = get_current_span(context_of({"traceparent": origin})).get_span_context()
    with current.tracer.start_as_current_span(
        name,
        kind=SpanKind.CONSUMER,
        attributes=named,
        links=[Link(asked)] if asked.is_valid else [],
        record_exception=False,
    ) as span:
        yield span


def set_span_result(span: Span | None, status: int, request_id: str, error: str) -> None:
    """Record the result of a batch's line. `error`: the code in its result, or ""."""
    if span is None:
        return
    from opentelemetry.trace import StatusCode

    span.set_attributes({"http.response.status_code": status, "quire.request_id": request_id})
    if error:
        span.set_attribute("error.type", error)
        span.set_status(StatusCode.ERROR)


def request_span(scope: Scope) -> RequestSpan | None:
    """Start a request's span if tracing is enabled."""
    current = tracing()
    return None if current is None else RequestSpan(current, scope)


def generation_span(job: Job) -> GenerationSpan | None:
    """Start a job's span if tracing is enabled."""
    current = tracing()
    return None if current is None else GenerationSpan(current, job)
