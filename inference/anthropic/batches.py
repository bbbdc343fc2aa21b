"""`/v1/messages/batches`: Anthropic's batches, run as all others are.

The requests are a file of the tenant's, a line each, like any batch's; so are the results.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable, Iterator
from datetime import datetime
from itertools import islice
from typing import Any

import msgspec
from django.http import StreamingHttpResponse
from django.http.response import HttpResponseBase

from engine.contract.errors import InvalidRequest
from inference.anthropic.batch_body import OneRequest, mapped, requests_in
from inference.anthropic.batch_results import result_lines
from inference.anthropic.views import AnthropicView
from inference.files.views import ApplicationBinaryRenderer
from inference.settings import gateway_settings
from inference.web.body import BODY
from inference.web.negotiation import (
    JSON_ONLY,
    EventStreamRenderer,
    check_content_encoding,
    check_content_type,
)
from inference.web.paging import paging
from inference.web.report_threads import in_report_thread
from inference.web.views import LIST_COST, GatewayRequest, json_response
from inference.work.queue import enqueue
from storage.access import (
    MESSAGES,
    Batch,
    BatchStatus,
    access_batch,
    access_batches,
    page,
)
from storage.actions import cancel_batch, create_message_batch, delete_batch
from storage.errors import NotFound
from tenants.db_threads import in_db_thread, in_file_thread

_encode = msgspec.json.Encoder().encode
#: How long a batch may run, as Anthropic has it.
WINDOW_S = 24 * 3600
#: Lines of results that are written at a time.
LINES = 256
NOTHING_YET = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
ENDED = (BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)


def batch_object(row: Batch) -> dict[str, Any]:
    """Anthropic's `message_batch`."""
    status = "canceling" if row.status == BatchStatus.CANCELLING else "in_progress"
    ended = row.status in ENDED
    ends = (row.completed_at, row.failed_at, row.expired_at, row.cancelled_at)
    return {
        "id": row.public_id,
        "type": "message_batch",
        "processing_status": "ended" if ended else status,
        "request_counts": _counts(row) if ended else {**NOTHING_YET, "processing": row.total},
        "created_at": _moment(row.created_at),
        "expires_at": _moment(row.expires_at),
        "ended_at": next(filter(None, map(_moment, ends)), None),
        "cancel_initiated_at": _moment(row.cancelling_at),
        "archived_at": None,
        "results_url": f"/v1/messages/batches/{row.public_id}/results" if ended else None,
    }


def _counts(row: Batch) -> dict[str, int]:
    """What became of the requests. Those that never ran share the batch's end."""
    never = row.total - row.completed - row.failed
    counts = {**NOTHING_YET, "succeeded": row.completed, "expired": row.expired}
    counts["errored"] = row.failed - row.expired
    kind = {BatchStatus.CANCELLED: "canceled", BatchStatus.EXPIRED: "expired"}
    counts[kind.get(BatchStatus(row.status), "errored")] += never
    return counts


