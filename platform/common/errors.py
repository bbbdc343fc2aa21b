"""Errors of the control plane."""

from engine.contract.errors import InvalidRequest, QuireError


class RateLimited(QuireError):
    """A limit is exceeded. The same request fits in `retry_after` seconds (> 0).

    Attributes:
        headers: current `x-ratelimit-*` values of the bucket that refused.
    """

    status = 429
    code = "rate_limit_exceeded"
    error_type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after: float, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after = retry_after
        self.headers: dict[str, str] = {}


class BudgetSpent(RateLimited):
    """A budget is spent until its next period, which begins in `retry_after` seconds."""

    code = "insufficient_quota"
    error_type = "insufficient_quota"


class AuthenticationFailed(QuireError):
    """Not authenticated: no key, or one that is invalid, revoked or expired."""

    status = 401
    code = "invalid_api_key"
    error_type = "authentication_error"


class PermissionDenied(QuireError):
    """The authenticated caller lacks the permission."""

    status = 403
    code = "permission_denied"
    error_type = "permission_error"


class NotFound(QuireError):
    """The object doesn't exist, or belongs to another tenant: both look the same."""

    status = 404
    code = "not_found"
    error_type = "invalid_request_error"


class Conflict(QuireError):
    """The object exists already, or is being changed by another request."""

    status = 409
    code = "conflict"
    error_type = "invalid_request_error"


class ServiceUnavailable(QuireError):
    """The database or Redis can't be reached; the request may be retried later."""

    status = 503
    code = "service_unavailable"
    error_type = "server_error"


class QueryTimeout(InvalidRequest):
    """The database query took too long."""

    code = "query_timeout"


class ModelNotFound(NotFound):
    """The model doesn't exist or the caller has no access: both look the same."""

    code = "model_not_found"


class HubUnavailable(QuireError):
    """The hub can't be reached from here, or its response is invalid."""

    status = 502
    code = "hub_unavailable"
    error_type = "server_error"


class AdapterInvalid(InvalidRequest):
    """These files are no adapter, or one that can't be trusted."""

    code = "invalid_adapter"


class AdapterTooLarge(InvalidRequest):
    """It exceeds the size limit of one adapter, or of all adapters of its tenant."""

    status = 413
    code = "adapter_too_large"


class OffsetMismatch(Conflict):
    """A chunk of an upload doesn't begin where the received bytes end."""

    code = "wrong_offset"

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message, param="offset")
        self.offset = offset
        self.headers = {"Upload-Offset": str(offset)}


class TooManyPending(QuireError):
    """The tenant has reached its limit of pending work."""

    status = 429
    code = "too_much_waiting"
    error_type = "rate_limit_error"
    retry_after = 10.0


def check_pending_limit(count: int, limit: int, what: str) -> None:
    """Raise `TooManyPending` if the limit is reached; 0 is no limit."""
    if limit and count >= limit:
        raise TooManyPending(f"Limit of {limit} unfinished {what} per tenant reached.")


class StorageFull(InvalidRequest):
    """The tenant's files would exceed its storage quota."""

    status = 413
    code = "storage_full"


__all__ = [
    "AdapterInvalid",
    "AdapterTooLarge",
    "Conflict",
    "HubUnavailable",
    "ModelNotFound",
    "NotFound",
    "OffsetMismatch",
    "PermissionDenied",
    "ServiceUnavailable",
    "StorageFull",
    "TooManyPending",
    "check_pending_limit",
]
