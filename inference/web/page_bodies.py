"""Bodies that are sent to pages: bounded while they come in.

Django's own handler spools a whole body to disk before any view sees it. Here strangers have a few
kilobytes, and whoever is logged in or has a key what their page takes, within a time.
"""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from channels.db import database_sync_to_async
from django.conf import settings
from django.contrib.auth import get_user
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpResponse
from django.template.loader import render_to_string

from engine.contract.errors import QuireError
from inference.errors import PayloadTooLarge, error_response
from inference.settings import gateway_settings
from inference.web.body import (
    SPOOL_BYTES,
    STRANGERS_BYTES,
    Receive,
    Scope,
    check_announced,
    check_caller,
    late,
    too_large,
)

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Paths below which a form or a piece carries a file.
FILES = re.compile(r"/console/files/upload/|/api/(?:.*/)?adapters/uploads/[^/]+/files/[^/]+/")
#: Of the page that refuses a body, as every page has one.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; base-uri 'none'; frame-ancestors 'none'"
)


class BoundedBodies:
    """Gives the application bodies within limits; answers 413 or 408 to all others itself."""

    def __init__(self, application: Application) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        """Serve a request. `path`: below where Quire is mounted."""
        body = _Body(scope, receive, path)
        begun = False

        async def sent(message: MutableMapping[str, Any]) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await body.check()
            await self._application(scope, body.receive, sent)
        except QuireError as error:
            if begun or error is not body.refusal:
                raise
            await _refuse(scope, path, error, send)


class _Body:
    """One body: how much of it came, and how much may."""

    def __init__(self, scope: Scope, receive: Receive, path: str) -> None:
        found = gateway_settings()
        self._scope, self._receive = scope, receive
        file = FILES.fullmatch(path) is not None
        self._limit = found.max_file_bytes + SPOOL_BYTES if file else found.max_body_bytes
        self._seconds = found.upload_timeout_s if file else found.body_timeout_s
        self._until = asyncio.get_running_loop().time() + self._seconds
        self._size, self._whole, self._known = 0, False, False
        self.refusal: QuireError | None = None

    async def check(self) -> None:
        """Raise if what is announced is too much."""
        with self._noting():
            await self._allow(check_announced(self._scope, self._limit))

    async def receive(self) -> MutableMapping[str, Any]:
        """The next part, as ASGI has it; raises `refusal`."""
        if self._whole:
            return await self._receive()
        with self._noting():
            message = await self._in_time()
            self._size += len(message.get("body", b""))
            if self._size > self._limit:
                raise too_large(self._limit)
            await self._allow(self._size)
        self._whole = not message.get("more_body")
        return message

    async def _in_time(self) -> MutableMapping[str, Any]:
        try:
            async with asyncio.timeout_at(self._until):
                return await self._receive()
        except TimeoutError:
            raise late(self._seconds) from None

    async def _allow(self, size: int) -> None:
        if size > STRANGERS_BYTES and not self._known:
            await _check_sender(self._scope)
            self._known = True

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except QuireError as error:
            self.refusal = error
            raise


async def _check_sender(scope: Scope) -> None:
    """Raise unless it's somebody who is logged in, or has a key."""
    if any(name.lower() in (b"authorization", b"x-api-key") for name, _ in scope["headers"]):
        await check_caller(scope)
        return
    request: Any = ASGIRequest(dict(scope), io.BytesIO())
    store = import_module(settings.SESSION_ENGINE).SessionStore
    request.session = store(request.COOKIES.get(settings.SESSION_COOKIE_NAME))
    user = await database_sync_to_async(get_user)(request)
    if not user.is_authenticated:
        raise PayloadTooLarge(
            f"Over {STRANGERS_BYTES} bytes are accepted only from users who are logged in."
        )


async def _refuse(scope: Scope, path: str, error: QuireError, send: Send) -> None:
    """A page for browsers' forms, the API's error for everybody else."""
    accept = next((value for name, value in scope["headers"] if name.lower() == b"accept"), b"")
    if b"text/html" in accept and not path.startswith(("/api/", "/console/api/")):
        page = render_to_string("413.html", {"error": error})
        answer = HttpResponse(page, status=error.status)
        answer["Content-Security-Policy"] = POLICY
    else:
        answer = error_response(error)
    # The rest of the body is not read: the connection can't be used again.
    answer["Connection"] = "close"
    answer["Content-Length"] = str(len(answer.content))
    headers = [(name.encode("ascii"), value.encode("latin1")) for name, value in answer.items()]
    await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": answer.content})
