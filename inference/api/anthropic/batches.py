"""`/v1/messages/batches`: Anthropic's batches, run like all others.

Like those of any batch, the requests are stored as a file of the tenant, one per line, and so are
the results.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import re
from collections.abc import AsyncGenerator, Iterable, Iterator
from datetime import datetime
from itertools import islice
from typing import IO, Annotated, Any

import msgspec
from django.conf import settings
from django.http import StreamingHttpResponse
from django.http.response import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter
from pydantic import Field, StringConstraints, ValidationError

from common.db import run_in_db_thread, run_in_file_thread
from common.errors import NotFound
from engine.contract.errors import InvalidRequest
from inference.api.anthropic.views import AnthropicView
from inference.errors import PayloadTooLarge, describe_validation_error
from inference.loop.offload import in_report_thread
from inference.schemas import objects
from inference.schemas.base import StrictModel
from inference.web.endpoint_schema import IDEMPOTENCY_KEY, Endpoint, EndpointSchema
from inference.web.json_body import check_content_encoding, check_content_type, parse_object
from inference.web.responses import (
    JSON_ONLY,
    ApplicationBinaryRenderer,
    EventStreamRenderer,
    parse_page_query,
)
from inference.web.views import BODY, LIST_COST, GatewayRequest, json_response
from inference.work import enqueue_job
from storage.access import (
    MESSAGES,
    Batch,
    BatchStatus,
    access_batch,
    access_batches,
    open_blob,
    page,
)
from storage.actions import cancel_batch, create_message_batch, delete_batch

_encode = msgspec.json.Encoder().encode

#: Anthropic accepts 256 MB in one JSON object. Here it stays in a file on disk, of which only one
#: request at a time is in memory.
Bytes = bytes | mmap.mmap

#: A body up to this size is read instead of mapped.
SMALL_BYTES = 1 << 20
_HEAD = re.compile(rb'(?:\xef\xbb\xbf)?\s*\{\s*"requests"\s*:\s*\[\s*(?=\{)')
#: A string, a bracket, or the start of an unterminated string.
_MARK = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["{}\[\]]', re.DOTALL)
_NEXT = re.compile(rb"\s*,\s*(?=\{)")
_END = re.compile(rb"\s*\]\s*\}\s*\Z")
_OPENING, _CLOSING = frozenset(b"{["), frozenset(b"}]")


class BatchItem(StrictModel):
    """A message to generate. `params`: the body of `/v1/messages`."""

    custom_id: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    params: dict[str, Any]


class BatchOfMessages(StrictModel):
    """A batch."""

    requests: Annotated[list[BatchItem], Field(min_length=1)]


def mmap_body(file: IO[bytes]) -> Bytes:
    """A body's bytes; those of a large one stay on disk."""
    if file.seek(0, 2) > SMALL_BYTES:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    file.seek(0)
    return file.read()


def iter_requests(data: Bytes) -> Iterator[BatchItem]:
    """The requests in order.

    Raises: `InvalidRequest` naming the error in the body or in one of its requests;
    `PayloadTooLarge` for a request that is larger than a single body may be.
    """
    head = _HEAD.match(data)
    if head is None:
        raise _refusal(data)
    index, number = head.end(), 0
    while True:
        end = _find_object_end(data, index, number)
        yield _request(data[index:end], number)
        following = _NEXT.match(data, end)
        if following is None:
            break
        index, number = following.end(), number + 1
    if _END.match(data, end) is None:
        raise _refusal(data)


def _find_object_end(data: Bytes, start: int, number: int) -> int:
    """The position after the object that begins at `start`."""
    max_bytes, depth = settings.QUIRE.max_body_bytes, 0
    for mark in _MARK.finditer(data, start, start + max_bytes):
        sign = data[mark.start()]
        if sign in _OPENING:
            depth += 1
        elif sign in _CLOSING:
            depth -= 1
            if depth == 0:
                return mark.end()
        elif mark.end() == mark.start() + 1:  # unterminated: searching on would be quadratic
            break
    if start + max_bytes < len(data):
        raise PayloadTooLarge(
            f"A request of a batch may have {max_bytes} bytes.", param=f"requests[{number}]"
        )
    raise _invalid_json()


def _request(text: bytes, number: int) -> BatchItem:
    parsed = parse_object(text)
    try:
        return BatchItem.model_validate(parsed)
    except ValidationError as error:
        description = describe_validation_error(error)
        description["param"] = f"requests[{number}].{description['param']}"
        raise InvalidRequest(**description) from None


def _refusal(data: Bytes) -> InvalidRequest:
    """Why this body is not a batch. Raises a more specific error if there is one."""
    if len(data) <= SMALL_BYTES:
        BatchOfMessages.model_validate(parse_object(bytes(data)))
    return _invalid_json()


def _invalid_json() -> InvalidRequest:
    return InvalidRequest(
        'The body must be {"requests": [...]}, each entry an object.',
        param="requests",
        code="invalid_json",
    )


