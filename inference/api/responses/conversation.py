"""The conversation that a response continues, as items of a chat."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from cryptography.fernet import InvalidToken

from common.db import run_in_db_thread
from common.one_time import fernet_for
from engine.contract.errors import InvalidRequest
from inference.api.responses.schemas import ResponsesRequest
from inference.generation.takeover import find_resumed_stream
from inference.loop.fair_dispatch import INLINE_MAX_ITEMS
from inference.loop.offload import MAX_INLINE_CHARS
from inference.request.context import RequestContext
from storage.access import (
    StoredResponse,
    access_all_items,
    access_output_items,
    access_response_chain,
)

KIND = "compaction"
#: An item that refers to one of an earlier response.
REFERENCE = "item_reference"
_HEAD = "Summary of the conversation so far:\n\n"
#: Maximum characters of an encrypted summary.
MAX_SEALED = 1 << 20


def encrypt_summary(summary: str, tenant_id: int) -> str:
    """An item that the client sends back instead of the conversation. Only this installation can
    read it, and only for the same tenant.
    """
    text = json.dumps({"tenant": tenant_id, "summary": summary})
    return fernet_for(KIND).encrypt(text.encode()).decode()


def expand_compactions(
    items: Iterable[dict[str, Any]], tenant_id: int, param: str
) -> list[dict[str, Any]]:
    """Replace each compaction by a system message with its summary.

    Raises: `InvalidRequest` for one from another installation or tenant.
    """
    return [
        _message(item, tenant_id, f"{param}[{index}].encrypted_content")
        if item.get("type") == KIND
        else item
        for index, item in enumerate(items)
    ]


def _message(item: dict[str, Any], tenant_id: int, param: str) -> dict[str, Any]:
    content = item.get("encrypted_content")
    refused = InvalidRequest(
        "This compaction wasn't made on this installation for your tenant.", param=param
    )
    if not isinstance(content, str) or len(content) > MAX_SEALED or not content.isascii():
        raise refused
    try:
        sealed = json.loads(fernet_for(KIND).decrypt(content.encode()))
    except InvalidToken:
        raise refused from None
    if sealed["tenant"] != tenant_id:
        raise refused
    return {"type": "message", "role": "system", "content": _HEAD + sealed["summary"]}


@dataclass(frozen=True)
class ConversationInput:
    """Items before this turn and of this turn, with compactions expanded to their summaries."""

    history: list[dict[str, Any]]
    new_items: list[dict[str, Any]]


async def load_conversation(
    ctx: RequestContext, request: ResponsesRequest
) -> tuple[RequestContext, ConversationInput]:
    """The conversation that a response continues, and the request's context, updated for it.

    Raises: `NotFound` naming `previous_response_id`, `conversation` or an item, `InvalidRequest`
    for one that can't be continued.
    """
    caller = ctx.caller
    history: list[dict[str, Any]] = []
    chars = 0
    if request.conversation_id is not None:
        resumed = await find_resumed_stream(ctx) if request.stream else None
        until = None if resumed is None else resumed.read_until
        rows = await run_in_db_thread(access_all_items, caller, request.conversation_id, until)
        ctx = replace(ctx, read_until=rows[-1].pk if rows else 0)
        history, chars = [row.item for row in rows], sum(row.size for row in rows)
    elif request.previous_response_id is not None:
        chain, chars = await run_in_db_thread(
            access_response_chain, caller, request.previous_response_id
        )
        history = _items_of(chain)
    items = request.items
    references = {
        str(item.get("id")): f"input[{index}].id"
        for index, item in enumerate(items)
        if item.get("type") == REFERENCE
    }
    if references:
        stored = await run_in_db_thread(access_output_items, caller, references)
        items = [stored[item["id"]] if item.get("type") == REFERENCE else item for item in items]
    if len(history) > INLINE_MAX_ITEMS or chars > MAX_INLINE_CHARS:
        ctx = replace(ctx, is_large=True)
    return ctx, await ctx.offload(_conversation_input, history, items, caller.tenant_id)


def _conversation_input(
    history: list[dict[str, Any]], items: list[dict[str, Any]], tenant_id: int
) -> ConversationInput:
    return ConversationInput(
        expand_compactions(history, tenant_id, "conversation"),
        expand_compactions(items, tenant_id, "input"),
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
