"""Authentication, permissions, filters, pagination and throttling of the management API."""

from __future__ import annotations

import logging
from typing import Any, cast

from django_filters import rest_framework as filters
from redis.exceptions import RedisError
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.pagination import LimitOffsetPagination
from rest_framework.permissions import SAFE_METHODS, BasePermission
from rest_framework.request import Request
from rest_framework.throttling import ScopedRateThrottle
from rest_framework.views import APIView

from accounts.reauthentication import is_recently_authenticated
from common.errors import PermissionDenied
from engine.contract.errors import InvalidRequest
from engine.system.redis_client import is_temporary
from inference.web.authentication import FailedKeyLimiter
from metering.models import Budget
from tenants import api_keys
from tenants.actors import Actor, key_actor, to_actor
from tenants.authentication import authenticate_sync
from tenants.models import ApiKey, User


class ApiKeyUser:
    """The request's user if it authenticates with an API key."""

    is_authenticated, is_anonymous = True, False

    def __init__(self, key: ApiKey) -> None:
        self.pk = f"key-{key.pk}"


class ManagementKeyAuthentication(BaseAuthentication):
    """Authenticates `Authorization: Bearer sk-quire-...` or `x-api-key`."""

    def authenticate(self, request: Request) -> tuple[ApiKeyUser, Actor] | None:
        """Return the key as an actor; None without a key. Raises 401, 403 and 429 errors."""
        header = get_authorization_header(request).decode("latin1") or None
        x_api_key = request.META.get("HTTP_X_API_KEY")
        if header is None and x_api_key is None:
            return None
        address = request.META.get("REMOTE_ADDR") or ""
        caller = authenticate_sync(header, x_api_key, guard=FailedKeyLimiter(address))
        caller.check_address(address)
        if not caller.scopes & {api_keys.TENANT_ADMIN, api_keys.OPERATOR}:
            caller.require(api_keys.TENANT_ADMIN)
        rows = ApiKey.objects.select_related("tenant", "created_by", "service_account")
        key = rows.get(pk=cast(int, caller.key_id))
        if key.endpoints:
            raise PermissionDenied("This key is limited to other endpoints.")
        return ApiKeyUser(key), key_actor(key)

    def authenticate_header(self, request: Request) -> str:
        """Return the value of `WWW-Authenticate`."""
        return 'Bearer realm="quire"'


class RequiresRecentLogin(BasePermission):
    """Requires a recent login for changes made with a session, but not for API keys."""

    def has_permission(self, request: Request, view: Any) -> bool:
        """Raises `PermissionDenied` with the code `recent_authentication_required`."""
        if request.method in SAFE_METHODS or isinstance(request.auth, Actor):
            return True
        if not is_recently_authenticated(request):
            raise PermissionDenied(
                "This needs a recent login: confirm it's you at /account/reauthenticate/.",
                code="recent_authentication_required",
            )
        return True


def get_actor(request: Request) -> Actor:
    """Return the actor of a request."""
    if isinstance(request.auth, Actor):
        return request.auth
    return to_actor(cast(User, request.user))


#: Maximum value of a primary key.
MAX_ID = 2**63 - 1


def row_number(column: str) -> filters.NumberFilter:
    """Return a filter by foreign key that doesn't look up the related row.

    django-filter's own filter does: its 400 for a missing row, but an empty list for another
    tenant's row, would reveal which ids exist.
    """
    return filters.NumberFilter(
        field_name=column, min_value=1, max_value=MAX_ID, decimal_places=0, max_digits=19
    )


class KeyFilter(filters.FilterSet):
    """Filters keys by name and by the service account that holds them."""

    service_account = row_number("service_account_id")

    class Meta:
        model = ApiKey
        fields = ("name",)


class BudgetFilter(filters.FilterSet):
    """Filters budgets by key, model and period."""

    api_key = row_number("api_key_id")

    class Meta:
        model = Budget
        fields = ("model", "period")


class ManagementPagination(LimitOffsetPagination):
    """Pagination with `?limit=` (default 50, at most 500) and `?offset=`."""

    default_limit = 50
    max_limit = 500

    def get_limit(self, request: Request) -> int:
        """Return the page size, at most `max_limit`. Raises: `InvalidRequest`."""
        limit = _number(request, "limit", self.default_limit, low=1)
        return min(limit, self.max_limit)

    def get_offset(self, request: Request) -> int:
        """Return the offset. Raises: `InvalidRequest`."""
        return _number(request, "offset", 0, low=0)


def _number(request: Request, name: str, default: int, *, low: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) >= low):
        raise InvalidRequest(
            f"{name} must be a whole number, at least {low}; got {text[:50]!r}.", param=name
        )
    return int(text)


logger = logging.getLogger(__name__)


class ManagementThrottle(ScopedRateThrottle):
    """Limits calls per minute by user or key.

    Without Redis there is no limit: revoking a key must not have to wait for Redis.
    """

    def allow_request(self, request: Request, view: APIView) -> bool:
        """Return whether the call is within the limit."""
        try:
            return bool(super().allow_request(request, view))
        except RedisError as error:
            if not is_temporary(error):
                raise
            logger.warning("management API throttling unavailable: %s", error)
            return True
