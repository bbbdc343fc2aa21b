"""Errors of the control plane."""

from engine.contract.errors import InvalidRequest, QuireError


class RateLimited(QuireError):
    """Over a limit. `retry_after` seconds (> 0) from now the same request fits.

    Attributes:
        headers: the `x-ratelimit-*` values of the bucket that refused, as they are now.
    """

    status = 429
    code = "rate_limit_exceeded"
    error_type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after: float, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after = retry_after
        self.headers: dict[str, str] = {}


class BudgetSpent(RateLimited):
    """A budget has nothing left until its next day, week or month, which is `retry_after`."""

    code = "insufficient_quota"
    error_type = "insufficient_quota"


class AuthenticationFailed(QuireError):
    """Nobody we know: no key, a wrong one, a revoked or expired one."""

    status = 401
    code = "invalid_api_key"
    error_type = "authentication_error"


class PermissionDenied(QuireError):
    """We know who asks, and they may not."""

    status = 403
    code = "permission_denied"
    error_type = "permission_error"


class NotFound(QuireError):
    """The object doesn't exist, or belongs to another tenant: both look the same."""

    status = 404
    code = "not_found"
    error_type = "invalid_request_error"


class Conflict(QuireError):
    """The object exists already, or is being changed by somebody else."""

    status = 409
    code = "conflict"
    error_type = "invalid_request_error"


class ServiceUnavailable(QuireError):
    """The database or Redis can't be reached; trying again later makes sense."""

    status = 503
    code = "service_unavailable"
    error_type = "server_error"


class QueryTimeout(InvalidRequest):
    """The database query took too long."""

    code = "query_timeout"


class ModelNotFound(NotFound):
    """There's no such model, or it's not for this caller: both look the same."""

    code = "model_not_found"


class HubUnavailable(QuireError):
    """The hub can't be reached from here, or doesn't answer as it should."""

    status = 502
    code = "hub_unavailable"
    error_type = "server_error"


class AdapterInvalid(InvalidRequest):
    """These files are no adapter, or none that can be trusted."""

    code = "invalid_adapter"


class AdapterTooLarge(InvalidRequest):
    """It's over the limit of one adapter, or of all that its tenant keeps."""

    status = 413
    code = "adapter_too_large"


class OffsetMismatch(Conflict):
    """A piece of an upload begins elsewhere than the bytes before it end."""

    code = "wrong_offset"

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message, param="offset")
        self.offset = offset
        self.headers = {"Upload-Offset": str(offset)}


class TooManyPending(QuireError):
    """The tenant has as much work waiting as it may."""

    status = 429
    code = "too_much_waiting"
    error_type = "rate_limit_error"
    retry_after = 10.0


def check_pending_limit(count: int, limit: int, what: str) -> None:
    """Raise `TooManyPending` when there is no room for one more; 0 is no limit."""
    if limit and count >= limit:
        raise TooManyPending(f"Limit of {limit} unfinished {what} per tenant reached.")


class StorageFull(InvalidRequest):
    """The tenant's files would take more room than it has."""

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
