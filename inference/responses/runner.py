"""Background responses, in a worker."""

from __future__ import annotations

import time
from typing import Any

from inference.chat import ChatTurn
from inference.errors import as_quire_error, report
from inference.responses.answer import ResponseAnswer, failed_response
from inference.responses.views import parse_request, start_turn
from inference.work.lease import Lease, lease_seconds
from storage.access import StoredResponse
from storage.actions import claim_response, update_response
from tenants.authentication import caller_again
from tenants.db_threads import in_db_thread

#: How often a running answer is looked up, to hear that it was cancelled.
LOOK_EVERY_S = 1.0


async def run_response(public_id: str, owner: str) -> None:
    """Make a background response, unless another worker does or it was cancelled."""
    row = await in_db_thread(
        claim_response, public_id=public_id, owner=owner, seconds=lease_seconds()
    )
    if row is None:
        return
    async with Lease(row, owner):
        started = {**row.body, "status": "in_progress"}
        if not await in_db_thread(update_response, row=row, status="in_progress", body=started):
            return
        try:
            body = await _answer(row)
        except Exception as error:
            report(error, public_id)
            body = failed_response(row.body, as_quire_error(error))
        if body is not None:
            await in_db_thread(update_response, row=row, status=body["status"], body=body)


async def _answer(row: StoredResponse) -> dict[str, Any] | None:
    """The response's body; None when it was cancelled meanwhile."""
    caller = await caller_again(row.key_id, row.user_id, row.tenant.slug)
    request = parse_request(row.request)
    turn = await start_turn(caller, request, time.perf_counter())
    try:
        return await _collect(row, turn, ResponseAnswer(turn, request, row.public_id))
    finally:
        turn.release()


async def _collect(
    row: StoredResponse, turn: ChatTurn, answer: ResponseAnswer
) -> dict[str, Any] | None:
    looked = time.monotonic()
    while not turn.finished:
        for delta in await turn.next(LOOK_EVERY_S):
            answer.add(delta)
        if time.monotonic() - looked >= LOOK_EVERY_S:
            looked = time.monotonic()
            running = {**answer.started, "created_at": row.body["created_at"]}
            if not await in_db_thread(update_response, row=row, status="in_progress", body=running):
                return None
    return {**answer.body(), "created_at": row.body["created_at"]}
