"""Who asks: a session, or a key with the scope `tenant:admin` or `operator`."""

from __future__ import annotations

from typing import Any

from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.permissions import SAFE_METHODS, BasePermission
from rest_framework.request import Request

from console.identity.recent import recently_authenticated
from inference.web.guesses import Guesses
from tenants import scopes
from tenants.actors import Actor, as_actor, key_actor
from tenants.authentication import authenticate_now
from tenants.errors import PermissionDenied
from tenants.models import ApiKey


class KeyHolder:
    """Stands for the user where a request came in with a key."""

    is_authenticated, is_anonymous = True, False

    def __init__(self, key: ApiKey) -> None:
        self.pk = f"key-{key.pk}"


class ManagementKeyAuthentication(BaseAuthentication):
    """`Authorization: Bearer sk-quire-...`, or `x-api-key`."""

    def authenticate(self, request: Request) -> tuple[KeyHolder, Actor] | None:
        """The key as an actor; None without one. Raises 401, 403 and 429 errors."""
        header = get_authorization_header(request).decode("latin1") or None
        x_api_key = request.META.get("HTTP_X_API_KEY")
        if header is None and x_api_key is None:
            return None
        address = request.META.get("REMOTE_ADDR") or ""
        caller = authenticate_now(header, x_api_key, guard=Guesses(address))
        caller.check_address(address)
        if not caller.scopes & {scopes.TENANT_ADMIN, scopes.OPERATOR}:
            caller.require(scopes.TENANT_ADMIN)
        rows = ApiKey.objects.select_related("tenant", "created_by", "service_account")
        key = rows.get(pk=caller.key_id)
        if key.endpoints:
            raise PermissionDenied("This key is limited to other endpoints.")
        return KeyHolder(key), key_actor(key)

    def authenticate_header(self, request: Request) -> str:
        """For `WWW-Authenticate`."""
        return 'Bearer realm="quire"'


class RecentSession(BasePermission):
    """Changes by a session need a recent proof of who one is; keys are such a proof."""

    def has_permission(self, request: Request, view: Any) -> bool:
        """Raises `PermissionDenied` with a code of its own."""
        if request.method in SAFE_METHODS or isinstance(request.auth, Actor):
            return True
        if not recently_authenticated(request):
            raise PermissionDenied(
                "This needs a recent login: confirm it's you at /account/reauthenticate/.",
                code="recent_authentication_required",
            )
        return True


def actor_of(request: Request) -> Actor:
    """Who asks."""
    return request.auth if isinstance(request.auth, Actor) else as_actor(request.user)
