"""`RequestContext`: what is known of a request apart from its body, from its view to the ledger."""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import ParamSpec, TypeVar

from django.conf import settings

from engine.contract.errors import InvalidRequest, QuireError
from inference.errors import as_quire_error
from inference.loop.offload import get_render_pool
from inference.request.position import StreamPosition
from metering.access import RequestTrace, UsageRecord, log_rejection
from tenants.authentication import Caller

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class RequestRecord:
    """Fields of the request log that become known while the request runs.

    Attributes:
        endpoint: `endpoint_of` its path, for a request that is rejected.
        model: as the client named it.
        answer_id: the response's id, if it differs from the ledger's.
        admitted: whether a generation was admitted, which logs the request when it ends.
    """

    endpoint: str
    model: str = ""
    stream: bool = False
    answer_id: str = ""
    admitted: bool = False


def endpoint_of(path: str) -> str:
    """Name of a path in the ledger: `/v1/chat/completions` is "chat.completions"."""
    return path.removeprefix("/v1/").strip("/").replace("/", ".")[:100]


class PendingIdempotentResponse:
    """The whole response to a request with an idempotency key, until it's stored.

    It is stored before its generation is billed. Otherwise a gateway that was killed in between
    would have billed a response that its client never received and would pay for again. The process
    that settles for such a gateway looks for it (`metering.open_requests.response_stored_key`).

    Attributes:
        requests: ids of what was generated for it, as the ledger has them.
        done: set when it's stored, or won't be.
    """

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.done = asyncio.Event()


TIMEOUT_HEADER = "X-Request-Timeout"


@dataclass(frozen=True, slots=True)
class ClientTimeout:
    """Client's timeout. A request that can't be answered in time is refused at once.

    Attributes:
        first_byte_s: until the response begins (`X-Request-Timeout`); infinite by default.
        read_s: between bytes (`x-stainless-read-timeout`, which the Python SDKs of OpenAI and
            Anthropic send). It limits whole responses alone: a stream gets comment lines meanwhile.
    """

    first_byte_s: float = math.inf
    read_s: float = math.inf

    @classmethod
    def from_headers(cls, first_byte: str | None, read: str | None) -> ClientTimeout:
        """Raises `InvalidRequest` unless `X-Request-Timeout` is a number above 0; an SDK's own
        header is never refused."""
        if first_byte is None and read is None:
            return NO_TIMEOUT
        first_byte_s = math.inf if first_byte is None else _seconds(first_byte)
        if first_byte_s is None:
            raise InvalidRequest(f"{TIMEOUT_HEADER} must be seconds above 0.", param=TIMEOUT_HEADER)
        return cls(first_byte_s, _seconds(read or "") or math.inf)

    def seconds(self, *, stream: bool) -> float:
        """Seconds that the client waits for the first byte of its response."""
        return self.first_byte_s if stream else min(self.first_byte_s, self.read_s)


NO_TIMEOUT = ClientTimeout()


def _seconds(text: str) -> float | None:
    try:
        value = float(text) if len(text) < 32 else math.nan
    except ValueError:
        return None
    return value if value > 0 and math.isfinite(value) else None


_SAFE = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")


@dataclass(slots=True)
class RequestIds:
    """Generates a request's ids. The first one has the digits of the request's own id if we
    generated it: a header with `req-abc...` then belongs to `chatcmpl-abc...` in the ledger.

    Attributes:
        reserved_hex: these digits, until they are used.
    """

    reserved_hex: str = ""

    def new(self, prefix: str) -> str:
        """`prefix-` and 128 random bits in hexadecimal."""
        digits, self.reserved_hex = self.reserved_hex or secrets.token_hex(16), ""
        return f"{prefix}-{digits}"


def new_id(prefix: str) -> str:
    """`prefix-` and 128 random bits in hexadecimal."""
    return f"{prefix}-{secrets.token_hex(16)}"


def is_safe_request_id(header: str) -> str:
    """The client's request id; "" unless it is a single safe word."""
    return header if _SAFE.fullmatch(header) and "//" not in header else ""


def sanitize_request_id(header: str | None) -> str:
    """The client's `X-Request-Id` if it is a single safe word, else a new one.

    It labels log lines and the response. A client's id never serves as a key: usage is keyed by an
    id that only the server can generate.
    """
    return is_safe_request_id(header or "") or new_id("req")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """One request, from its entry to the ledger: views, workers and sockets create it, `Job`
    carries it.

    Attributes:
        request_id: its `x-request-id`; "" in workers and the playground.
        ids: generates ids of what is generated for it.
        received_at: `time.perf_counter()` when the request was complete.
        last_event_id: the event after which the client resumes its stream; None for a new response.
        is_large: whether processing the request takes so long that it is offloaded: a large body,
            or a long conversation that the body refers to.
        client_timeout: how long the client waits.
        bill_partial: whether an answer that ended early is billed. False for one that a worker
            generates again after an interruption.
        read_until: the last item of the stored conversation that its prompt was built from, 0 of an
            empty one; None without a conversation. The conversation may grow while a stream of it
            is open: another gateway that resumes the stream must build the same prompt.
        record: what is logged of it; None for a request that isn't logged.
        pending_response: the response that its idempotency key will have; None without a key.
    """

    caller: Caller
    request_id: str = ""
    ids: RequestIds = field(default_factory=RequestIds)
    received_at: float = field(default_factory=time.perf_counter)
    last_event_id: str | None = None
    is_large: bool = False
    client_timeout: ClientTimeout = NO_TIMEOUT
    bill_partial: bool = True
    read_until: int | None = None
    record: RequestRecord | None = None
    pending_response: PendingIdempotentResponse | None = None

    @property
    def position(self) -> StreamPosition | None:
        """Where the client resumes its stream. Raises `InvalidRequest` for an unknown event id."""
        return None if self.last_event_id is None else StreamPosition.parse(self.last_event_id)

    async def offload(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that processes the whole request; in a thread if the request is large.

        Raises: what `RenderPool.run` raises.
        """
        if not self.is_large:
            return function(*args, **kwargs)
        limit_s, tenant = settings.QUIRE.render_timeout_s, self.caller.tenant
        return await get_render_pool().run_in_thread(tenant, limit_s, function, *args, **kwargs)


def log_rejected_request(ctx: RequestContext, error: BaseException) -> None:
    """Log a request that ended with an error, unless a generation was admitted for it."""
    record = ctx.record
    if record is None or record.admitted:
        return
    rejection = as_quire_error(error)
    if rejection.status == HTTPStatus.UNAUTHORIZED:
        return
    code = str(rejection.code or "")
    kind = (ctx.caller.tenant_id, ctx.caller.key_id, record.endpoint, rejection.status, code)
    log_rejection(kind, lambda: _rejection_entry(ctx, record, rejection))


def _rejection_entry(
    ctx: RequestContext, record: RequestRecord, error: QuireError
) -> tuple[UsageRecord, RequestTrace]:
    duration = time.perf_counter() - ctx.received_at
    usage = UsageRecord(
        request_id=new_id("refused"),
        tenant_id=ctx.caller.tenant_id,
        key_id=ctx.caller.key_id,
        user_id=ctx.caller.user_id,
        endpoint=record.endpoint,
        model=record.model,
        prompt_tokens=0,
        completion_tokens=0,
        status=error.status,
        started_at=time.time() - duration,
        duration_ms=duration * 1000,
        stream=record.stream,
    )
    trace = RequestTrace(
        header_id=ctx.request_id,
        answer_id=record.answer_id,
        code=str(error.code or ""),
        message=f"{error.param}: {error.message}" if error.param else error.message,
    )
    return usage, trace