def _moment(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat().replace("+00:00", "Z")


class MessageBatchesView(AnthropicView):
    """Create a batch, list batches."""

    call_cost = LIST_COST
    reads_body_itself = True

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """A new batch; a worker runs it."""
        check_content_type(request.content_type or "")
        check_content_encoding(request.META.get("HTTP_CONTENT_ENCODING"))
        row = await in_file_thread(_create, request)
        await enqueue("batch", row.public_id)
        return json_response(_encode(batch_object(row)))

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """The tenant's batches, the newest first."""
        limit = paging(request, default=20, most=1000).limit
        before, after = request.GET.get("before_id") or None, request.GET.get("after_id") or None
        if before and after:
            raise InvalidRequest(
                "before_id and after_id can't be used together.", param="before_id"
            )

        def listed() -> bytes:
            rows = access_batches(request.caller).filter(endpoint=MESSAGES)
            # Those before the page are newer: the nearest of them, shown like all others.
            newest = before is None
            got, more = page(rows, limit=limit, after=after or before, newest_first=newest)
            data = [batch_object(row) for row in (got if newest else got[::-1])]
            ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
            return _encode(
                {"data": data, "has_more": more, "first_id": None, "last_id": None, **ends}
            )

        return json_response(await in_report_thread(request.caller, listed))


def _create(request: GatewayRequest) -> Batch:
    body = request.scope[BODY]
    lines = _lines(requests_in(mapped(body)))
    size = body.tell()
    return create_message_batch(caller=request.caller, lines=lines, size=size, window_s=WINDOW_S)


def _lines(requests: Iterable[OneRequest]) -> Iterator[bytes]:
    """A line for each; what would fail in every case is refused first."""
    most = gateway_settings().max_batch_requests
    seen: set[str] = set()
    for place, each in enumerate(requests):
        if place >= most:
            raise InvalidRequest(f"A batch may hold at most {most} requests.", param="requests")
        if each.custom_id in seen:
            raise InvalidRequest(
                f"The custom_id {each.custom_id!r} occurs twice.",
                param=f"requests.{place}.custom_id",
            )
        seen.add(each.custom_id)
        if each.params.get("stream"):
            raise InvalidRequest(
                "Requests of a batch can't be streamed.", param=f"requests.{place}.params.stream"
            )
        yield _line(each)


def _line(each: OneRequest) -> bytes:
    whole = {"custom_id": each.custom_id, "method": "POST", "url": MESSAGES, "body": each.params}
    return json.dumps(whole).encode() + b"\n"


def _own(request: GatewayRequest, batch_id: str) -> Batch:
    """The batch, if it's one of messages. Raises `NotFound`."""
    row = access_batch(request.caller, batch_id)
    if row.endpoint != MESSAGES:
        raise NotFound(f"No such batch: {batch_id[:80]!r}.", param="message_batch_id")
    return row


class MessageBatchView(AnthropicView):
    """One batch."""

    async def get(self, request: GatewayRequest, batch_id: str) -> HttpResponseBase:
        """A batch's progress."""
        row = await in_db_thread(_own, request, batch_id)
        return json_response(_encode(batch_object(row)))

    async def delete(self, request: GatewayRequest, batch_id: str) -> HttpResponseBase:
        """Forget it with its requests and results, once it has ended."""
        await in_db_thread(_own, request, batch_id)
        await in_db_thread(delete_batch, caller=request.caller, public_id=batch_id)
        return json_response(_encode({"id": batch_id, "type": "message_batch_deleted"}))


class MessageBatchCancelView(AnthropicView):
    """The end of a batch."""

    async def post(self, request: GatewayRequest, batch_id: str) -> HttpResponseBase:
        """Stop it: what is done is in its results."""
        found = await in_db_thread(_own, request, batch_id)
        if found.status in ENDED:
            return json_response(_encode(batch_object(found)))
        row = await in_db_thread(cancel_batch, caller=request.caller, public_id=batch_id)
        await enqueue("batch", row.public_id)
        return json_response(_encode(batch_object(row)))


class JsonLinesRenderer(EventStreamRenderer):
    """A result a line."""

    media_type = "application/x-jsonl"
    format = "jsonl"


class MessageBatchResultsView(AnthropicView):
    """What became of a batch's requests."""

    renderer_classes = (JsonLinesRenderer, ApplicationBinaryRenderer, *JSON_ONLY)

    async def get(self, request: GatewayRequest, batch_id: str) -> HttpResponseBase:
        """A line for each."""
        row = await in_db_thread(_own, request, batch_id)
        if row.status not in ENDED:
            raise InvalidRequest("The batch has not ended; there are no results yet.")
        response = StreamingHttpResponse(_chunks(row), content_type="application/x-jsonl")
        response["X-Content-Type-Options"] = "nosniff"
        return response


async def _chunks(row: Batch) -> AsyncGenerator[bytes, None]:
    lines = result_lines(row)
    while chunk := await asyncio.to_thread(lambda: b"".join(islice(lines, LINES))):
        yield chunk
