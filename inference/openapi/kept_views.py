"""What the document says of the views of what is kept: conversations, uploads, compactions."""

from __future__ import annotations

from typing import Any

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter

from inference.api import conversations as conversation_schemas
from inference.api import conversations as conversations
from inference.api import uploads as uploads
from inference.api.anthropic import batches
from inference.api.anthropic.batches import BatchOfMessages
from inference.api.responses.compact import CompactRequest, CompactView
from inference.openapi.document import KEY, PAGE, READ, operation
from inference.schemas import objects as answers
from inference.schemas import objects as kept_answers

FOUND = (*READ, 404)
PART: dict[str, Any] = {
    "type": "object",
    "required": ["data"],
    "additionalProperties": False,
    "properties": {"data": {"type": "string", "format": "binary", "minLength": 1}},
}

THEIRS: dict[str, Any] = {"envelope": answers.AnthropicErrorAnswer}

VIEWS: dict[Any, dict[str, Any]] = {
    batches.MessageBatchesView: {
        "get": operation(
            "Messages",
            kept_answers.MessageBatchPage,
            statuses=FOUND,
            parameters=(
                OpenApiParameter("limit", int, description="How many, up to 1000."),
                OpenApiParameter("before_id", str, description="The page before this batch."),
                OpenApiParameter("after_id", str, description="The page after this batch."),
            ),
            operation_id="v1_messages_batches_list",
            **THEIRS,
        ),
        "post": operation(
            "Messages",
            kept_answers.MessageBatchObject,
            request=BatchOfMessages,
            parameters=(KEY,),
            **THEIRS,
        ),
    },
    batches.MessageBatchView: {
        "get": operation("Messages", kept_answers.MessageBatchObject, statuses=FOUND, **THEIRS),
        "delete": operation(
            "Messages", kept_answers.DeletedMessageBatch, statuses=(*FOUND, 409), **THEIRS
        ),
    },
    batches.MessageBatchCancelView: {
        "post": operation(
            "Messages",
            kept_answers.MessageBatchObject,
            statuses=(*FOUND, 409, 415, 422),
            **THEIRS,
        ),
    },
    batches.MessageBatchResultsView: {
        "get": operation(
            "Messages",
            OpenApiTypes.BINARY,
            statuses=FOUND,
            extra={(200, "application/x-jsonl"): OpenApiTypes.STR},
            **THEIRS,
        ),
    },
    CompactView: {
        "post": operation("Responses", kept_answers.Compaction, request=CompactRequest),
    },
    conversations.ConversationsView: {
        "post": operation(
            "Conversations",
            kept_answers.ConversationObject,
            request=conversation_schemas.NewConversation,
            parameters=(KEY,),
        ),
    },
    conversations.ConversationView: {
        "get": operation("Conversations", kept_answers.ConversationObject, statuses=FOUND),
        "post": operation(
            "Conversations",
            kept_answers.ConversationObject,
            request=conversation_schemas.ConversationChange,
            operation_id="v1_conversations_update",
        ),
        "delete": operation("Conversations", answers.Deleted, statuses=FOUND),
    },
    conversations.ConversationItemsView: {
        "get": operation(
            "Conversations",
            answers.ItemPage,
            statuses=FOUND,
            parameters=PAGE,
            operation_id="v1_conversations_items_list",
        ),
        "post": operation("Conversations", answers.ItemPage, request=conversation_schemas.NewItems),
    },
    conversations.ConversationItemView: {
        "get": operation("Conversations", kept_answers.ConversationItem, statuses=FOUND),
        "delete": operation("Conversations", kept_answers.ConversationObject, statuses=FOUND),
    },
    uploads.UploadsView: {
        "post": operation("Files", kept_answers.UploadObject, request=uploads.UploadRequest),
    },
    uploads.UploadPartsView: {
        "post": operation(
            "Files", kept_answers.UploadPartObject, request={"multipart/form-data": PART}
        ),
    },
    uploads.UploadCompleteView: {
        "post": operation("Files", kept_answers.UploadObject, request=uploads.CompleteRequest),
    },
    uploads.UploadCancelView: {
        "post": operation("Files", kept_answers.UploadObject, statuses=(*FOUND, 409, 415, 422)),
    },
}
