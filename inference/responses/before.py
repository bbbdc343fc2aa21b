"""What was said before a response, and what is said now, as items that a chat can be made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from engine.contract.errors import InvalidRequest
from inference.rendering.pool import beside, note_work
from inference.responses.compaction import opened
from inference.responses.schemas import ResponsesRequest
from inference.resuming.read_until import note_read, read_before
from storage.access import StoredResponse, access_response_chain
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
    chars = 0
    note_read(None)
    if request.conversation_id is not None:
        until = await read_before(caller) if request.stream else None
        rows = await in_db_thread(access_all_items, caller, request.conversation_id, until)
        note_read(rows[-1].pk if rows else 0)
        before, chars = [row.item for row in rows], sum(row.size for row in rows)
    elif request.previous_response_id is not None:
        rows = await in_db_thread(access_response_chain, caller, request.previous_response_id)
        before, chars = _items_of(rows), sum(row.chars for row in rows)
    note_work(items=len(before), chars=chars)
    return await beside(_said, before, request, caller.tenant_id)


def _said(before: list[dict[str, Any]], request: ResponsesRequest, tenant_id: int) -> Said:
    return Said(
        opened(before, tenant_id, "conversation"), opened(request.items, tenant_id, "input")
    )


def _items_of(rows: Iterable[StoredResponse]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for row in rows:
        if row.status not in ("completed", "incomplete"):
            raise InvalidRequest(
                f"The response {row.public_id} is {row.status}: it can't be continued.",
                param="previous_response_id",
            )
        items += [*row.input_items, *row.body["output"]]
    return items
