"""Authentication: from an API key or a session to a `Caller`.

Each process looks a key up about once a second; concurrent requests share the look-up, and a key in
constant use never waits, since its entry is refreshed before it expires. Every refusal takes the
same path: hash, look-up, comparison in constant time.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

from asgiref.sync import async_to_sync
from django.db import DatabaseError, InterfaceError
from django.db.models import OuterRef, QuerySet, Subquery
from django.utils import timezone

from common.cached_lookup import AsyncTTLCache
from common.db import in_admission_thread
from common.errors import AuthenticationFailed, NotFound, PermissionDenied, ServiceUnavailable
from common.outbound_http import networks_of
from tenants import api_keys, signals
from tenants.caller import AuthFailure, Caller
from tenants.models import ApiKey, Membership, Role, Tenant, User

__all__ = [
    "AuthenticationFailed",
    "Caller",
    "PermissionDenied",
    "ServiceUnavailable",
    "authenticate",
    "authenticate_sync",
    "cached_tenant",
    "caller_for_user",
    "check_still_valid",
    "get_cached_caller",
    "is_still_valid_cached",
    "reload_caller",
]

logger = logging.getLogger(__name__)

#: Maximum time that a revoked key works in processes other than the one that revoked it. Streams
#: check every half second, and entries are refreshed from half of this age on, so that streams of a
#: revoked key end within two seconds.
TTL_S = 1.6
#: While the database is unreachable, keys used this recently continue to work.
STALE_S = 60.0
CACHED_KEYS = 10_000
LAST_USED_EVERY = timedelta(minutes=1)
MAX_HEADER = api_keys.MAX_CHARS + 16
_NO_DIGEST = "0" * 64


UNKNOWN = AuthFailure("Incorrect API key provided.")
MISSING = AuthFailure(
    "No API key was provided. Send it as `Authorization: Bearer sk-quire-...` or as `x-api-key`."
)
REVOKED = AuthFailure("This API key was revoked.")
EXPIRED = AuthFailure("This API key has expired.")
INACTIVE = AuthFailure("This tenant is disabled.", forbidden=True)
NO_HOLDER = AuthFailure("The holder of this API key may no longer use it.")
NO_MEMBER = AuthFailure("You are in no active tenant.", forbidden=True)

_key_cache: AsyncTTLCache[str, Caller | AuthFailure] = AsyncTTLCache(ttl=TTL_S, size=CACHED_KEYS)
# Unknown keys have their own cache, so that a flood of guesses can't evict working keys.
_guesses: AsyncTTLCache[str, Caller | AuthFailure] = AsyncTTLCache(ttl=TTL_S, size=CACHED_KEYS)


class FailureLimiter(Protocol):
    """Limits the unknown keys that an address may send."""

    async def check(self) -> None:
        """Raise if the address is over the limit. Called before the database is queried."""

    async def count(self) -> None:
        """Count a key that doesn't exist."""


async def authenticate(
    authorization: str | None, x_api_key: str | None = None, *, guard: FailureLimiter | None = None
) -> Caller:
    """The caller behind an `Authorization: Bearer` header, or behind `x-api-key` without one.

    Raises: `AuthenticationFailed` (401), `PermissionDenied` (403, the tenant is disabled),
    `ServiceUnavailable` (503, the database is unreachable and the key isn't cached), and what
    the guard raises for a key that isn't cached.
    """
    token = _token(authorization, x_api_key)
    if token is None:
        raise MISSING.error()
    digest = api_keys.hash_key(token)
    # Any text is looked up, whether or not its id exists, so that timing reveals nothing.
    public_id = api_keys.lookup_id(token)
    result = _get_cached(digest, lambda: _look_up(public_id, digest))
    if result is None:
        # A key that worked recently isn't limited by guesses of others at the same address.
        limiter = guard if _key_cache.get_if_younger(digest, STALE_S) is None else None
        if limiter is not None and _guesses.peek(digest) is None:
            await limiter.check()
        result = await _find(digest, lambda: _look_up(public_id, digest), limiter)
    return _require_caller(result)


