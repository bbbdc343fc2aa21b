"""What the store answers when it refuses."""

from engine.contract.errors import InvalidRequest, QuireError
from tenants.errors import Conflict, NotFound

__all__ = ["Conflict", "NotFound", "StorageFull", "TooMuchWaiting", "check_waiting"]


class TooMuchWaiting(QuireError):
    """The tenant has as much work waiting as it may."""

    status = 429
    code = "too_much_waiting"
    error_type = "rate_limit_error"
    retry_after = 10.0


def check_waiting(count: int, most: int, what: str) -> None:
    """Raise `TooMuchWaiting` when there is no room for one more; 0 is no limit."""
    if most and count >= most:
        raise TooMuchWaiting(f"Limit of {most} unfinished {what} per tenant reached.")


class StorageFull(InvalidRequest):
    """The tenant's files would take more room than it has."""

    status = 413
    code = "storage_full"
