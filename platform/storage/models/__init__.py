"""Stored files, batches, responses, chat completions and the playground's conversations."""

from storage.models.batch import Batch, BatchStatus
from storage.models.completion import StoredCompletion
from storage.models.conversation import SavedConversation
from storage.models.file import StoredFile
from storage.models.response import ResponseStatus, StoredResponse

__all__ = [
    "Batch",
    "BatchStatus",
    "ResponseStatus",
    "SavedConversation",
    "StoredCompletion",
    "StoredFile",
    "StoredResponse",
]