def cached_tenant(authorization: str | None, x_api_key: str | None) -> str:
    """The cached tenant of a key, "" if there is none. Never queries the database.

    Only for fair queueing: the key may have been revoked since.
    """
    token = _token(authorization, x_api_key)
    cached = None if token is None else _key_cache.get_if_younger(api_keys.hash_key(token), STALE_S)
    return cached.tenant if isinstance(cached, Caller) else ""


def get_cached_caller(authorization: str | None, x_api_key: str | None) -> Caller | None:
    """Result of `authenticate` if it needs no database query; None otherwise, also where it
    would raise.
    """
    token = _token(authorization, x_api_key)
    if token is None:
        return None
    digest = api_keys.hash_key(token)
    cached = _get_cached(digest, lambda: _look_up(api_keys.lookup_id(token), digest))
    return cached if isinstance(cached, Caller) else None


def authenticate_sync(
    authorization: str | None, x_api_key: str | None = None, *, guard: FailureLimiter
) -> Caller:
    """`authenticate` for synchronous views with few requests: nothing is cached."""
    token = _token(authorization, x_api_key)
    if token is None:
        raise MISSING.error()
    async_to_sync(guard.check)()
    result = _look_up(api_keys.lookup_id(token), api_keys.hash_key(token))
    if result is UNKNOWN:
        async_to_sync(guard.count)()
    return _require_caller(result)


def _require_caller(result: Caller | AuthFailure) -> Caller:
    if isinstance(result, AuthFailure):
        raise result.error()
    return result


async def _find(
    name: str, look_up: Callable[[], Caller | AuthFailure], guard: FailureLimiter | None = None
) -> Caller | AuthFailure:
    """Query the database, or use the cached result while it is unreachable."""

    async def query() -> Caller | AuthFailure:
        result = await in_admission_thread(look_up)
        if result is UNKNOWN and guard is not None:
            await guard.count()
        return result

    generation = _key_cache.generation
    try:
        result = await _guesses.get(name, query)
    except ServiceUnavailable:
        stale = _key_cache.get_if_younger(name, STALE_S)
        if stale is None:
            raise
        return stale
    if result is not UNKNOWN:
        _guesses.forget(name)
        _key_cache.store(name, result, generation)
    return result


def _get_cached(
    name: str, look_up: Callable[[], Caller | AuthFailure]
) -> Caller | AuthFailure | None:
    """The cached result unless it has expired; one that is about to expire is refreshed."""
    return _key_cache.get_cached(name, lambda: in_admission_thread(look_up))


def is_still_valid_cached(caller: Caller) -> bool:
    """`check_still_valid` if that needs no database query; False otherwise.

    Raises: what `authenticate` raises.
    """
    if caller.key_id is None and caller.user_id is None:
        return True
    result = _get_cached(*_cache_entry(caller.key_id, caller.user_id, caller.tenant))
    if result is None:
        return False
    _require_caller(result)
    return True


async def check_still_valid(caller: Caller) -> None:
    """Check that an admitted caller would be admitted now; cheap enough to call during a stream.

    Raises: what `authenticate` raises, but nothing while the database is unreachable.
    """
    if caller.key_id is None and caller.user_id is None:
        return
    try:
        await reload_caller(caller.key_id, caller.user_id, caller.tenant)
    except ServiceUnavailable:
        return


async def reload_caller(key_id: int | None, user_id: int | None, tenant: str) -> Caller:
    """The caller of an earlier request, with their current rights.

    Raises: what `authenticate` raises; `AuthenticationFailed` when key and user are gone.
    """
    name, look_up = _cache_entry(key_id, user_id, tenant)
    return _require_caller(_get_cached(name, look_up) or await _find(name, look_up))


def _cache_entry(
    key_id: int | None, user_id: int | None, tenant: str
) -> tuple[str, Callable[[], Caller | AuthFailure]]:
    """Cache key of an earlier caller, and the function that looks them up."""
    if key_id is not None:
        return f"#{key_id}", partial(_look_up_id, key_id)
    if user_id is not None:
        return f"@{user_id}/{tenant}", partial(_look_up_user, user_id, tenant)
    raise UNKNOWN.error()


