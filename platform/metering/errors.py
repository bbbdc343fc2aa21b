"""What metering answers when it refuses."""

from engine.contract.errors import QuireError


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
