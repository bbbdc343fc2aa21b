"""The error hierarchy. Every expected error is a `QuireError`.

`status` and `error_type` follow OpenAI's envelope `{"error": {"message", "type", "param",
"code"}}`; higher layers subclass these, and a single renderer (`inference.errors`) writes them.
"""

import re


class QuireError(Exception):
    """Base of all expected errors.

    Attributes:
        message: one sentence for the client, with the invalid value if that helps.
        param: name of the invalid field, or None.
        code: a stable machine-readable identifier.
        status: HTTP status of a gateway's response.
        error_type: OpenAI's `type`.
    """

    status = 500
    code = "internal_error"
    error_type = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    def rename(self, theirs: str, **also: str) -> None:
        """Use the client's name of the field, and of other fields (`also`) in the message."""
        names = {**also, **({self.param: theirs} if self.param else {})}
        alternatives = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        if alternatives:
            field = re.compile(rf"(?<![\w.])(?:{alternatives})(?!\w)")
            self.message = field.sub(lambda match: names[match[0]], self.message)
        self.args, self.param = (self.message,), theirs


class InvalidRequest(QuireError, ValueError):
    """The request can't be served as it is: a field is out of its range or of the wrong type."""

    status = 400
    code = "invalid_value"
    error_type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested output don't fit the model's context.

    Attributes:
        num_tokens: the prompt's, if it doesn't fit; for a long one, those counted so far.
        max_tokens: the context's.
    """

    code = "context_length_exceeded"
    num_tokens: int | None = None
    max_tokens: int | None = None

    def with_counts(self, num_tokens: int, max_tokens: int) -> "ContextLengthExceeded":
        """The same error with both numbers."""
        self.num_tokens, self.max_tokens = num_tokens, max_tokens
        return self


class KVPoolTooSmall(InvalidRequest):
    """The request fits the context, but could never fit the replica's KV pool."""

    code = "kv_pool_too_small"


class EngineOverloaded(QuireError):
    """The engine's waiting queue is full, or a tenant's part of it.

    Attributes:
        retry_after: seconds until a retry may succeed, if known.
    """

    status = 429
    code = "engine_overloaded"
    error_type = "rate_limit_error"
    retry_after: float | None = None


class BudgetExhausted(QuireError):
    """The server's cap on a request leaves not a single token."""

    status = 429
    code = "insufficient_quota"
    error_type = "insufficient_quota"


class EngineUnavailable(QuireError):
    """No live replica serves the model."""

    status = 503
    code = "engine_unavailable"
    error_type = "server_error"


class EngineSleeping(EngineUnavailable):
    """The model sleeps, with its memory released, until an operator wakes it up."""

    code = "engine_sleeping"


class EnginePaused(EngineUnavailable):
    """An operator has paused the replica; it accepts no requests until it is resumed."""

    code = "engine_paused"


class ModelReplaced(EngineUnavailable):
    """A response was in progress, and the remaining replicas have different weights."""

    code = "model_replaced"


class EngineFault(QuireError):
    """The engine failed while it ran this request."""

    code = "engine_fault"


class PeerFault(EngineFault):
    """An engine that shares experts with this one has ended: no request here is the cause."""


class ModelLoadError(QuireError):
    """A model folder can't be loaded; the message names the file and the problem."""

    status = 400
    code = "model_load_error"
    error_type = "invalid_request_error"

    def __init__(
        self, message: str, *, param: str | None = "model", code: str | None = None
    ) -> None:
        super().__init__(message, param=param, code=code)


class BadModelConfig(ModelLoadError):
    """A checkpoint's config.json holds an invalid value."""


class ConfigError(QuireError, ValueError):
    """An engine setting is out of its range, or two contradict each other."""

    status = 400
    code = "invalid_config"
    error_type = "invalid_request_error"
