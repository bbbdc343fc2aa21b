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


class Compaction(Answer):
    """A conversation made short."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]]
    usage: dict[str, Any]
