"""Who may open the playground's socket, and whether they still may."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from channels.db import database_sync_to_async
from django.conf import settings
from django.contrib.auth import get_user
from django.http import HttpRequest
from django.http.request import split_domain_port, validate_host

from tenants.second_factor import lacks_second_factor

#: What Django allows while DEBUG is on and no hosts are named.
_DEBUG_HOSTS = [".localhost", "127.0.0.1", "[::1]"]


class SessionEnded(Exception):
    """The session expired, or its user may not log in any more."""


def origin_allowed(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the page that opened the socket is ours.

    Browsers send `Origin` and scripts can't forge it. It must name the host that was connected to,
    which must be one of ours (or a page elsewhere could bind its name to our address), or be among
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
    except ValueError:  # a port that is no number
        return False


def _with_port(parts: Any) -> tuple[str | None, int]:
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


@database_sync_to_async
def user_of_session(session_key: str | None) -> Any:
    """The session's user as of now, or None: it may have expired, or its user may not go on."""
    if not session_key:
        return None
    request = HttpRequest()
    request.session = import_module(settings.SESSION_ENGINE).SessionStore(session_key)
    user: Any = get_user(request)
    return user if user.is_authenticated and not lacks_second_factor(user) else None
