"""What was said before a response, and what is said now, as items that a chat can be made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.contract.errors import InvalidRequest
from inference.responses.compaction import opened
from inference.responses.schemas import ResponsesRequest
from inference.resuming.read_until import note_read, read_before
from storage.access import access_conversation
from storage.access_items import access_all_items
from tenants.authentication import Caller
from tenants.db_threads import in_db_thread


@dataclass(frozen=True)
class Said:
    """Items before this turn, and this turn's own. Compactions are their summaries."""

    before: list[dict[str, Any]]
    now: list[dict[str, Any]]


async def conversation(caller: Caller, request: ResponsesRequest) -> Said:
    """All that a response goes on from.

    Raises: `NotFound` naming `previous_response_id` or `conversation`, `InvalidRequest` for one
    that nothing can go on from.
    """
    before: list[dict[str, Any]] = []
    note_read(None)
    if request.conversation_id is not None:
        until = await read_before(caller) if request.stream else None
        rows = await in_db_thread(access_all_items, caller, request.conversation_id, until)
        note_read(rows[-1].pk if rows else 0)
        before = [row.item for row in rows]
    elif request.previous_response_id is not None:
        before = await _chain(caller, request.previous_response_id)
    tenant = caller.tenant_id
    return Said(opened(before, tenant, "conversation"), opened(request.items, tenant, "input"))


async def _chain(caller: Caller, last: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for row in await in_db_thread(access_conversation, caller, last):
        if row.status not in ("completed", "incomplete"):
            raise InvalidRequest(
                f"The response {row.public_id} is {row.status}: it can't be continued.",
                param="previous_response_id",
            )
        items += [*row.input_items, *row.body["output"]]
    return items