async def caller_for_user(user: User, tenant_slug: str | None = None) -> Caller:
    """The caller of a logged-in user, in the named tenant or the first that they joined.

    Raises: `AuthenticationFailed` without an active user; `PermissionDenied` for a stranger to the
    tenant. A viewer's missing rights show in `scopes`.
    """
    if not getattr(user, "is_authenticated", False):
        raise AuthenticationFailed("Log in first.", code="not_logged_in")
    return _require_caller(await in_admission_thread(_look_up_user, user.pk, tenant_slug))


def _token(authorization: str | None, x_api_key: str | None) -> str | None:
    """The key in the headers, or None."""
    if not authorization:
        return x_api_key or None
    scheme, _, token = authorization[:MAX_HEADER].partition(" ")
    if scheme.lower() != "bearer" or len(authorization) > MAX_HEADER:
        return f"\0{authorization[:MAX_HEADER]}"  # matches no key
    return token.strip(" ") or None


def _look_up(public_id: str, digest: str) -> Caller | AuthFailure:
    """One indexed query and one comparison, whatever was sent."""
    try:
        key = _keys().filter(public_id=public_id).first()
        stored = key.digest if key else _NO_DIGEST
        matches = hmac.compare_digest(stored, digest)
        return _check_key(key) if key is not None and matches else UNKNOWN
    except (DatabaseError, InterfaceError) as error:
        raise _unavailable(error) from error


def _look_up_id(key_id: int) -> Caller | AuthFailure:
    try:
        key = _keys().filter(pk=key_id).first()
        return _check_key(key) if key is not None else UNKNOWN
    except (DatabaseError, InterfaceError) as error:
        raise _unavailable(error) from error


def _keys() -> QuerySet[ApiKey]:
    """Keys with their tenant, holder and the holder's role, in one query."""
    role = Membership.objects.filter(user=OuterRef("created_by"), tenant=OuterRef("tenant"))
    return ApiKey.objects.select_related("tenant", "created_by", "service_account").annotate(
        holders_role=Subquery(role.values("role")[:1])
    )


def _scopes_of_key(key: ApiKey) -> frozenset[str] | None:
    """Scopes that the key's holder still has; None if they may not use the key."""
    granted = frozenset(key.scopes)
    account, person = key.service_account, key.created_by
    if account is not None:
        return granted & _scopes_for(Role(account.role)) if account.active else None
    if person is None:
        return granted  # created by a command: held by the tenant
    if not person.is_active:
        return None
    if person.is_superuser:
        return granted
    role: str | None = key.holders_role
    return None if role is None else granted & _scopes_for(Role(role))


def _check_key(key: ApiKey) -> Caller | AuthFailure:
    """The caller of a key whose secret matched, or why it may not be used."""
    state = key.state()
    if state != "active":
        return REVOKED if state == "revoked" else EXPIRED
    if not key.tenant.active:
        return INACTIVE
    allowed = _scopes_of_key(key)
    if allowed is None:
        return NO_HOLDER
    _update_last_used(key)
    return _caller(
        key.tenant,
        key_id=key.pk,
        scopes=allowed,
        key_requests_per_minute=key.requests_per_minute,
        key_tokens_per_minute=key.tokens_per_minute,
        key_media_limits=key.media_limits,
        key_family=key.first_id or key.pk,
        key_max_running_requests=key.max_running_requests,
        max_context_tokens=key.max_context_tokens,
        models=key.allowed_models,
        endpoints=tuple(key.endpoints),
        networks=networks_of(key.addresses),
    )


def _update_last_used(key: ApiKey) -> None:
    """Record the use, at most once a minute: requests shouldn't cost a write each."""
    now = timezone.now()
    if key.last_used_at is None or now - key.last_used_at > LAST_USED_EVERY:
        try:
            ApiKey.objects.filter(pk=key.pk).update(last_used_at=now)
        except DatabaseError as error:  # a read-only or busy database still authenticates
            logger.warning("last use of %s was not noted: %s", key.prefix, error)


