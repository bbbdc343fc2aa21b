"""Stored files, batches, stored responses and chat completions."""

from storage.models.batch import Batch, BatchStatus
from storage.models.completion import StoredCompletion
from storage.models.file import StoredFile
from storage.models.response import ResponseStatus, StoredResponse

__all__ = [
    "Batch",
    "BatchStatus",
    "ResponseStatus",
    "StoredCompletion",
    "StoredFile",
    "StoredResponse",
]
