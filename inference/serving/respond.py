"""Steps shared by generating endpoints: parsing, headers, waiting for a stream's first token."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import msgspec
from django.conf import settings
from django.http.response import HttpResponseBase

from common.db import run_in_db_thread
from engine.contract.errors import QuireError
from inference.engine_client.client import get_engine_client
from inference.engine_client.fleet import Replica
from inference.engine_client.queue_limit import Load
from inference.errors import as_quire_error, report
from inference.loop.fair_dispatch import run_in_thread_if_many
from inference.request.context import RequestContext
from inference.request.job import Job
from inference.schemas.base import FailFastModel, RejectedRequest
from inference.serving.stream import EventWriter, with_event_ids
from inference.web.authentication import has_monitoring_access
from inference.web.responses import EventStreamResponse, LastChunk
from inference.web.views import GatewayRequest, json_response
from metering.access import Admission, rate_limit_headers
from storage.ownership import check_storage_quota, is_usage_cached
from tenants.authentication import Caller

_encode = msgspec.json.Encoder().encode

REQUEST_HEADER = "HTTP_ENDPOINT_LOAD_METRICS_FORMAT"


async def add_orca_header(request: GatewayRequest, response: HttpResponseBase, model: str) -> None:
    """Add a load report's header to a complete response, if the client asked for it and may read
    `/metrics`, because load includes all tenants. Unknown formats are ignored.

    https://github.com/cncf/xds/blob/main/xds/data/orca/v3/orca_load_report.proto
    """
    form = request.META.get(REQUEST_HEADER, "").upper()
    if (
        form not in ("TEXT", "JSON")
        or response.streaming
        or not await has_monitoring_access(request)
    ):
        return
    report = load_report(form, get_engine_client().fleet.of_model(model))
    response["endpoint-load-metrics"] = report


def load_report(form: str, replicas: Iterable[Replica]) -> str:
    """The header's value for a model's replicas, in the format "TEXT" or "JSON"."""
    ready = [replica for replica in replicas if replica.ready]
    usage = sum(replica.heartbeat.stats.kv_cache_usage_perc for replica in ready)
    figures = {
        "kv_cache_usage_perc": usage / len(ready) if ready else 0.0,
        "num_requests_waiting": float(Load.of(ready).waiting),
    }
    if form == "JSON":
        return f"JSON {msgspec.json.encode({'named_metrics': figures}).decode()}"
    return f"TEXT {', '.join(f'named_metrics.{name}={value}' for name, value in figures.items())}"


def usage_object(counts: dict[str, int]) -> dict[str, Any]:
    """Token counts as the Responses API names them, which OpenAI's batches use too."""
    return {
        "input_tokens": counts.get("input", 0),
        "input_tokens_details": {"cached_tokens": counts.get("cached", 0)},
        "output_tokens": counts.get("output", 0),
        "output_tokens_details": {"reasoning_tokens": counts.get("reasoning", 0)},
        "total_tokens": counts.get("input", 0) + counts.get("output", 0),
    }


MAX_IGNORED_CHARS = 1024

R = TypeVar("R", bound=FailFastModel)
N = TypeVar("N")
N_co = TypeVar("N_co", covariant=True)
N_contra = TypeVar("N_contra", contravariant=True)


def parse(schema: type[R], body: dict[str, Any]) -> R:
    """The body as a checked request.

    Raises:
        InvalidRequest, pydantic.ValidationError: both become 400 with the field's name.
    """
    try:
        return schema.model_validate(body)
    except RejectedRequest as refusal:
        raise refusal.error from None


async def parse_offloaded(ctx: RequestContext, schema: type[R], body: dict[str, Any]) -> R:
    """Parse in a thread if the body is large, so that it doesn't hold up other requests."""
    return await ctx.offload(parse, schema, body)


class AdmittedRequest(Protocol):
    """Admitted request."""

    @property
    def job(self) -> Job:
        """Job of the generation."""

    @property
    def admission(self) -> Admission:
        """Result of admission."""


class OutputStream(AdmittedRequest, Protocol[N_co]):
    """Running output: a `Generation`, which yields increments, or a `ChatSession`, which yields
    deltas.
    """

    @property
    def finished(self) -> bool:
        """Whether every output has ended."""

    async def next(self, wait_s: float | None = None) -> Sequence[N_co]:
        """Return new deltas; [] after `wait_s` seconds without any."""

    def release(self) -> None:
        """Abort what still runs and settle the usage, once. Callable from any thread."""


class ResponseBuilder(Protocol[N_contra]):
    """Collects the complete response of one endpoint."""

    def append(self, deltas: N_contra) -> None:
        """Add new deltas."""

    def body(self) -> dict[str, Any]:
        """The response body, once the output has ended."""


