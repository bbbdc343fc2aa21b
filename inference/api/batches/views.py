"""`/v1/batches`: create, list, retrieve, cancel."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
from django.http.response import HttpResponseBase

from common.db import run_in_db_thread
from inference.api.batches.dispatch import check_endpoint
from inference.loop.offload import in_report_thread
from inference.schemas import objects
from inference.schemas.base import BatchRequest
from inference.serving.respond import usage_object
from inference.web.endpoint_schema import IDEMPOTENCY_KEY, PAGE_PARAMETERS, Endpoint, EndpointSchema
from inference.web.responses import list_response, parse_page_query
from inference.web.views import LIST_COST, GatewayRequest, GatewayView, json_response
from inference.work import enqueue_job
from storage.access import MESSAGES, Batch, access_batch, access_batches, page
from storage.actions import cancel_batch, create_batch

_encode = msgspec.json.Encoder().encode
#: Timestamps that the object has under their column's name.
MOMENTS = (
    "created_at",
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


def batch_object(row: Batch) -> dict[str, Any]:
    """OpenAI's `batch` object."""
    body: dict[str, Any] = {
        "id": row.public_id,
        "object": "batch",
        "endpoint": row.endpoint,
        "errors": {"object": "list", "data": row.errors} if row.errors else None,
        "input_file_id": row.input_file_id,
        "completion_window": row.completion_window,
        "status": row.status,
        "output_file_id": row.output_file.public_id if row.output_file else None,
        "error_file_id": row.error_file.public_id if row.error_file else None,
        "request_counts": {
            "total": row.total,
            "completed": row.completed,
            "failed": row.failed,
        },
        "metadata": row.metadata,
    }
    for name in MOMENTS:
        moment: datetime | None = getattr(row, name)
        body[name] = int(moment.timestamp()) if moment else None
    if row.usage:
        body["usage"] = usage_object(row.usage)
    return body


class BatchesView(GatewayView):
    schema = EndpointSchema(
        "Batches",
        get=Endpoint(
            "List batches",
            objects.BatchPage,
            parameters=PAGE_PARAMETERS[:2],
            operation_id="v1_batches_list",
        ),
        post=Endpoint(
            "Start a batch", objects.BatchObject, BatchRequest, parameters=(IDEMPOTENCY_KEY,)
        ),
    )
    call_cost = LIST_COST

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """A new batch; a worker checks its file and runs it."""
        parsed = BatchRequest.model_validate(self.read_json(request))
        check_endpoint(parsed.endpoint)
        expires = parsed.output_expires_after
        row = await run_in_db_thread(
            create_batch,
            caller=request.caller,
            input_file_id=parsed.input_file_id,
            endpoint=parsed.endpoint,
            completion_window=parsed.completion_window,
            window_s=parsed.window_s,
            metadata=parsed.metadata or {},
            output_lifetime_s=expires.seconds if expires else None,
        )
        await enqueue_job("batch", row.public_id)
        return json_response(batch_object(row))

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """The tenant's batches, newest first."""
        page_query = parse_page_query(request, default=20, max_limit=100, orders=("desc",))

        def listed() -> bytes:
            # Batches of messages are listed by their own endpoint.
            rows = access_batches(request.caller).exclude(endpoint=MESSAGES)
            page_rows, more = page(rows, limit=page_query.limit, after=page_query.after)
            return _encode(list_response(page_rows, more, batch_object))

        return json_response(await in_report_thread(request.caller, listed))


class BatchView(GatewayView):
    schema = EndpointSchema("Batches", get=Endpoint("Read a batch's progress", objects.BatchObject))

    async def get(self, request: GatewayRequest, batch_id: str) -> HttpResponseBase:
        """A batch's progress."""
        row = await run_in_db_thread(access_batch, request.caller, batch_id)
        return json_response(batch_object(row))


class BatchCancelView(GatewayView):
    schema = EndpointSchema("Batches", post=Endpoint("Cancel a batch", objects.BatchObject))

    async def post(self, request: GatewayRequest, batch_id: str) -> HttpResponseBase:
        """Cancel it: finished results are in its files."""
        row = await run_in_db_thread(cancel_batch, caller=request.caller, public_id=batch_id)
        await enqueue_job("batch", row.public_id)
        return json_response(batch_object(row))
