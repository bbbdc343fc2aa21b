"""Runs background responses in a worker."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from typing import Any

import stamina

from common.db import run_in_db_thread
from common.log_context import bind_request
from engine.contract.errors import QuireError
from inference.api.responses.event_store import LostLease, ResponseEventStore
from inference.api.responses.output_items import Event, ResumeMismatch
from inference.api.responses.response import ResponseAnswer, failed_response
from inference.api.responses.schemas import ResponsesRequest
from inference.api.responses.views import parse_request, start_session
from inference.chat.turn import ChatSession
from inference.errors import as_quire_error, is_about_storage, report
from inference.request.context import RequestContext, RequestRecord
from inference.tracing import background_span
from inference.work import Lease, lease_seconds, load_trace_parent
from storage.access import StoredResponse
from storage.actions import claim_response, update_response
from tenants.authentication import reload_caller

#: Seconds between two checks whether a running response was cancelled.
CANCEL_POLL_INTERVAL_S = 1.0
#: Seconds between two batches of events; deltas in between are merged.
EVENT_FLUSH_S = 0.1
#: Seconds that a response waits for a replica, or for its tenant's limit.
WAIT_S = 600.0
MAX_PAUSE_S = 10.0


async def run_response(public_id: str, owner: str) -> None:
    """Run a background response, unless another worker does or it was cancelled."""
    row = await run_in_db_thread(
        claim_response, public_id=public_id, owner=owner, seconds=lease_seconds()
    )
    if row is None:
        return
    async with Lease(row, owner):
        origin = await load_trace_parent(public_id)
        with background_span("background POST /v1/responses", origin, response_id=row.public_id):
            await ResponseRun(row, owner).run()


def _retry_delay(error: BaseException) -> bool | float:
    """Seconds until a retry; False for an error that a retry can't help."""
    is_temporary = isinstance(error, QuireError) and error.status in (429, 503)
    if not is_temporary or isinstance(error, ResumeMismatch):
        return False
    return min(getattr(error, "retry_after", None) or 1.0, MAX_PAUSE_S)


class ResponseRun:
    """The run of a response whose lease this worker holds."""

    def __init__(self, row: StoredResponse, owner: str) -> None:
        self._row, self._owner = row, owner
        self._event_store = (
            ResponseEventStore(row.public_id, owner) if row.request.get("stream") else None
        )

    async def run(self) -> None:
        """Generate, store and publish it, unless it is cancelled or another worker has it."""
        events: list[Event] = []
        try:
            answer = await self._answer()
            if answer is None:
                return
            events, body = answer.finish(), answer.body()
        except LostLease:
            return  # another worker has it
        except Exception as error:
            report(error, self._row.public_id)
            body = failed_response(self._row.body, as_quire_error(error))
        if await self._update(body):
            with contextlib.suppress(LostLease):  # readers get the end from the row
                end = {"type": f"response.{body['status']}", "response": body}
                await self._publish_events([*events, end])

    @stamina.retry(on=_retry_delay, attempts=None, timeout=WAIT_S)
    async def _answer(self) -> ResponseAnswer | None:
        """The answer up to its end; None if it was cancelled.

        It is generated again if its replicas were lost for too long: the seed makes it the same.
        """
        row = self._row
        stored_events = await self._event_store.acquire() if self._event_store else []
        request = parse_request(row.request)
        request.stream = False  # the worker writes the events; no client reads a stream here
        if request.seed is None:
            # Every attempt of every worker generates the same tokens.
            digest = hashlib.sha256(row.public_id.encode()).digest()
            request.seed = int.from_bytes(digest[:7], "big")
        turn = await self._start(request)
        if turn is None:
            return None
        try:
            created = row.body["created_at"]
            answer = ResponseAnswer(turn, request, row.public_id, created_at=created)
            if not answer.go_on_from(stored_events):
                await self._publish_events(
                    [{"type": "response.in_progress", "response": answer.started}]
                )
            return answer if await self._collect(turn, answer) else None
        except asyncio.CancelledError:
            turn.generation.discard()  # another worker generates it
            raise
        finally:
            turn.release()

    @stamina.retry(on=_retry_delay, attempts=None, timeout=WAIT_S)
    async def _start(self, request: ResponsesRequest) -> ChatSession | None:
        """The session, once a replica and the limits allow it; None if it is cancelled."""
        row = self._row
        if not await self._update({**row.body, "status": "in_progress"}):
            return None
        caller = await reload_caller(row.key_id, row.user_id, row.tenant.slug)
        bind_request(tenant=caller.tenant, model=request.model)
        record = RequestRecord("responses", answer_id=row.public_id)
        return await start_session(RequestContext(caller=caller, record=record), request)

    async def _collect(self, turn: ChatSession, answer: ResponseAnswer) -> bool:
        """Read the output to its end; False if it was cancelled."""
        looked = time.monotonic()
        while not turn.finished:
            deltas = await turn.next(CANCEL_POLL_INTERVAL_S)
            await self._publish_events(
                [event for delta in deltas for event in answer.append(delta)]
            )
            if time.monotonic() - looked >= CANCEL_POLL_INTERVAL_S:
                looked = time.monotonic()
                if not await self._update(answer.started):
                    return False
            if self._event_store and not turn.finished:
                await asyncio.sleep(EVENT_FLUSH_S)
        return True

    @stamina.retry(on=is_about_storage, attempts=None, timeout=None)
    async def _update(self, body: dict[str, Any]) -> bool:
        """Store it; wait while the disk is full, as long as the lease is held."""
        row, state = self._row, {"status": body["status"], "body": body, "owner": self._owner}
        return await run_in_db_thread(update_response, row=row, **state)

    async def _publish_events(self, events: list[Event]) -> None:
        if self._event_store:
            await self._event_store.add(events)
