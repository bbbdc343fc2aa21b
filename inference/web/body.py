"""Reading request bodies within limits: whole into memory, or an upload into a temporary file."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import IO, Any

from inference.errors import PayloadTooLarge, RequestTimeout
from inference.settings import gateway_settings
from tenants.authentication import authenticate

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

#: Paths whose POST carries a file: they have a larger limit, for callers who are known.
UPLOADS = frozenset({"/v1/files"})
#: An upload up to this size stays in memory.
SPOOL_BYTES = 1 << 20


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


def is_upload(scope: Scope, path: str) -> bool:
    """Whether the body may be as large as a file."""
    return scope["method"] == "POST" and path in UPLOADS


async def read_body(scope: Scope, receive: Receive) -> bytes:
    """The whole body, refused as soon as it's known to be too large.

    Raises:
        PayloadTooLarge: more than `max_body_bytes`, announced or sent.
        RequestTimeout: not complete within `body_timeout_s`.
        ClientGone: the connection closed first.
    """
    settings = gateway_settings()
    check_announced(scope, settings.max_body_bytes)
    message = await _next_part(receive)
    first: bytes = message.get("body", b"")
    if not message.get("more_body"):
        if len(first) > settings.max_body_bytes:
            raise _too_large(settings.max_body_bytes)
        return first
    body = bytearray(first)
    async with _deadline(settings.body_timeout_s):
        async for part in _parts(receive, settings.max_body_bytes - len(first)):
            body += part
    return bytes(body)


async def read_upload(scope: Scope, receive: Receive) -> IO[bytes]:
    """The body as a temporary file, for a caller who is known: strangers fill no disk.

    Its true length replaces what the headers in `scope` say.

    Raises: what `read_body` raises, within `max_file_bytes` and `upload_timeout_s`; what
    `authenticate` raises, before anything is read.
    """
    settings = gateway_settings()
    headers = {name.lower(): value.decode("latin1") for name, value in scope["headers"]}
    caller = await authenticate(headers.get(b"authorization"), headers.get(b"x-api-key"))
    caller.check_address((scope.get("client") or [""])[0])
    # Boundaries and the other fields of the form come on top of the file.
    limit = settings.max_file_bytes + SPOOL_BYTES
    check_announced(scope, limit)
    file: IO[bytes] = tempfile.SpooledTemporaryFile(SPOOL_BYTES)  # noqa: SIM115 - the caller closes
    try:
        async with _deadline(settings.upload_timeout_s):
            async for part in _parts(receive, limit):
                file.write(part)
    except BaseException:
        file.close()
        raise
    # Django's parser of forms believes in Content-Length alone; a chunked upload has none.
    size = str(file.tell()).encode()
    kept = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
    scope["headers"] = [*kept, (b"content-length", size)]
    file.seek(0)
    return file


def check_announced(scope: Scope, limit: int) -> None:
    """Raise `PayloadTooLarge` when Content-Length says so."""
    announced = next((v for k, v in scope["headers"] if k == b"content-length"), b"0")
    if announced.isdigit() and int(announced[:20]) > limit:
        raise _too_large(limit)


async def _parts(receive: Receive, limit: int) -> AsyncIterator[bytes]:
    size, more = 0, True
    while more:
        message = await _next_part(receive)
        part: bytes = message.get("body", b"")
        more = bool(message.get("more_body"))
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        yield part


class _deadline:
    """`asyncio.timeout` that ends in a `RequestTimeout`."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._timeout = seconds, asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self._timeout.__aexit__(*error)
        except TimeoutError:
            raise RequestTimeout(
                f"The request body did not arrive within {self._seconds:g} s."
            ) from None


async def _next_part(receive: Receive) -> MutableMapping[str, Any]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The request body is over the limit of {limit} bytes.")