def _look_up_user(user_id: int, tenant_slug: str | None) -> Caller | AuthFailure:
    try:
        user = User.objects.filter(pk=user_id, is_active=True).first()
        if user is None:
            return AuthFailure("This user may not log in.")
        memberships = Membership.objects.filter(user=user, tenant__active=True)
        if tenant_slug is not None:
            memberships = memberships.filter(tenant__slug=tenant_slug)
        membership = memberships.select_related("tenant").first()
        if membership is not None:
            return _caller(
                membership.tenant, user_id=user_id, scopes=_scopes_of(user, Role(membership.role))
            )
        if user.is_superuser:
            return _operators_tenant(user, tenant_slug)
    except (DatabaseError, InterfaceError) as error:
        raise _unavailable(error) from error
    return NO_MEMBER


def caller_of_tenant(slug: str) -> Caller:
    """The installation itself in a tenant, for requests that neither a person nor a key sends.

    Raises `NotFound`.
    """
    tenant = Tenant.objects.filter(slug=slug, active=True).first()
    if tenant is None:
        raise NotFound(f"Tenant {slug} not found.")
    return _caller(tenant, scopes=frozenset({api_keys.INFERENCE}))


def _operators_tenant(user: User, tenant_slug: str | None) -> Caller | AuthFailure:
    """The superuser in the named tenant, by default the oldest."""
    tenants = Tenant.objects.filter(active=True)
    if tenant_slug is not None:
        tenants = tenants.filter(slug=tenant_slug)
    tenant = tenants.order_by("pk").first()
    return NO_MEMBER if tenant is None else _caller(tenant, user_id=user.pk, scopes=api_keys.ALL)


def _scopes_of(user: User, role: Role) -> frozenset[str]:
    if user.is_superuser:
        return api_keys.ALL
    return _scopes_for(role) & api_keys.DEFAULT


def _scopes_for(role: Role) -> frozenset[str]:
    """Scopes that keys of holders with this role may have."""
    if role.rank >= Role.ADMIN.rank:
        return api_keys.ALL - {api_keys.OPERATOR}
    return api_keys.DEFAULT - ({api_keys.INFERENCE} if role == Role.VIEWER else set())


def _caller(
    tenant: Tenant,
    *,
    scopes: frozenset[str],
    key_id: int | None = None,
    user_id: int | None = None,
    key_requests_per_minute: int | None = None,
    key_tokens_per_minute: int | None = None,
    max_context_tokens: int | None = None,
    models: Sequence[str] = (),
    **key_fields: Any,
) -> Caller:
    allowed = [frozenset(names) for names in (tenant.allowed_models, models) if names]
    context_limits = [n for n in (tenant.max_context_tokens, max_context_tokens) if n]
    return Caller(
        tenant_id=tenant.pk,
        tenant=tenant.slug,
        key_id=key_id,
        user_id=user_id,
        cache_namespace=tenant.cache_namespace,
        weight=tenant.weight,
        max_priority=tenant.max_priority,
        scopes=scopes,
        requests_per_minute=tenant.requests_per_minute,
        tokens_per_minute=tenant.tokens_per_minute,
        media_limits=tenant.media_limits,
        key_requests_per_minute=key_requests_per_minute,
        key_tokens_per_minute=key_tokens_per_minute,
        kv_reserved_fraction=tenant.kv_reserved_fraction,
        kv_max_fraction=tenant.kv_max_fraction,
        max_running_requests=tenant.max_running_requests,
        max_context_tokens=min(context_limits, default=None),
        store_prompts=tenant.store_prompts,
        models=frozenset.intersection(*allowed) if allowed else None,
        tenant_models=frozenset(tenant.allowed_models) if tenant.allowed_models else None,
        key_models=frozenset(models) if models else None,
        **key_fields,
    )


def _unavailable(error: Exception) -> ServiceUnavailable:
    logger.error("key check failed, database unreachable: %s", error)
    return ServiceUnavailable("Keys can't be checked right now. Try again in a moment.")


def clear_cache(**_: object) -> None:
    """Forget all results in this process: a key or a tenant has changed."""
    _key_cache.clear()
    _guesses.clear()


signals.api_key_changed.connect(clear_cache, dispatch_uid="tenants.authentication")
signals.tenant_changed.connect(clear_cache, dispatch_uid="tenants.authentication")
signals.access_revoked.connect(clear_cache, dispatch_uid="tenants.authentication")
