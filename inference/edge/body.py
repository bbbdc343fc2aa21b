"""Reads request bodies within limits: into memory, or an upload into a temporary file."""

from __future__ import annotations

import asyncio
import io
import re
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from importlib import import_module
from typing import IO, Any

from channels.db import database_sync_to_async
from django.conf import settings
from django.contrib.auth import get_user
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpResponse
from django.template.loader import render_to_string

from engine.contract.errors import QuireError
from inference.errors import PayloadTooLarge, RequestTimeout, error_response
from inference.web.authentication import FailedKeyLimiter
from inference.web.views import BODY, UPLOADS, Check, ClientDisconnected, Receive, Scope
from tenants.authentication import Caller, authenticate, cached_tenant

#: An upload up to this size stays in memory.
SPOOL_BYTES = 1 << 20
#: Time that the body of a file may take to arrive: 200 MiB at 1 Mbit/s.
UPLOAD_TIMEOUT_S = 1800.0
#: Time that any other body may take.
BODY_TIMEOUT_S = 60.0
#: Maximum bytes of a body that are read before its sender is authenticated. Otherwise a hundred
#: strangers who send 10 MB each would fill a gigabyte.
ANONYMOUS_MAX_BYTES = 16 << 10


def is_upload(scope: Scope, path: str) -> bool:
    """Whether the body may be as large as a file."""
    return scope["method"] == "POST" and UPLOADS.fullmatch(path) is not None


async def read_body(scope: Scope, receive: Receive, check: Check | None = None) -> bytes:
    """Read a body, and reject it as soon as it is known to be too large.

    Args:
        check: awaited before more than `ANONYMOUS_MAX_BYTES` are read; an error that it raises ends
            the reading.

    Raises:
        PayloadTooLarge: more than `max_body_bytes`, announced or received.
        RequestTimeout: not complete within `BODY_TIMEOUT_S`, whether started or not.
        ClientGone: the connection closed first.
    """
    quire = settings.QUIRE
    announced = check_content_length(scope, quire.max_body_bytes)
    if check is not None and announced > ANONYMOUS_MAX_BYTES:
        await check()
        check = None
    body = io.BytesIO()  # returns its bytes without a copy, which takes milliseconds for 10 MB
    async with _read_timeout(BODY_TIMEOUT_S):
        async for part in _parts(receive, quire.max_body_bytes):
            body.write(part)
            if check is not None and body.tell() > ANONYMOUS_MAX_BYTES:
                await check()
                check = None
    return body.getvalue()


async def authenticate_scope(scope: Scope) -> Caller:
    """Authenticate the sender before the body is read. Raises what `authenticate` raises."""
    headers = {name.lower(): value.decode("latin1") for name, value in scope["headers"]}
    address = (scope.get("client") or [""])[0]
    caller = await authenticate(
        headers.get(b"authorization"), headers.get(b"x-api-key"), guard=FailedKeyLimiter(address)
    )
    caller.check_address(address)
    return caller


def tenant_hint(scope: Scope) -> str:
    """Tenant that the request claims, for fair scheduling only; "" without a known key."""
    authorization = key = None
    for name, value in scope["headers"]:
        if name == b"authorization":
            authorization = value.decode("latin1")
        elif name == b"x-api-key":
            key = value.decode("latin1")
    return cached_tenant(authorization, key)


async def read_upload(scope: Scope, receive: Receive) -> IO[bytes]:
    """Read a body into a temporary file, for authenticated callers: strangers fill no disk.

    Its actual length replaces the length in the headers of `scope`.

    Raises: what `read_body` raises, within `max_file_bytes` and `UPLOAD_TIMEOUT_S`; what
    `authenticate` raises, before anything is read.
    """
    quire = settings.QUIRE
    await authenticate_scope(scope)
    # The form's boundaries and other fields add to the size of the file.
    limit = quire.max_file_bytes + SPOOL_BYTES
    check_content_length(scope, limit)
    file: IO[bytes] = tempfile.SpooledTemporaryFile(SPOOL_BYTES)  # noqa: SIM115 - the caller closes
    try:
        async with _read_timeout(UPLOAD_TIMEOUT_S):
            async for part in _parts(receive, limit):
                file.write(part)
    except BaseException:
        file.close()
        raise
    # Django's form parser relies on Content-Length, which a chunked upload lacks.
    size = str(file.tell()).encode()
    headers = [
        (name, value) for name, value in scope["headers"] if name.lower() != b"content-length"
    ]
    scope["headers"] = [*headers, (b"content-length", size)]
    scope[BODY] = file
    file.seek(0)
    return file


def check_content_length(scope: Scope, limit: int) -> int:
    """The value of Content-Length, or 0. Raises `PayloadTooLarge` beyond the limit."""
    announced = next((v for k, v in scope["headers"] if k == b"content-length"), b"0")
    length = int(announced[:20]) if announced.isdigit() else 0
    if length > limit:
        raise body_too_large(limit)
    return length


async def _parts(receive: Receive, limit: int) -> AsyncIterator[bytes]:
    size, more = 0, True
    while more:
        message = await _next_part(receive)
        part: bytes = message.get("body", b"")
        more = bool(message.get("more_body"))
        size += len(part)
        if size > limit:
            raise body_too_large(limit)
        yield part


