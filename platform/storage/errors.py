"""What the store answers when it refuses."""

from engine.errors import InvalidRequest
from tenants.errors import Conflict, NotFound

__all__ = ["Conflict", "NotFound", "StorageFull"]


class StorageFull(InvalidRequest):
    """The tenant's files would take more room than it has."""

    status = 413
    code = "storage_full"