async def respond(
    source: OutputStream[N],
    ignored: list[str],
    *,
    writer: Callable[[], EventWriter[N]],
    answer: Callable[[], ResponseBuilder[N]],
) -> HttpResponseBase:
    """Respond with a running output, as a stream or as a whole, as its client requested.

    Raises: errors of the engine or the gateway before the first byte. The source is released in
    any case.
    """
    response: HttpResponseBase
    try:
        if source.job.stream:
            response = await stream_response(source, writer())
        else:
            builder = answer()
            await collect(source, builder.append)
            outputs = len(source.job.prompts) * source.job.sampling.num_sequences
            body = await run_in_thread_if_many(outputs, lambda: _encode(builder.body()))
            response = json_response(body)
    except BaseException:
        source.release()
        raise
    add_headers(response, source, ignored)
    return response


async def stream_response(source: OutputStream[N], writer: EventWriter[N]) -> EventStreamResponse:
    """A response that streams a running output.

    Waits a limited time for the first delta: until then errors are HTTP errors.
    """
    first = await source.next(settings.QUIRE.stream_start_wait_s)
    events = stream_events(source, writer, first)
    return EventStreamResponse(events, source.release, writer.content_type)


async def stream_events(
    source: OutputStream[N], writer: EventWriter[N], deltas: Sequence[N]
) -> AsyncGenerator[bytes, None]:
    """The events of a stream, beginning with deltas that have arrived already."""
    writer = with_event_ids(source, writer)
    heartbeat_s = settings.QUIRE.sse_heartbeat_s or None
    written_at = time.monotonic()
    try:
        chunk = writer.start() + writer.write(deltas)
        while not source.finished:
            if chunk:
                yield chunk
                written_at = time.monotonic()
            deltas = await source.next(heartbeat_s)
            chunk = writer.write(deltas) if deltas else b""
            # Tokens may arrive without visible text: parts of a character or of a stop string.
            if not chunk and heartbeat_s and time.monotonic() - written_at >= heartbeat_s:
                chunk = writer.heartbeat
        yield LastChunk(chunk + writer.finish())
    except Exception as error:
        # The status line was sent before: the error is the stream's last event, without a [DONE].
        report(error, source.job.request_id)
        yield LastChunk(writer.error(as_quire_error(error)))
    finally:
        source.release()


async def collect(source: OutputStream[N], append: Callable[[N], None]) -> None:
    """Read the output to its end."""
    while not source.finished:
        for news in await source.next():
            append(news)


def add_headers(response: HttpResponseBase, source: AdmittedRequest, ignored: list[str]) -> None:
    """Add OpenAI's `x-ratelimit-*`, the digest of the adapter that responds, the model that a
    fallback replaces, and the fields that were ignored.
    """
    for name, value in rate_limit_headers(source.admission).items():
        response[name] = value
    if (adapter := source.job.model.adapter) is not None:
        response["x-quire-adapter"] = adapter.digest
    if source.job.model.fallback_for:
        response["x-quire-in-place-of"] = source.job.model.fallback_for
    set_ignored_fields_header(response, ignored)


def json_answer(body: Any, ignored: list[str]) -> HttpResponseBase:
    """JSON for a request of which the fields `ignored` are unknown."""
    response = json_response(body)
    set_ignored_fields_header(response, ignored)
    return response


def set_ignored_fields_header(response: HttpResponseBase, ignored: list[str]) -> None:
    """Set `x-quire-ignored-fields`: the unknown fields that were ignored."""
    if ignored:
        names = ", ".join(name.encode("ascii", "backslashreplace").decode() for name in ignored)
        safe = "".join(char if char.isprintable() else "?" for char in names)
        response["x-quire-ignored-fields"] = safe[:MAX_IGNORED_CHARS]


async def check_response_quota(caller: Caller) -> None:
    """Raise `StorageFull` (413) if the tenant has no space left for a response."""
    if not is_usage_cached(caller.tenant_id):
        await run_in_db_thread(check_storage_quota, caller.tenant_id)


class StoredEventWriter(Protocol):
    """A stream writer that has the complete response in the end."""

    @property
    def final(self) -> dict[str, Any] | None:
        """The response, once its last event is written."""

    def error(self, error: QuireError) -> bytes:
        """The stream's last event after an error."""


async def store_before_last_event(
    source: OutputStream[N],
    writer: EventWriter[N],
    news: Sequence[N],
    answer: StoredEventWriter,
    keep: Callable[[dict[str, Any]], Awaitable[None]],
) -> AsyncGenerator[bytes, None]:
    """`stream_events` that calls `keep` before the last event; ends with an error if it fails."""
    async with aclosing(stream_events(source, writer, news)) as events:
        async for chunk in events:
            if answer.final is not None:
                try:
                    await keep(answer.final)
                except Exception as error:
                    report(error, source.job.request_id)
                    yield answer.error(as_quire_error(error))
                    return
            yield chunk
