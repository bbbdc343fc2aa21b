"""`/v1/responses`: create, retrieve, delete, cancel, list the input."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import msgspec
from django.conf import settings
from django.http.response import HttpResponseBase
from drf_spectacular.utils import OpenApiParameter

from adapters.resolution import get_or_resolve_target
from common.db import run_in_db_thread
from common.errors import NotFound
from common.files import derived_id, new_id
from engine.contract.errors import InvalidRequest
from inference.api.responses.conversation import load_conversation
from inference.api.responses.conversion import (
    chat_from_responses,
    rename_to_responses_fields,
    to_stored_items,
    truncate_to_context,
    unsupported_fields,
)
from inference.api.responses.event_store import TERMINAL_EVENTS, ResponseEventStore, encode_event
from inference.api.responses.response import ResponseAnswer, ResponseStreamWriter, response_object
from inference.api.responses.schemas import ResponsesRequest
from inference.chat.job import prompt_token_ids
from inference.chat.turn import ChatSession
from inference.errors import UnsupportedField
from inference.generation.model_resolution import resolve_model
from inference.request.context import RequestContext
from inference.schemas import objects
from inference.schemas.base import RejectedRequest
from inference.serving.respond import (
    add_headers,
    check_response_quota,
    collect,
    json_answer,
    store_before_last_event,
    stream_events,
)
from inference.serving.stream import HEARTBEAT
from inference.web.endpoint_schema import IDEMPOTENCY_KEY, PAGE_PARAMETERS, Endpoint, EndpointSchema
from inference.web.responses import (
    JSON_OR_EVENTS,
    EventStreamResponse,
    paginate_items,
    parse_page_query,
)
from inference.web.views import GatewayRequest, GatewayView, json_response
from inference.work import enqueue_job
from storage.access import StoredResponse, access_response
from storage.actions import append_response_turn, cancel_response, delete_response, store_response
from tenants.authentication import Caller

#: Seconds between polls of Redis while events arrive, and while none do.
SOON_S, LATER_S = 0.05, 0.5
#: Seconds without an event after which the response's row is checked.
IDLE_TIMEOUT_S = 2.0
ACTIVE_STATUSES = frozenset({"queued", "in_progress"})


async def tail_response_events(
    caller: Caller, public_id: str, after: int
) -> AsyncGenerator[bytes, None]:
    """Events after number `after`, as they arrive, up to the last or to a cancellation."""
    store = ResponseEventStore(public_id)
    pause, heard, written = SOON_S, 0.0, time.monotonic()
    heartbeat_s = settings.QUIRE.sse_heartbeat_s
    while True:
        events = await store.read_after(after)
        now = time.monotonic()
        if events:
            yield b"".join(encode_event(n, msgspec.json.decode(data)) for n, _, data in events)
            if events[-1][1] in TERMINAL_EVENTS:
                return
            after, pause, heard, written = events[-1][0], SOON_S, now, now
            continue
        if now - heard >= IDLE_TIMEOUT_S:
            row = await _row(caller, public_id)
            if row is None or row.status not in ACTIVE_STATUSES:
                yield b"" if row is None else await _terminal_event(store, row, after)
                return
            heard = now
        if heartbeat_s and now - written >= heartbeat_s:
            yield HEARTBEAT
            written = now
        await asyncio.sleep(pause)
        pause = min(2 * pause, LATER_S)


async def _row(caller: Caller, public_id: str) -> StoredResponse | None:
    try:
        return await run_in_db_thread(access_response, caller, public_id)
    except NotFound:  # deleted, or expired
        return None


async def _terminal_event(store: ResponseEventStore, row: StoredResponse, after: int) -> bytes:
    """The last event, from the row: the other events have expired, or their writer is gone."""
    kind = f"response.{row.status}"
    terminal_kinds = [
        kind for _, kind, _ in await store.read_after(-1, None) if kind in TERMINAL_EVENTS
    ]
    if (
        kind not in TERMINAL_EVENTS or terminal_kinds
    ):  # cancelled; or the client has the last one already
        return b""
    return encode_event(after + 1, {"type": kind, "response": row.body})


def parse_request(body: dict[str, Any]) -> ResponsesRequest:
    """Raises `InvalidRequest` and pydantic's ValidationError, which both become 400."""
    try:
        return ResponsesRequest.model_validate(body)
    except RejectedRequest as refusal:
        raise refusal.error from None


