"""`/v1/chat/completions/{id}` and the list of them: completions that were made with `store`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
from django.http.response import HttpResponseBase
from pydantic import BaseModel, ConfigDict

from engine.contract.errors import InvalidRequest
from inference.openai.chat import ChatCompletionsView
from inference.openai.schemas.base import Metadata
from inference.web.paging import as_list, item_page, paging
from inference.web.report_threads import in_report_thread
from inference.web.views import LIST_COST, GatewayRequest, GatewayView, json_response
from storage.access import StoredCompletion, access_completion, access_completions, page
from storage.actions import delete_completion, update_completion
from tenants.db_threads import in_db_thread

_encode = msgspec.json.Encoder().encode
_PAIR = re.compile(r"metadata\[(.{1,64})\]")
MAX_PAIRS = 16


def completion_object(row: StoredCompletion) -> dict[str, Any]:
    """OpenAI's `chat.completion` with its metadata as they are now."""
    return {**row.body, "metadata": row.metadata}


class CompletionChange(BaseModel):
    """What may be changed of a stored completion."""

    model_config = ConfigDict(strict=True, extra="forbid")

    metadata: Metadata | None


class StoredCompletionsView(ChatCompletionsView):
    """Make a chat completion, list those that are kept."""

    call_cost = LIST_COST

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """The tenant's, a page at a time; `model` and `metadata[key]` filter them."""
        asked = paging(request, default=20, most=100, orders=("asc", "desc"))
        wanted = _wanted(request)

        def listed() -> bytes:
            rows = access_completions(request.caller, request.GET.get("model"), wanted)
            found, more = page(
                rows.defer("messages"),
                limit=asked.limit,
                after=asked.after,
                newest_first=asked.newest_first,
                matches=_having(wanted),
            )
            return _encode(as_list(found, more, completion_object))

        return json_response(await in_report_thread(request.caller, listed))


def _having(metadata: dict[str, str]) -> Callable[[StoredCompletion], bool] | None:
    if not metadata:
        return None
    return lambda row: metadata.items() <= row.metadata.items()


def _wanted(request: GatewayRequest) -> dict[str, str]:
    """`?metadata[key]=value` as pairs. Raises `InvalidRequest`."""
    pairs = {
        match[1]: str(value)
        for name, value in request.GET.items()
        if (match := _PAIR.fullmatch(name))
    }
    if len(pairs) > MAX_PAIRS:
        raise InvalidRequest(f"metadata may hold at most {MAX_PAIRS} pairs.", param="metadata")
    return pairs


class StoredCompletionView(GatewayView):
    """One stored completion."""

    async def get(self, request: GatewayRequest, completion_id: str) -> HttpResponseBase:
        """As it was answered."""
        row = await in_db_thread(access_completion, request.caller, completion_id)
        return json_response(_encode(completion_object(row)))

    async def post(self, request: GatewayRequest, completion_id: str) -> HttpResponseBase:
        """Change its metadata."""
        change = CompletionChange.model_validate(self.read_json(request))
        row = await in_db_thread(
            update_completion,
            caller=request.caller,
            public_id=completion_id,
            metadata=dict(change.metadata or {}),
        )
        return json_response(_encode(completion_object(row)))

    async def delete(self, request: GatewayRequest, completion_id: str) -> HttpResponseBase:
        """Forget it."""
        await in_db_thread(delete_completion, caller=request.caller, public_id=completion_id)
        gone = {"id": completion_id, "object": "chat.completion.deleted", "deleted": True}
        return json_response(_encode(gone))


class CompletionMessagesView(GatewayView):
    """What a stored completion was the answer to."""

    async def get(self, request: GatewayRequest, completion_id: str) -> HttpResponseBase:
        """Its messages, the first one first."""
        asked = paging(request, default=20, most=100, orders=("asc", "desc"))
        row = await in_db_thread(access_completion, request.caller, completion_id)
        return json_response(_encode(item_page(row.messages, asked)))
