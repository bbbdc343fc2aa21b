"""Stored files, batches, stored responses."""

from storage.models.batch import Batch, BatchStatus
from storage.models.file import StoredFile
from storage.models.response import ResponseStatus, StoredResponse

__all__ = ["Batch", "BatchStatus", "ResponseStatus", "StoredFile", "StoredResponse"]
