"""Who may see how the installation does: operators, and what a setting names."""

from __future__ import annotations

import hmac
import ipaddress
from typing import TYPE_CHECKING

from engine.contract.errors import QuireError
from inference.settings import gateway_settings
from inference.web.authentication import ApiKeyAuthentication
from tenants import scopes

if TYPE_CHECKING:
    from django.http import HttpRequest

BEARER = "bearer "


async def require_insider(request: HttpRequest) -> None:
    """Let an operator's key, the metrics token or a named address pass.

    Loopback is no named address by itself: a proxy's requests come from there, whoever sent them.

    Raises: `AuthenticationFailed` (401) without a key, `PermissionDenied` (403) for a tenant's.
    """
    if _named_address(request) or _metrics_token(request):
        return
    caller, _ = await ApiKeyAuthentication().authenticate(request)
    caller.require(scopes.OPERATOR)


async def is_insider(request: HttpRequest) -> bool:
    """The same, for what others may see a part of."""
    try:
        await require_insider(request)
    except QuireError:
        return False
    return True


def _named_address(request: HttpRequest) -> bool:
    networks = gateway_settings().metrics_addresses
    if not networks:
        return False
    try:
        address = ipaddress.ip_address(request.META.get("REMOTE_ADDR") or "")
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return any(address in ipaddress.ip_network(network) for network in networks)


def _metrics_token(request: HttpRequest) -> bool:
    token = gateway_settings().metrics_token
    header = request.META.get("HTTP_AUTHORIZATION") or ""
    if not token or header[: len(BEARER)].lower() != BEARER:
        return False
    given = header[len(BEARER) :].strip()
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), token.encode())
