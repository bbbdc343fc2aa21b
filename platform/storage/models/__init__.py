"""Stored files, uploads, batches, responses, chat completions and conversations."""

from storage.models.batch import Batch, BatchStatus
from storage.models.completion import StoredCompletion
from storage.models.conversation import SavedConversation
from storage.models.file import StoredFile
from storage.models.item_conversation import ConversationItem, ItemConversation
from storage.models.response import ResponseStatus, StoredResponse
from storage.models.upload import StoredUpload, UploadPart, UploadStatus

__all__ = [
    "Batch",
    "BatchStatus",
    "ConversationItem",
    "ItemConversation",
    "ResponseStatus",
    "SavedConversation",
    "StoredCompletion",
    "StoredFile",
    "StoredResponse",
    "StoredUpload",
    "UploadPart",
    "UploadStatus",
]
