"""API keys for DRF: `Authorization: Bearer sk-quire-...`, or `x-api-key`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rest_framework.authentication import BaseAuthentication
from rest_framework.permissions import BasePermission

from inference.web.guesses import Guesses
from tenants.audit import acting_from
from tenants.authentication import Caller, authenticate

if TYPE_CHECKING:
    from django.http import HttpRequest


class ApiKeyAuthentication(BaseAuthentication):
    """Asks `tenants.authentication`, which holds the one cached look-up."""

    async def authenticate(self, request: HttpRequest) -> tuple[Caller, None]:
        """The caller. Raises `AuthenticationFailed` (401), `RateLimited` (429) for guessing."""
        headers = request.META
        address = headers.get("REMOTE_ADDR") or ""
        acting_from.set(address)
        caller = await authenticate(
            headers.get("HTTP_AUTHORIZATION"),
            headers.get("HTTP_X_API_KEY"),
            guard=Guesses(address),
        )
        caller.check_address(address)
        return caller, None

    def authenticate_header(self, request: HttpRequest) -> str:
        """For `WWW-Authenticate`."""
        return 'Bearer realm="quire"'


class HasScope(BasePermission):
    """The view's `required_scope` must be among the key's scopes."""

    def check(self, caller: Caller, scope: str) -> None:
        """Raise `PermissionDenied` (403) when the scope is missing."""
        if scope:
            caller.require(scope)