ResultLine = dict[str, Any]
#: Result of a request that never ran, by the batch's end.
NOT_RUN_ERRORS = {BatchStatus.CANCELLED: "canceled", BatchStatus.EXPIRED: "expired"}


def result_lines(row: Batch) -> Iterator[bytes]:
    """Result lines as JSON, in the order in which requests ended. Blocks on the disk."""
    done: set[str] = set()
    for file in (row.output_file, row.error_file):
        if file is None:
            continue
        for line in _lines(row.tenant_id, file.public_id):
            done.add(line["custom_id"])
            yield _encoded(line["custom_id"], _result(line))
    if row.status == BatchStatus.COMPLETED:
        return
    for line in _lines(row.tenant_id, row.input_file_id):
        if line["custom_id"] not in done:
            yield _encoded(line["custom_id"], _not_run_result(row))


def _lines(tenant_id: int, public_id: str) -> Iterator[ResultLine]:
    try:
        with open_blob(tenant_id, public_id) as file:
            for raw in file:
                yield json.loads(raw)
    except FileNotFoundError:  # deleted meanwhile: return what is left
        return


def _encoded(custom_id: str, result: ResultLine) -> bytes:
    return json.dumps({"custom_id": custom_id, "result": result}).encode() + b"\n"


def _result(line: ResultLine) -> ResultLine:
    response = line["response"]
    if response is None:
        return {"type": "expired"}
    if response["status_code"] == 200:
        return {"type": "succeeded", "message": response["body"]}
    return {"type": "errored", "error": response["body"]}


def _not_run_result(row: Batch) -> ResultLine:
    """Result of a request that did not run: its batch ended early, or its key lost its rights."""
    kind = NOT_RUN_ERRORS.get(BatchStatus(row.status))
    if kind is not None:
        return {"type": kind}
    message = row.errors[0]["message"] if row.errors else "The batch failed."
    error = {"type": "permission_error", "message": message}
    return {"type": "errored", "error": {"type": "error", "error": error, "request_id": None}}


#: Maximum run time of a batch, as at Anthropic.
WINDOW_S = 24 * 3600
#: Number of result lines written at a time.
LINES = 256
NOTHING_YET = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
TERMINAL_STATUSES = (
    BatchStatus.COMPLETED,
    BatchStatus.FAILED,
    BatchStatus.EXPIRED,
    BatchStatus.CANCELLED,
)


def batch_object(row: Batch) -> dict[str, Any]:
    """Anthropic's `message_batch`."""
    status = "canceling" if row.status == BatchStatus.CANCELLING else "in_progress"
    is_finished = row.status in TERMINAL_STATUSES
    ends = (row.completed_at, row.failed_at, row.expired_at, row.cancelled_at)
    return {
        "id": row.public_id,
        "type": "message_batch",
        "processing_status": "ended" if is_finished else status,
        "request_counts": _counts(row) if is_finished else {**NOTHING_YET, "processing": row.total},
        "created_at": _moment(row.created_at),
        "expires_at": _moment(row.expires_at),
        "ended_at": next(filter(None, map(_moment, ends)), None),
        "cancel_initiated_at": _moment(row.cancelling_at),
        "archived_at": None,
        "results_url": f"/v1/messages/batches/{row.public_id}/results" if is_finished else None,
    }


def _counts(row: Batch) -> dict[str, int]:
    """Count the requests by result. Those that never ran count as the batch's own end."""
    never = row.total - row.completed - row.failed
    counts = {**NOTHING_YET, "succeeded": row.completed, "expired": row.expired}
    counts["errored"] = row.failed - row.expired
    kind = {BatchStatus.CANCELLED: "canceled", BatchStatus.EXPIRED: "expired"}
    counts[kind.get(BatchStatus(row.status), "errored")] += never
    return counts


