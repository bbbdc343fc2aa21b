"""Single-user mode: requests from this machine need no API key.

`quire serve` without `--api-key` on a loopback address authenticates such requests with the key
created at the first start, as long as there is only one tenant, one user and no other key.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.db import DatabaseError, InterfaceError

from common.cached_lookup import AsyncTTLCache
from common.db import in_admission_thread
from config.up.first_run import Credentials
from tenants import api_keys
from tenants.authentication import STALE_S, TTL_S
from tenants.models import ApiKey, Tenant, User

Message = MutableMapping[str, Any]
Application = Callable[[Message, Any, Any], Awaitable[None]]

#: Headers that proxies add. Behind a proxy, any client seems to be on this machine.
_PROXY_HEADERS = frozenset(
    {b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"}
)


def is_loopback(host: str) -> bool:
    """Return whether an address or host name is a loopback one."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def has_single_user(api_key: str) -> bool:
    """Return whether there is one tenant, one user and no unrevoked key other than `api_key`."""
    other_keys = ApiKey.objects.filter(revoked_at__isnull=True)
    other_keys = other_keys.exclude(public_id=api_keys.lookup_id(api_key))
    return Tenant.objects.count() == 1 and User.objects.count() == 1 and not other_keys.exists()


def ensure_metrics_token() -> None:
    """Give the gateways started by this process a token for /metrics."""
    os.environ.setdefault("QUIRE_METRICS_TOKEN", secrets.token_urlsafe(32))


class SingleUser:
    """ASGI middleware that authenticates requests without a key as the instance's user."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._api_key = Credentials.read(Path(settings.DATA_DIR)).api_key
        self._metrics_token = settings.QUIRE.metrics_token.get_secret_value()
        self._answers: AsyncTTLCache[str, bool] = AsyncTTLCache(ttl=TTL_S, size=1)

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        """Add the key if the request is the single user's, and pass it on."""
        if scope["type"] != "lifespan" and is_own_request(scope) and await self._has_single_user():
            headers = [pair for pair in scope["headers"] if pair[0] not in _KEY_HEADERS]
            is_metrics = scope["path"] == f"{scope.get('root_path', '')}/metrics"
            key = self._metrics_token if is_metrics else self._api_key
            authorization = (b"authorization", f"Bearer {key}".encode())
            scope = {**scope, "headers": [*headers, authorization]}
        await self._application(scope, receive, send)

    async def _has_single_user(self) -> bool:
        async def look_up() -> bool:
            return await in_admission_thread(has_single_user, self._api_key)

        try:
            return await self._answers.get("", look_up)
        except (DatabaseError, InterfaceError):
            return self._answers.get_if_younger("", STALE_S) or False


_KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})


def is_own_request(scope: Message) -> bool:
    """Return whether a program on this machine sent the request without a key of Quire's.

    Pages of other sites may send requests to this machine too: the browser then names the site in
    `Origin`, or in `Host` if the site's name resolves to this machine. A request with a cookie
    belongs to a logged-in user.
    """
    client, headers = scope.get("client"), dict(scope["headers"])
    if client is None or not is_loopback(client[0]) or b"cookie" in headers:
        return False
    if not _PROXY_HEADERS.isdisjoint(headers):
        return False
    origins = [b"//" + headers.get(b"host", b"")]
    origins += [headers[b"origin"]] if b"origin" in headers else []
    if not all(_is_this_machine(_hostname(origin)) for origin in origins):
        return False
    sent = [headers[name] for name in _KEY_HEADERS if name in headers]
    return all(map(_is_placeholder, sent))


def _is_this_machine(host: str) -> bool:
    """Return whether a host is this machine; the unspecified address connects to loopback."""
    return is_loopback(host) or host in ("0.0.0.0", "::")  # noqa: S104 - nothing is bound here


def _hostname(address: bytes) -> str:
    try:
        return urlsplit(address.decode("latin-1")).hostname or ""
    except ValueError:
        return ""


def _is_placeholder(header: bytes) -> bool:
    """Return whether a key is none of an instance of Quire's, such as EMPTY or token-abc123: what
    programs for vLLM send where no key is needed.
    """
    text = header.decode("latin-1").strip()
    key = text[len("bearer") :].strip() if text.lower().startswith("bearer") else text
    return " " not in key and not key.startswith(api_keys.PREFIX)