async def start_session(ctx: RequestContext, request: ResponsesRequest) -> ChatSession:
    """Start the answer. Raises as `ChatSession.start`, with this endpoint's field names."""
    ctx, conversation = await load_conversation(ctx, request)
    chat = await ctx.offload(chat_from_responses, request, conversation)
    try:
        if request.truncation == "auto":
            served = await resolve_model(ctx, request.model)
            chat = await truncate_to_context(
                partial(chat_from_responses, request, conversation), served, ctx
            )
        return await ChatSession.start(chat, ctx, endpoint="responses")
    except InvalidRequest as error:
        raise rename_to_responses_fields(error, request) from None


class ResponsesView(GatewayView):
    schema = EndpointSchema(
        "Responses",
        post=Endpoint(
            "Create a response",
            objects.ResponseObject,
            ResponsesRequest,
            streams=True,
            parameters=(IDEMPOTENCY_KEY,),
        ),
    )
    generates = True
    renderer_classes = JSON_OR_EVENTS

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """Respond at once, as a stream, or in the background."""
        body = self.read_json(request)
        parsed = await request.ctx.offload(parse_request, body)
        ignored = parsed.ignored_fields()
        exchange = ResponseHandler(request.ctx, parsed, body)
        if parsed.store is not False:
            await check_response_quota(request.caller)
        if parsed.background:
            return await exchange.create_background()
        turn = await start_session(request.ctx, parsed)
        ignored += unsupported_fields(turn)
        try:
            response = await (exchange.stream(turn) if parsed.stream else exchange.create(turn))
        except BaseException:
            turn.release()
            raise
        add_headers(response, turn, ignored)
        return response


class ResponseHandler:
    """Handles one request for a response."""

    def __init__(
        self, ctx: RequestContext, request: ResponsesRequest, body: dict[str, Any]
    ) -> None:
        self._ctx, self._caller, self._request, self._raw = ctx, ctx.caller, request, body
        self._set_id(new_id("resp_"))

    def _set_id(self, public_id: str) -> None:
        self.public_id = public_id
        if self._ctx.record is not None:
            self._ctx.record.answer_id = public_id

    async def create_background(self) -> HttpResponseBase:
        """Store it for a worker, after validating what needs no model."""
        card = (await get_or_resolve_target(self._caller, self._request.model)).card
        ctx, conversation = await load_conversation(self._ctx, self._request)
        await ctx.offload(chat_from_responses, self._request, conversation)
        self._raw = {**self._raw, "model": card.id}  # stays unambiguous if models are added later
        body = response_object(self._request, self.public_id, time.time(), card.id)
        body["status"] = "queued"
        store = None
        if self._request.stream:
            # Before a worker can find the row, because its `acquire` excludes this writer.
            kinds = ("response.created", "response.queued")
            store = ResponseEventStore(self.public_id, "gateway")
            await store.acquire()
            await store.add([{"type": kind, "response": body} for kind in kinds])
        try:
            await self._keep(body, background=True)
        except Exception:  # but not when the client leaves: the row may exist all the same
            if store is not None:
                await store.forget()
            raise
        await enqueue_job("response", self.public_id)
        if self._request.stream:
            return stream_background(self._caller, self.public_id, -1)
        return json_response(body)

    async def create(self, turn: ChatSession) -> HttpResponseBase:
        """The answer in one body."""
        answer = ResponseAnswer(turn, self._request, self.public_id)
        await collect(turn, answer.add)
        body = answer.body()
        if self._request.store is not False or self._request.conversation_id:
            await self._keep(body)
        return json_response(body)

    async def stream(self, turn: ChatSession) -> HttpResponseBase:
        """The answer as a stream. Its id is the same in any gateway that continues it."""
        self._set_id(derived_id("resp_", turn.job.request_id))
        writer = ResponseStreamWriter(turn, self._request, self.public_id)
        first = await turn.next(settings.QUIRE.stream_start_wait_s)
        if self._request.store is False and not self._request.conversation_id:
            events = stream_events(turn, writer, first)
        else:
            events = store_before_last_event(turn, writer, first, writer, self._keep)
        return EventStreamResponse(events, turn.release)

    async def _keep(self, body: dict[str, Any], *, background: bool = False) -> None:
        """Store it, or with `store: false` only add it to its conversation."""
        await run_in_db_thread(self._store, body, background)

    def _store(self, body: dict[str, Any], background: bool) -> None:
        if self._request.store is False:
            append_response_turn(
                tenant_id=self._caller.tenant_id,
                conversation_id=self._request.conversation_id or "",
                read=to_stored_items(self._request.items),
                written=body["output"],
            )
            return
        store_response(
            caller=self._caller,
            public_id=self.public_id,
            status=body["status"],
            request=self._raw,
            input_items=to_stored_items(self._request.items),
            body=body,
            previous_id=self._request.previous_response_id or "",
            background=background,
        )


