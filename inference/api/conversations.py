"""`/v1/conversations` and its items."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from django.http.response import HttpResponseBase
from pydantic import Field

from common.db import run_in_db_thread
from engine.contract.errors import InvalidRequest
from inference.api.responses.conversion import Messages, to_stored_items
from inference.api.responses.schemas import InputItem
from inference.loop.offload import in_report_thread
from inference.schemas import objects
from inference.schemas.base import BatchMetadata, StrictModel
from inference.web.endpoint_schema import IDEMPOTENCY_KEY, PAGE_PARAMETERS, Endpoint, EndpointSchema
from inference.web.responses import list_response, parse_page_query
from inference.web.views import GatewayRequest, GatewayView, json_response
from storage.access import (
    ConversationItem,
    ItemConversation,
    access_item,
    access_item_conversation,
    access_item_page,
)
from storage.actions import (
    add_items,
    create_item_conversation,
    delete_item,
    delete_item_conversation,
    update_item_conversation,
)

_encode = msgspec.json.Encoder().encode

#: Maximum number of items in one request, as at OpenAI.
MAX_ITEMS = 20

Items = Annotated[list[InputItem], Field(max_length=MAX_ITEMS)]


class NewConversation(StrictModel):
    """A conversation with its first items."""

    items: Items | None = None
    metadata: BatchMetadata | None = None


class ConversationChange(StrictModel):
    """Changeable fields of a conversation."""

    metadata: BatchMetadata | None


class NewItems(StrictModel):
    """Items to add."""

    items: Annotated[Items, Field(min_length=1)]


def checked_items(items: list[InputItem] | None) -> list[dict[str, Any]]:
    """Items as they are stored. Raises `InvalidRequest` for items that no model could read."""
    stored_items = [item.model_dump(exclude_unset=True) for item in items or ()]
    try:
        Messages().add_all(item for item in stored_items if item.get("type") != "compaction")
    except InvalidRequest as error:
        if error.param is not None and error.param.startswith("input["):
            error.rename("items" + error.param.removeprefix("input"))
        raise
    return to_stored_items(stored_items)


def conversation_object(row: ItemConversation) -> dict[str, Any]:
    """OpenAI's `conversation`."""
    return {
        "id": row.public_id,
        "object": "conversation",
        "created_at": int(row.created_at.timestamp()),
        "metadata": row.metadata,
    }


def _item(row: ConversationItem) -> dict[str, Any]:
    item: dict[str, Any] = row.item
    return item


class ConversationsView(GatewayView):
    schema = EndpointSchema(
        "Conversations",
        post=Endpoint(
            "Create a conversation",
            objects.ConversationObject,
            NewConversation,
            parameters=(IDEMPOTENCY_KEY,),
        ),
    )

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """A new conversation."""
        body = self.read_json(request) if request.body else {}
        parsed = await request.ctx.offload(NewConversation.model_validate, body)
        row = await run_in_db_thread(
            create_item_conversation,
            caller=request.caller,
            metadata=parsed.metadata or {},
            items=await request.ctx.offload(checked_items, parsed.items),
        )
        return json_response(conversation_object(row))


class ConversationView(GatewayView):
    schema = EndpointSchema(
        "Conversations",
        get=Endpoint("Read a conversation's metadata", objects.ConversationObject),
        post=Endpoint(
            "Change a conversation's metadata",
            objects.ConversationObject,
            ConversationChange,
            operation_id="v1_conversations_update",
        ),
        delete=Endpoint("Delete a conversation", objects.Deleted),
    )

    async def get(self, request: GatewayRequest, conversation_id: str) -> HttpResponseBase:
        """Return the conversation; its items are listed separately."""
        row = await run_in_db_thread(access_item_conversation, request.caller, conversation_id)
        return json_response(conversation_object(row))

    async def post(self, request: GatewayRequest, conversation_id: str) -> HttpResponseBase:
        """Change its metadata."""
        change = ConversationChange.model_validate(self.read_json(request))
        row = await run_in_db_thread(
            update_item_conversation,
            caller=request.caller,
            public_id=conversation_id,
            metadata=change.metadata or {},
        )
        return json_response(conversation_object(row))

    async def delete(self, request: GatewayRequest, conversation_id: str) -> HttpResponseBase:
        """Delete it and its items."""
        await run_in_db_thread(
            delete_item_conversation, caller=request.caller, public_id=conversation_id
        )
        deleted = {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
        return json_response(deleted)


class ConversationItemsView(GatewayView):
    schema = EndpointSchema(
        "Conversations",
        get=Endpoint(
            "List a conversation's items",
            objects.ItemPage,
            parameters=PAGE_PARAMETERS,
            operation_id="v1_conversations_items_list",
        ),
        post=Endpoint("Add items to a conversation", objects.ItemPage, NewItems),
    )

    async def get(self, request: GatewayRequest, conversation_id: str) -> HttpResponseBase:
        """A page of its items, newest first by default."""
        page_query = parse_page_query(request, default=20, max_limit=100)

        def listed() -> bytes:
            rows, more = access_item_page(
                request.caller,
                conversation_id,
                limit=page_query.limit,
                after=page_query.after,
                newest_first=page_query.newest_first,
            )
            return _encode(list_response(rows, more, _item))

        return json_response(await in_report_thread(request.caller, listed))

    async def post(self, request: GatewayRequest, conversation_id: str) -> HttpResponseBase:
        """Append items."""
        parsed = await request.ctx.offload(NewItems.model_validate, self.read_json(request))
        rows = await run_in_db_thread(
            add_items,
            caller=request.caller,
            public_id=conversation_id,
            items=await request.ctx.offload(checked_items, parsed.items),
        )
        return json_response(list_response(rows, False, _item))


class ConversationItemView(GatewayView):
    schema = EndpointSchema(
        "Conversations",
        get=Endpoint("Read an item", objects.ConversationItem),
        delete=Endpoint("Delete an item", objects.ConversationObject),
    )

    async def get(
        self, request: GatewayRequest, conversation_id: str, item_id: str
    ) -> HttpResponseBase:
        """The item as it is stored."""
        row = await run_in_db_thread(access_item, request.caller, conversation_id, item_id)
        return json_response(_item(row))

    async def delete(
        self, request: GatewayRequest, conversation_id: str, item_id: str
    ) -> HttpResponseBase:
        """Delete it."""
        row = await run_in_db_thread(
            delete_item, caller=request.caller, conversation_id=conversation_id, item_id=item_id
        )
        return json_response(conversation_object(row))
