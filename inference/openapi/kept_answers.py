"""Answers of what is kept, as the document tells of them: conversations, uploads, compactions."""

from __future__ import annotations

from typing import Any, Literal

from inference.openapi.answers import Answer, StoredFileObject


class ConversationObject(Answer):
    """A conversation."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class ConversationItem(Answer):
    """An item."""

    id: str
    type: str


class UploadObject(Answer):
    """An upload, with its file once that is made."""

    id: str
    object: Literal["upload"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["pending", "completed", "cancelled"]
    file: StoredFileObject | None


class UploadPartObject(Answer):
    """A part."""

    id: str
    object: Literal["upload.part"]
    created_at: int
    upload_id: str


class MessageBatchObject(Answer):
    """A batch of messages."""

    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: dict[str, int]
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    results_url: str | None


class MessageBatchPage(Answer):
    """Batches of messages."""

    data: list[MessageBatchObject]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedMessageBatch(Answer):
    """A batch that was deleted."""

    id: str
    type: Literal["message_batch_deleted"]


class Compaction(Answer):
    """A conversation made short."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]]
    usage: dict[str, Any]