class _read_timeout:
    """`asyncio.timeout` that raises `RequestTimeout`."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._timeout = seconds, asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self._timeout.__aexit__(*error)
        except TimeoutError:
            raise body_timeout(self._seconds) from None


async def _next_part(receive: Receive) -> MutableMapping[str, Any]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnected
    return message


def body_timeout(seconds: float) -> RequestTimeout:
    """Error for a body that isn't complete in time."""
    return RequestTimeout(f"The request body did not arrive within {seconds:g} s.")


def body_too_large(limit: int) -> PayloadTooLarge:
    """Error for a body over the limit."""
    return PayloadTooLarge(f"The request body is over the limit of {limit} bytes.")


Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Paths whose body is a form with a file, or a part of a file.
FILES = re.compile(r"/console/files/upload/|/api/(?:.*/)?adapters/uploads/[^/]+/files/[^/]+/")
#: Content security policy of the page that rejects a body, like that of every page.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; base-uri 'none'; frame-ancestors 'none'"
)


class BodyLimitMiddleware:
    """Limits the size and duration of bodies; responds with 413 or 408 beyond the limits.

    Django's own handler spools a whole body to disk before any view sees it. Here anonymous senders
    are limited to a few kilobytes, and authenticated ones to the limits of their page.
    """

    def __init__(self, application: Application) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        """Serve a request. `path`: relative to the mount point of Quire."""
        body = _LimitedBody(scope, receive, path)
        has_started = False

        async def sent(message: MutableMapping[str, Any]) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await body.check()
            await self._application(scope, body.receive, sent)
        except QuireError as error:
            if has_started or error is not body.refusal:
                raise
            await _refuse(scope, path, error, send)


class _LimitedBody:
    """One body: its received size and its limits."""

    def __init__(self, scope: Scope, receive: Receive, path: str) -> None:
        quire_settings = settings.QUIRE
        self._scope, self._receive = scope, receive
        file = FILES.fullmatch(path) is not None
        self._limit = (
            quire_settings.max_file_bytes + SPOOL_BYTES if file else quire_settings.max_body_bytes
        )
        self._seconds = UPLOAD_TIMEOUT_S if file else BODY_TIMEOUT_S
        self._until = asyncio.get_running_loop().time() + self._seconds
        self._size, self._is_complete, self._size_announced = 0, False, False
        self.refusal: QuireError | None = None

    async def check(self) -> None:
        """Raise if the announced size is over the limit."""
        with self._counting_receive():
            await self._check_size(check_content_length(self._scope, self._limit))

    async def receive(self) -> MutableMapping[str, Any]:
        """The next ASGI message; raises `refusal` if it exceeds a limit."""
        if self._is_complete:
            return await self._receive()
        with self._counting_receive():
            message = await self._in_time()
            self._size += len(message.get("body", b""))
            if self._size > self._limit:
                raise body_too_large(self._limit)
            await self._check_size(self._size)
        self._is_complete = not message.get("more_body")
        return message

    async def _in_time(self) -> MutableMapping[str, Any]:
        try:
            async with asyncio.timeout_at(self._until):
                return await self._receive()
        except TimeoutError:
            raise body_timeout(self._seconds) from None

    async def _check_size(self, size: int) -> None:
        if size > ANONYMOUS_MAX_BYTES and not self._size_announced:
            await _check_authenticated(self._scope)
            self._size_announced = True

    @contextmanager
    def _counting_receive(self) -> Iterator[None]:
        try:
            yield
        except QuireError as error:
            self.refusal = error
            raise


async def _check_authenticated(scope: Scope) -> None:
    """Raise unless the sender is logged in or has a key."""
    if any(name.lower() in (b"authorization", b"x-api-key") for name, _ in scope["headers"]):
        await authenticate_scope(scope)
        return
    request: Any = ASGIRequest(dict(scope), io.BytesIO())
    store = import_module(settings.SESSION_ENGINE).SessionStore
    request.session = store(request.COOKIES.get(settings.SESSION_COOKIE_NAME))
    user = await database_sync_to_async(get_user)(request)
    if not user.is_authenticated:
        raise PayloadTooLarge(
            f"Over {ANONYMOUS_MAX_BYTES} bytes are accepted only from users who are logged in."
        )


async def _refuse(scope: Scope, path: str, error: QuireError, send: Send) -> None:
    """Reject with a page for browsers' forms, and with the API's error for other clients."""
    accept = next((value for name, value in scope["headers"] if name.lower() == b"accept"), b"")
    if b"text/html" in accept and not path.startswith(("/api/", "/console/api/")):
        page = render_to_string("413.html", {"error": error})
        answer = HttpResponse(page, status=error.status)
        answer["Content-Security-Policy"] = POLICY
    else:
        answer = error_response(error)
    # The rest of the body is not read, so the connection can't be reused.
    answer["Connection"] = "close"
    answer["Content-Length"] = str(len(answer.content))
    headers = [(name.encode("ascii"), value.encode("latin1")) for name, value in answer.items()]
    await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": answer.content})
