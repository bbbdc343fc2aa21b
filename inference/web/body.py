"""Reading request bodies within limits: whole into memory, or an upload into a temporary file."""

from __future__ import annotations

import asyncio
import io
import re
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import IO, Any

from inference.errors import PayloadTooLarge, RequestTimeout
from inference.settings import gateway_settings
from inference.web.guesses import Guesses
from tenants.authentication import Caller, authenticate, tenant_claimed

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Check = Callable[[], Awaitable[None]]

#: Paths whose POST carries a file, or what becomes one: they have a larger limit, for callers who
#: are known.
UPLOADS = re.compile(r"/v1/files|/v1/uploads/[^/]+/parts|/v1/messages/batches")
#: Where in the scope such a body is, for views that read it themselves.
BODY = "quire.body"
#: An upload up to this size stays in memory.
SPOOL_BYTES = 1 << 20
#: Bytes of a body that are read before its sender is known: else a hundred strangers who send 10 MB
#: each fill a gigabyte.
STRANGERS_BYTES = 16 << 10


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


def is_upload(scope: Scope, path: str) -> bool:
    """Whether the body may be as large as a file."""
    return scope["method"] == "POST" and UPLOADS.fullmatch(path) is not None


async def read_body(scope: Scope, receive: Receive, check: Check | None = None) -> bytes:
    """The whole body, refused as soon as it's known to be too large.

    Args:
        check: awaited before more than `STRANGERS_BYTES` are read; what it raises ends the reading.

    Raises:
        PayloadTooLarge: more than `max_body_bytes`, announced or sent.
        RequestTimeout: not complete within `body_timeout_s`, be it begun or not.
        ClientGone: the connection closed first.
    """
    settings = gateway_settings()
    announced = check_announced(scope, settings.max_body_bytes)
    if check is not None and announced > STRANGERS_BYTES:
        await check()
        check = None
    body = io.BytesIO()  # gives its bytes away uncopied: of 10 MB a copy takes milliseconds
    async with _deadline(settings.body_timeout_s):
        async for part in _parts(receive, settings.max_body_bytes):
            body.write(part)
            if check is not None and body.tell() > STRANGERS_BYTES:
                await check()
                check = None
    return body.getvalue()


async def check_caller(scope: Scope) -> Caller:
    """Who sends it. Raises what `authenticate` raises, before anything of the body is read."""
    headers = {name.lower(): value.decode("latin1") for name, value in scope["headers"]}
    address = (scope.get("client") or [""])[0]
    caller = await authenticate(
        headers.get(b"authorization"), headers.get(b"x-api-key"), guard=Guesses(address)
    )
    caller.check_address(address)
    return caller


def claimed_tenant(scope: Scope) -> str:
    """Whose the request seems to be, for whose turn it is: it gives no rights. "" of strangers."""
    authorization = key = None
    for name, value in scope["headers"]:
        if name == b"authorization":
            authorization = value.decode("latin1")
        elif name == b"x-api-key":
            key = value.decode("latin1")
    return tenant_claimed(authorization, key)


async def read_upload(scope: Scope, receive: Receive) -> IO[bytes]:
    """The body as a temporary file, for a caller who is known: strangers fill no disk.

    Its true length replaces what the headers in `scope` say.

    Raises: what `read_body` raises, within `max_file_bytes` and `upload_timeout_s`; what
    `authenticate` raises, before anything is read.
    """
    settings = gateway_settings()
    await check_caller(scope)
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
    scope[BODY] = file
    file.seek(0)
    return file


def check_announced(scope: Scope, limit: int) -> int:
    """The length that Content-Length says, or 0. Raises `PayloadTooLarge` beyond the limit."""
    announced = next((v for k, v in scope["headers"] if k == b"content-length"), b"0")
    length = int(announced[:20]) if announced.isdigit() else 0
    if length > limit:
        raise too_large(limit)
    return length


async def _parts(receive: Receive, limit: int) -> AsyncIterator[bytes]:
    size, more = 0, True
    while more:
        message = await _next_part(receive)
        part: bytes = message.get("body", b"")
        more = bool(message.get("more_body"))
        size += len(part)
        if size > limit:
            raise too_large(limit)
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
            raise late(self._seconds) from None


async def _next_part(receive: Receive) -> MutableMapping[str, Any]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message


def late(seconds: float) -> RequestTimeout:
    """What a body that isn't complete in time is refused with."""
    return RequestTimeout(f"The request body did not arrive within {seconds:g} s.")


def too_large(limit: int) -> PayloadTooLarge:
    """What a larger body is refused with."""
    return PayloadTooLarge(f"The request body is over the limit of {limit} bytes.")