def _moment(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat().replace("+00:00", "Z")


class MessageBatchesView(AnthropicView):
    schema = EndpointSchema(
        "Messages",
        get=Endpoint(
            "List batches of messages",
            objects.MessageBatchPage,
            parameters=(
                OpenApiParameter("limit", int, description="How many, up to 1000."),
                OpenApiParameter("before_id", str, description="The page before this batch."),
                OpenApiParameter("after_id", str, description="The page after this batch."),
            ),
            operation_id="v1_messages_batches_list",
        ),
        post=Endpoint(
            "Start a batch of messages",
            objects.MessageBatchObject,
            BatchOfMessages,
            parameters=(IDEMPOTENCY_KEY,),
        ),
    )
    call_cost = LIST_COST
    streams_request_body = True

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """A new batch, which a worker runs."""
        check_content_type(request.content_type or "")
        check_content_encoding(request.META.get("HTTP_CONTENT_ENCODING"))
        row = await run_in_file_thread(_create, request)
        await enqueue_job("batch", row.public_id)
        return json_response(batch_object(row))

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """The tenant's batches, newest first."""
        limit = parse_page_query(request, default=20, max_limit=1000).limit
        first_id = request.GET.get("before_id") or None
        last_id = request.GET.get("after_id") or None
        if first_id and last_id:
            raise InvalidRequest(
                "before_id and after_id can't be used together.", param="before_id"
            )

        def listed() -> bytes:
            rows = access_batches(request.caller).filter(endpoint=MESSAGES)
            # The previous page has newer batches: the nearest ones, in the usual order.
            newest = first_id is None
            got, more = page(rows, limit=limit, after=last_id or first_id, newest_first=newest)
            data = [batch_object(row) for row in (got if newest else got[::-1])]
            ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
            return _encode(
                {"data": data, "has_more": more, "first_id": None, "last_id": None, **ends}
            )

        return json_response(await in_report_thread(request.caller, listed))


def _create(request: GatewayRequest) -> Batch:
    body = request.scope[BODY]
    lines = _result_lines(iter_requests(mmap_body(body)))
    size = body.tell()
    return create_message_batch(caller=request.caller, lines=lines, size=size, window_s=WINDOW_S)


def _result_lines(requests: Iterable[BatchItem]) -> Iterator[bytes]:
    """A line per request; requests that would certainly fail are rejected first."""
    max_requests = settings.QUIRE.max_batch_requests
    seen: set[str] = set()
    for index, item in enumerate(requests):
        if index >= max_requests:
            raise InvalidRequest(
                f"A batch may hold at most {max_requests} requests.", param="requests"
            )
        if item.custom_id in seen:
            raise InvalidRequest(
                f"The custom_id {item.custom_id!r} occurs twice.",
                param=f"requests.{index}.custom_id",
            )
        seen.add(item.custom_id)
        if item.params.get("stream"):
            raise InvalidRequest(
                "Requests of a batch can't be streamed.", param=f"requests.{index}.params.stream"
            )
        yield _batch_line(item)


def _batch_line(item: BatchItem) -> bytes:
    line = {"custom_id": item.custom_id, "method": "POST", "url": MESSAGES, "body": item.params}
    return json.dumps(line).encode() + b"\n"


def _get_message_batch(request: GatewayRequest, batch_id: str) -> Batch:
    """The batch, if it is one of messages. Raises `NotFound`."""
    row = access_batch(request.caller, batch_id)
    if row.endpoint != MESSAGES:
        raise NotFound(f"No such batch: {batch_id[:80]!r}.", param="message_batch_id")
    return row


class MessageBatchView(AnthropicView):
    schema = EndpointSchema(
        "Messages",
        get=Endpoint("Read a batch's progress", objects.MessageBatchObject),
        delete=Endpoint(
            "Delete a batch",
            objects.DeletedMessageBatch,
            responses={409: objects.AnthropicErrorAnswer},
        ),
    )

    async def get(self, request: GatewayRequest, batch_id: str) -> HttpResponseBase:
        """A batch's progress."""
        row = await run_in_db_thread(_get_message_batch, request, batch_id)
        return json_response(batch_object(row))

    async def delete(self, request: GatewayRequest, batch_id: str) -> HttpResponseBase:
        """Delete an ended batch with its requests and results."""
        await run_in_db_thread(_get_message_batch, request, batch_id)
        await run_in_db_thread(delete_batch, caller=request.caller, public_id=batch_id)
        return json_response({"id": batch_id, "type": "message_batch_deleted"})


class MessageBatchCancelView(AnthropicView):
    schema = EndpointSchema("Messages", post=Endpoint("Cancel a batch", objects.MessageBatchObject))

    async def post(self, request: GatewayRequest, batch_id: str) -> HttpResponseBase:
        """Cancel it: finished results remain available."""
        batch = await run_in_db_thread(_get_message_batch, request, batch_id)
        if batch.status in TERMINAL_STATUSES:
            return json_response(batch_object(batch))
        row = await run_in_db_thread(cancel_batch, caller=request.caller, public_id=batch_id)
        await enqueue_job("batch", row.public_id)
        return json_response(batch_object(row))


class JsonLinesRenderer(EventStreamRenderer):
    """One result per line."""

    media_type = "application/x-jsonl"
    format = "jsonl"


class MessageBatchResultsView(AnthropicView):
    schema = EndpointSchema(
        "Messages",
        get=Endpoint(
            "Read a batch's results",
            OpenApiTypes.BINARY,
            media_types={"application/x-jsonl": OpenApiTypes.STR},
        ),
    )
    renderer_classes = (JsonLinesRenderer, ApplicationBinaryRenderer, *JSON_ONLY)

    async def get(self, request: GatewayRequest, batch_id: str) -> HttpResponseBase:
        """One line per request."""
        row = await run_in_db_thread(_get_message_batch, request, batch_id)
        if row.status not in TERMINAL_STATUSES:
            raise InvalidRequest("The batch has not ended; there are no results yet.")
        response = StreamingHttpResponse(_chunks(row), content_type="application/x-jsonl")
        response["X-Content-Type-Options"] = "nosniff"
        return response


async def _chunks(row: Batch) -> AsyncGenerator[bytes, None]:
    lines = result_lines(row)
    while chunk := await asyncio.to_thread(lambda: b"".join(islice(lines, LINES))):
        yield chunk
