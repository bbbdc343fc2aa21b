"""API keys for DRF: `Authorization: Bearer sk-quire-...`, or `x-api-key`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rest_framework.authentication import BaseAuthentication
from rest_framework.permissions import BasePermission

from tenants.authentication import Caller, authenticate

if TYPE_CHECKING:
    from django.http import HttpRequest


class ApiKeyAuthentication(BaseAuthentication):
    """Asks `tenants.authentication`, which holds the one cached look-up."""

    async def authenticate(self, request: HttpRequest) -> tuple[Caller, None]:
        """The caller. Raises `AuthenticationFailed` (401, `invalid_api_key`)."""
        headers = request.META
        caller = await authenticate(
            headers.get("HTTP_AUTHORIZATION"), headers.get("HTTP_X_API_KEY")
        )
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