def stream_background(caller: Caller, public_id: str, after: int) -> HttpResponseBase:
    """Events of a background response after number `after`. It continues without a reader."""
    return EventStreamResponse(tail_response_events(caller, public_id, after), lambda: None)


def _starting_after(request: GatewayRequest) -> int | None:
    """Number of the client's last event, -1 for none; None if it doesn't want events."""
    stream, text = request.GET.get("stream", "false"), request.GET.get("starting_after")
    if stream not in ("true", "false"):
        raise InvalidRequest("stream must be true or false.", param="stream")
    if stream == "false":
        return None
    if text is None:
        return -1
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidRequest("starting_after must be an event's number.", param="starting_after")
    return int(text)


class InputTokensView(GatewayView):
    schema = EndpointSchema(
        "Responses", post=Endpoint("Count an input's tokens", objects.InputTokens, ResponsesRequest)
    )

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """OpenAI's count; nothing is generated or stored."""
        parsed = await request.ctx.offload(parse_request, self.read_json(request))
        ignored = parsed.ignored_fields()
        ctx, conversation = await load_conversation(request.ctx, parsed)
        served = await resolve_model(request.ctx, parsed.model)
        try:
            chat = await ctx.offload(chat_from_responses, parsed, conversation)
            tokens = await prompt_token_ids(chat, served, ctx)
        except InvalidRequest as error:
            raise rename_to_responses_fields(error, parsed) from None
        counted = {"object": "response.input_tokens", "input_tokens": len(tokens)}
        return json_answer(counted, ignored)


class ResponseView(GatewayView):
    schema = EndpointSchema(
        "Responses",
        get=Endpoint(
            "Read a response",
            objects.ResponseObject,
            streams=True,
            parameters=(
                OpenApiParameter("stream", bool, description="Stream the events."),
                OpenApiParameter("starting_after", int, description="Last event received."),
            ),
        ),
        delete=Endpoint("Delete a response", objects.Deleted),
    )
    renderer_classes = JSON_OR_EVENTS

    async def get(self, request: GatewayRequest, response_id: str) -> HttpResponseBase:
        """Its current state, or its events (`stream`) after number `starting_after`."""
        after = _starting_after(request)
        row = await run_in_db_thread(access_response, request.caller, response_id)
        if after is None:
            return json_response(row.body)
        if not (row.background and row.request.get("stream")):
            raise UnsupportedField(
                "Only a response that was made with background and stream can be streamed again.",
                param="stream",
            )
        return stream_background(request.caller, response_id, after)

    async def delete(self, request: GatewayRequest, response_id: str) -> HttpResponseBase:
        """Delete it."""
        await run_in_db_thread(delete_response, caller=request.caller, public_id=response_id)
        await ResponseEventStore(response_id).forget()
        return json_response({"id": response_id, "object": "response", "deleted": True})


class ResponseCancelView(GatewayView):
    schema = EndpointSchema(
        "Responses", post=Endpoint("Cancel a background response", objects.ResponseObject)
    )

    async def post(self, request: GatewayRequest, response_id: str) -> HttpResponseBase:
        """Cancel it."""
        row = await run_in_db_thread(cancel_response, caller=request.caller, public_id=response_id)
        return json_response(row.body)


class ResponseInputItemsView(GatewayView):
    schema = EndpointSchema(
        "Responses",
        get=Endpoint("List a response's input", objects.ItemPage, parameters=PAGE_PARAMETERS),
    )

    async def get(self, request: GatewayRequest, response_id: str) -> HttpResponseBase:
        """Its own input items, newest first by default."""
        page_query = parse_page_query(request, default=20, max_limit=100)
        row = await run_in_db_thread(access_response, request.caller, response_id)
        return json_response(paginate_items(row.input_items, page_query))
