"""DRF's authentication, permission and throttle of the API.

A key is sent as `Authorization: Bearer sk-quire-...` or as `x-api-key`.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import time
from typing import TYPE_CHECKING

from django.conf import settings
from redis.exceptions import RedisError
from rest_framework.authentication import BaseAuthentication
from rest_framework.permissions import BasePermission
from rest_framework.throttling import BaseThrottle

from common.outbound_http import is_within, networks_of
from engine.contract.errors import QuireError
from metering.access import RateLimited, admit_call
from metering.redis_scripts import redis_key, redis_link
from tenants import api_keys as scopes
from tenants.audit import client_ip
from tenants.authentication import Caller, authenticate

if TYPE_CHECKING:
    from django.http import HttpRequest

logger = logging.getLogger(__name__)


#: Unknown keys that an address may try per window, and the window in seconds.
MAX_FAILED_KEYS, WINDOW_S = 50, 60
#: Maximum number of addresses counted in this process while Redis is away; the oldest are dropped.
MAX_TRACKED_ADDRESSES = 10_000
_local: dict[str, tuple[float, int]] = {}


class FailedKeyLimiter:
    """Counts the invalid keys from one address. All gateways share the counts in Redis."""

    def __init__(self, address: str) -> None:
        self._origin = client_network(address)

    async def check(self) -> None:
        """Raise `RateLimited` (429) when the address has tried too many keys."""
        name = self._name()
        try:
            value = await redis_link().execute("GET", name)
            count = int(value or 0)
        except (RedisError, OSError) as error:
            logger.debug("guesses are counted in this process alone: %s", error)
            count = self._local_count()
        if count >= MAX_FAILED_KEYS:
            raise RateLimited(
                "Too many wrong API keys came from your address. Try again in a minute.",
                retry_after=WINDOW_S - time.time() % WINDOW_S,
            )

    async def count(self) -> None:
        """Count one more invalid key."""
        name = self._name()
        self._count_locally()
        try:
            await redis_link().execute("INCR", name)
            await redis_link().execute("EXPIRE", name, WINDOW_S * 2)
        except (RedisError, OSError) as error:
            logger.debug("a guess was counted in this process alone: %s", error)

    def _name(self) -> str:
        return redis_key(f"guesses:{int(time.time() // WINDOW_S)}:{self._origin}")

    def _local_count(self) -> int:
        window, count = _local.get(self._origin, (0.0, 0))
        return count if window == time.time() // WINDOW_S else 0

    def _count_locally(self) -> None:
        count = self._local_count() + 1
        _local.pop(self._origin, None)
        _local[self._origin] = (time.time() // WINDOW_S, count)
        while len(_local) > MAX_TRACKED_ADDRESSES:
            del _local[next(iter(_local))]


def client_network(address: str) -> str:
    """An IPv4 address, or the /64 network of an IPv6 address, which its host can vary."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # a Unix socket has no address
        return "unknown"
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)


class ApiKeyAuthentication(BaseAuthentication):
    """Authenticates through `tenants.authentication`, which caches the look-ups."""

    # DRF's is synchronous; `GatewayView` awaits this one.
    async def authenticate(  # type: ignore[override]
        self, request: HttpRequest
    ) -> tuple[Caller, None]:
        """The caller. Raises `AuthenticationFailed` (401), `RateLimited` (429) for guessing."""
        headers = request.META
        address = headers.get("REMOTE_ADDR") or ""
        client_ip.set(address)
        caller = await authenticate(
            headers.get("HTTP_AUTHORIZATION"),
            headers.get("HTTP_X_API_KEY"),
            guard=FailedKeyLimiter(address),
        )
        caller.check_address(address)
        return caller, None

    def authenticate_header(self, request: HttpRequest) -> str:
        """The value of `WWW-Authenticate`."""
        return 'Bearer realm="quire"'


class HasScope(BasePermission):
    """Requires the view's `required_scope` among the key's scopes."""

    def check(self, caller: Caller, scope: str) -> None:
        """Raise `PermissionDenied` (403) when the scope is missing."""
        if scope:
            caller.require(scope)


class KeyRateThrottle(BaseThrottle):
    """Counts a call in the token buckets of its key and its tenant."""

    async def check(self, caller: Caller, cost: int) -> None:
        """Raise `RateLimited` (429) when the key or the tenant has made too many calls."""
        await admit_call(caller, cost)


BEARER = "bearer "


async def require_monitoring_access(request: HttpRequest) -> None:
    """Allow only an operator's key, the metrics token, or a configured address.

    Loopback isn't allowed by default: requests through a local proxy come from there, whoever sent
    them.

    Raises: `AuthenticationFailed` (401) without a key, `PermissionDenied` (403) for a tenant's.
    """
    if _is_allowed_address(request) or _metrics_token(request):
        return
    caller, _ = await ApiKeyAuthentication().authenticate(request)
    caller.require(scopes.OPERATOR)


async def has_monitoring_access(request: HttpRequest) -> bool:
    """Whether the caller may see all metrics and health details."""
    try:
        await require_monitoring_access(request)
    except QuireError:
        return False
    return True


def _is_allowed_address(request: HttpRequest) -> bool:
    networks = networks_of(settings.QUIRE.metrics_addresses)
    return is_within(request.META.get("REMOTE_ADDR") or "", networks)


def _metrics_token(request: HttpRequest) -> bool:
    token = settings.QUIRE.metrics_token.get_secret_value()
    header = request.META.get("HTTP_AUTHORIZATION") or ""
    if not token or header[: len(BEARER)].lower() != BEARER:
        return False
    sent_token = header[len(BEARER) :].strip()
    return hmac.compare_digest(sent_token.encode("utf-8", "surrogatepass"), token.encode())
