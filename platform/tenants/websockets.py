"""Authentication of WebSockets when they open, and repeatedly while they are open."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from channels.db import database_sync_to_async
from django.conf import settings
from django.contrib.auth import get_user
from django.db import DatabaseError, InterfaceError
from django.http import HttpRequest
from django.http.request import split_domain_port, validate_host

from common.db import run_in_db_thread
from common.loops import keep_running
from tenants.sessions import SessionSnapshot, filter_valid_sessions, needs_second_factor

#: The hosts that Django allows by default if DEBUG is on.
_DEBUG_HOSTS = [".localhost", "127.0.0.1", "[::1]"]


class SessionExpired(Exception):
    """The session expired, or its user may no longer log in."""


def origin_allowed(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the page that opened the socket is one of Quire's.

    Browsers send `Origin`, which scripts can't forge. It must name the host of the connection,
    which must be an allowed host (otherwise DNS rebinding would be possible), or be listed in
    `CSRF_TRUSTED_ORIGINS`.
    """
    origin = headers.get(b"origin", b"").decode("latin1").strip().lower()
    if not origin:
        return False
    if origin in settings.CSRF_TRUSTED_ORIGINS:
        return True
    host = headers.get(b"host", b"").decode("latin1").strip().lower()
    allowed = settings.ALLOWED_HOSTS or (_DEBUG_HOSTS if settings.DEBUG else [])
    domain, _ = split_domain_port(host)
    if not domain or not validate_host(domain, allowed):
        return False
    try:
        parts = urlsplit(origin)
        return parts.scheme in ("http", "https") and _with_port(parts) == _with_port(
            urlsplit(f"{parts.scheme}://{host}")
        )
    except ValueError:  # an invalid port
        return False


def _with_port(parts: Any) -> tuple[str | None, int]:
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


@database_sync_to_async
def user_of_session(session_key: str | None) -> Any:
    """The session's current user, or None if it has expired or the user may no longer log in."""
    if not session_key:
        return None
    request = HttpRequest()
    request.session = import_module(settings.SESSION_ENGINE).SessionStore(session_key)
    user: Any = get_user(request)
    return user if user.is_authenticated and not needs_second_factor(user) else None


# One query a second for all of a process's open sockets: an idle tab causes no query of its own,
# and closes within two seconds after its user is deactivated, demoted or logged out elsewhere.

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
OnSessionEnd = Callable[[], Awaitable[None]]


class SessionMonitor:
    """The open sockets of one event loop, and a task that checks them while there are any."""

    def __init__(self) -> None:
        self._sockets: dict[OnSessionEnd, SessionSnapshot] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, seen: SessionSnapshot, on_end: OnSessionEnd) -> None:
        """Call `on_end` once when the session is no longer valid."""
        self._sockets[on_end] = seen
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._task = loop.create_task(keep_running("session monitor", self._poll))

    def remove(self, on_end: OnSessionEnd) -> None:
        """Stop checking a socket that was closed."""
        self._sockets.pop(on_end, None)

    async def _poll(self) -> None:
        while self._sockets:
            await asyncio.sleep(POLL_INTERVAL_S)
            # A socket that is added during the query wasn't part of it, and stays.
            checked = dict(self._sockets)
            try:
                valid = await run_in_db_thread(filter_valid_sessions, set(checked.values()))
            except (DatabaseError, InterfaceError) as error:
                logger.warning("session check of open sockets failed: %s", error)
                continue
            expired = [
                on_end
                for on_end, seen in checked.items()
                if seen not in valid and on_end in self._sockets
            ]
            for on_end in expired:
                self.remove(on_end)
            await asyncio.gather(*(on_end() for on_end in expired), return_exceptions=True)


session_monitor = SessionMonitor()


NOT_LOGGED_IN, FOREIGN_ORIGIN, BAD_MESSAGES = 4401, 4403, 4409
