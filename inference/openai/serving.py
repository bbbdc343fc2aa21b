"""What the generating endpoints share: parsing, headers, waiting for a stream's first token."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import msgspec
from django.http.response import HttpResponseBase

from engine.errors import InvalidRequest
from inference.errors import as_quire_error, encode_error, report
from inference.generation import Generation, Increment
from inference.openai.schemas.base import GenerateRequest, Refused
from inference.settings import gateway_settings
from inference.web.streaming import EventStreamResponse
from inference.web.views import json_response
from metering.access import Admission

logger = logging.getLogger(__name__)

HEARTBEAT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
MAX_IGNORED_CHARS = 1024

R = TypeVar("R", bound=GenerateRequest)

_encode = msgspec.json.Encoder().encode


def parse(schema: type[R], body: dict[str, Any]) -> R:
    """The body as a checked request.

    Raises:
        InvalidRequest, pydantic.ValidationError: both become 400 with the field's name.
    """
    try:
        return schema.model_validate(body)
    except Refused as refusal:
        raise refusal.error from None


def renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """The same error in the words of the client's own fields."""
    ours = error.param
    if ours is not None and ours in names:
        theirs = names[ours]
        error.message = error.message.replace(ours, theirs)
        error.args, error.param = (error.message,), theirs
    return error


class StreamWriter(Protocol):
    """Writes one endpoint's chunks."""

    def begin(self) -> bytes:
        """What comes before the first token."""

    def write(self, increments: Iterable[Increment]) -> bytes:
        """Chunks for what is new; b"" for none."""

    def end(self) -> bytes:
        """What comes after the last token, `[DONE]` included."""


class Answer(Protocol):
    """Collects one endpoint's whole answer."""

    def take(self, increment: Increment) -> None:
        """Add what is new."""

    def body(self) -> dict[str, Any]:
        """The answer, when all is there."""


async def respond(
    generation: Generation,
    ignored: list[str],
    *,
    writer: Callable[[], StreamWriter],
    answer: Callable[[], Answer],
) -> HttpResponseBase:
    """A generation as a response, in the form that its client asked for.

    Raises: what the engine or the gateway refuses or fails with before the first byte. The
    generation is released in any case.
    """
    response: HttpResponseBase
    try:
        if generation.job.stream:
            response = await stream_response(generation, writer())
        else:
            whole = answer()
            await collect(generation, whole.take)
            response = json_response(_encode(whole.body()))
    except BaseException:
        generation.release()
        raise
    add_headers(response, generation.admission, ignored)
    return response


async def stream_response(generation: Generation, writer: StreamWriter) -> EventStreamResponse:
    """A response that streams a generation.

    Waits for the first increment, but not for ever: until then errors are HTTP errors.
    """
    first = await generation.next(gateway_settings().stream_start_wait_s)
    return EventStreamResponse(_events(generation, writer, first), generation.release)


async def _events(
    generation: Generation, writer: StreamWriter, increments: list[Increment]
) -> AsyncGenerator[bytes, None]:
    heartbeat_s = gateway_settings().sse_heartbeat_s or None
    try:
        chunk = writer.begin() + writer.write(increments)
        while not generation.finished:
            if chunk:
                yield chunk
            increments = await generation.next(heartbeat_s)
            chunk = writer.write(increments) if increments else HEARTBEAT
        yield chunk + writer.end()
    except Exception as error:
        # The status line is long gone: the error is the stream's last event, without a [DONE].
        report(error, generation.job.request_id)
        yield b"event: error\ndata: " + encode_error(as_quire_error(error)) + b"\n\n"
    finally:
        generation.release()


async def collect(generation: Generation, take: Callable[[Increment], None]) -> None:
    """Run a generation to its end."""
    while not generation.finished:
        for increment in await generation.next():
            take(increment)


def add_headers(response: HttpResponseBase, admission: Admission, ignored: list[str]) -> None:
    """`x-ratelimit-*` as OpenAI has them, and the fields that were not understood."""
    for name, value in rate_limit_headers(admission).items():
        response[name] = value
    if ignored:
        names = ", ".join(name.encode("ascii", "backslashreplace").decode() for name in ignored)
        safe = "".join(char if char.isprintable() else "?" for char in names)
        response["x-quire-ignored-fields"] = safe[:MAX_IGNORED_CHARS]


def rate_limit_headers(admission: Admission) -> dict[str, str]:
    """`x-ratelimit-limit-requests` and its like; none for what has no limit."""
    headers = {}
    for kind in ("requests", "tokens"):
        limit = getattr(admission, f"limit_{kind}")
        if limit is None:
            continue
        headers[f"x-ratelimit-limit-{kind}"] = str(limit)
        headers[f"x-ratelimit-remaining-{kind}"] = str(getattr(admission, f"remaining_{kind}"))
        reset = getattr(admission, f"reset_{kind}_s") or 0.0
        headers[f"x-ratelimit-reset-{kind}"] = f"{reset:.3f}s"
    return headers
