"""What the control plane answers when it refuses."""

from engine.contract.errors import InvalidRequest, QuireError


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
    """It isn't there, or it's a stranger's: both look the same."""

    status = 404
    code = "not_found"
    error_type = "invalid_request_error"


class Conflict(QuireError):
    """It exists already, or somebody else is changing it right now."""

    status = 409
    code = "conflict"
    error_type = "invalid_request_error"


class ServiceUnavailable(QuireError):
    """The database or Redis can't be reached; trying again later makes sense."""

    status = 503
    code = "service_unavailable"
    error_type = "server_error"


class QueryTimeout(InvalidRequest):
    """What was asked of the database takes it too long."""

    code = "query_timeout"
