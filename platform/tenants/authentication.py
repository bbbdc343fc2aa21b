"""Who is asking: from an API key or from a session to a `Caller`.

A key costs one database look-up every `TTL_S` seconds and process, shared by the requests that wait
for it. Every refusal takes the same way: hash, look-up, comparison in constant time.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from django.db import DatabaseError, InterfaceError
from django.utils import timezone

from tenants import events, scopes, secrets
from tenants.cached_lookup import CachedLookup
from tenants.caller import Caller, Refusal
from tenants.db_threads import in_db_thread
from tenants.errors import AuthenticationFailed, PermissionDenied, ServiceUnavailable
from tenants.models import ApiKey, Membership, Role, Tenant, User

__all__ = [
    "AuthenticationFailed",
    "Caller",
    "PermissionDenied",
    "ServiceUnavailable",
    "authenticate",
    "caller_again",
    "caller_for_user",
    "check_still_valid",
]

logger = logging.getLogger(__name__)

#: A revoked key works at most this long in other processes; in the one that revoked it, no longer.
TTL_S = 2.0
#: With the database away, keys seen this recently go on working.
STALE_S = 60.0
CACHED_KEYS = 10_000
LAST_USED_EVERY = timedelta(minutes=1)
MAX_HEADER = secrets.MAX_CHARS + 16
_NO_DIGEST = "0" * 64


UNKNOWN = Refusal("Incorrect API key provided.")
MISSING = Refusal(
    "No API key was provided. Send it as `Authorization: Bearer sk-quire-...` or as `x-api-key`."
)
REVOKED = Refusal("This API key was revoked.")
EXPIRED = Refusal("This API key has expired.")
INACTIVE = Refusal("This tenant is switched off.", forbidden=True)
NO_MEMBER = Refusal("You are a member of no active tenant.", forbidden=True)

_known: CachedLookup[str, Caller | Refusal] = CachedLookup(ttl=TTL_S, size=CACHED_KEYS)
# Guesses have a place of their own: a flood of them can't push working keys out.
_guesses: CachedLookup[str, Caller | Refusal] = CachedLookup(ttl=TTL_S, size=CACHED_KEYS)


async def authenticate(authorization: str | None, x_api_key: str | None = None) -> Caller:
    """The caller behind an `Authorization: Bearer` header, or behind `x-api-key` without one.

    Raises: `AuthenticationFailed` (401), `PermissionDenied` (403, the tenant is switched off),
    `ServiceUnavailable` (503, the database is away and the key was not seen lately).
    """
    token = _token(authorization, x_api_key)
    if token is None:
        raise MISSING.error()
    digest = secrets.digest(token)
    # Malformed ones are looked up too, under a name that no key has: the time tells nothing.
    public_id = secrets.public_id_of(token) or ""
    answer = _known.fresh(digest) or await _find(digest, lambda: _look_up(public_id, digest))
    if isinstance(answer, Refusal):
        raise answer.error()
    return answer


async def _find(name: str, look_up: Callable[[], Caller | Refusal]) -> Caller | Refusal:
    """Ask the database, or take what was known lately while it is away."""
    try:
        answer = await _guesses.get(name, lambda: in_db_thread(look_up))
    except ServiceUnavailable:
        stale = _known.within(name, STALE_S)
        if stale is None:
            raise
        return stale
    if answer is not UNKNOWN:
        _guesses.forget(name)
        _known.put(name, answer)
    return answer


async def check_still_valid(caller: Caller) -> None:
    """Whether a caller admitted earlier would be today; cheap enough to ask during a stream.

    Raises: what `authenticate` raises. A database that is away refuses nobody.
    """
    if caller.key_id is None and caller.user_id is None:
        return
    try:
        await caller_again(caller.key_id, caller.user_id, caller.tenant)
    except ServiceUnavailable:
        return


async def caller_again(key_id: int | None, user_id: int | None, tenant: str) -> Caller:
    """The caller behind work that was asked for earlier, with the rights of today.

    Raises: what `authenticate` raises; `AuthenticationFailed` when key and user are gone.
    """
    if key_id is not None:
        name, look_up = f"#{key_id}", partial(_look_up_id, key_id)
    elif user_id is not None:
        name, look_up = f"@{user_id}/{tenant}", partial(_look_up_user, user_id, tenant)
    else:
        raise UNKNOWN.error()
    answer = _known.fresh(name) or await _find(name, look_up)
    if isinstance(answer, Refusal):
        raise answer.error()
    return answer


async def caller_for_user(user: User, tenant_slug: str | None = None) -> Caller:
    """The caller behind a logged-in user, in the tenant named or the first that they joined.

    Raises: `AuthenticationFailed` for nobody or a disabled user; `PermissionDenied` for a stranger
    to the tenant, a viewer's missing right shows in `scopes`.
    """
    if not getattr(user, "is_authenticated", False):
        raise AuthenticationFailed("Log in first.", code="not_logged_in")
    answer = await in_db_thread(_look_up_user, user.pk, tenant_slug)
    if isinstance(answer, Refusal):
        raise answer.error()
    return answer


def _token(authorization: str | None, x_api_key: str | None) -> str | None:
    """The key's text in the headers, or None when there's none."""
    if not authorization:
        return x_api_key or None
    scheme, _, token = authorization[:MAX_HEADER].partition(" ")
    if scheme.lower() != "bearer" or len(authorization) > MAX_HEADER:
        return f"\0{authorization[:MAX_HEADER]}"  # no key looks like this: it won't be found
    return token.strip(" ") or None


def _look_up(public_id: str, digest: str) -> Caller | Refusal:
    """One indexed query, one comparison, whatever was sent."""
    try:
        key = ApiKey.objects.select_related("tenant").filter(public_id=public_id).first()
        stored = key.digest if key else _NO_DIGEST
        matches = hmac.compare_digest(stored, digest)
        return _judge(key) if key is not None and matches else UNKNOWN
    except (DatabaseError, InterfaceError) as error:
        raise _unavailable(error) from error


def _look_up_id(key_id: int) -> Caller | Refusal:
    try:
        key = ApiKey.objects.select_related("tenant").filter(pk=key_id).first()
        return _judge(key) if key is not None else UNKNOWN
    except (DatabaseError, InterfaceError) as error:
        raise _unavailable(error) from error


def _judge(key: ApiKey) -> Caller | Refusal:
    """Whether a key whose secret was shown may be used."""
    state = key.state()
    if state != "active":
        return REVOKED if state == "revoked" else EXPIRED
    if not key.tenant.active:
        return INACTIVE
    _touch(key)
    return _caller(
        key.tenant,
        key_id=key.pk,
        scopes=frozenset(key.scopes),
        key_requests_per_minute=key.requests_per_minute,
        key_tokens_per_minute=key.tokens_per_minute,
    )


def _touch(key: ApiKey) -> None:
    """Note the use, at most once a minute: a request must not cost a write."""
    now = timezone.now()
    if key.last_used_at is None or now - key.last_used_at > LAST_USED_EVERY:
        try:
            ApiKey.objects.filter(pk=key.pk).update(last_used_at=now)
        except DatabaseError as error:  # a read-only or busy database still authenticates
            logger.warning("last use of %s was not noted: %s", key.prefix, error)


def _look_up_user(user_id: int, tenant_slug: str | None) -> Caller | Refusal:
    try:
        user = User.objects.filter(pk=user_id, is_active=True).first()
        if user is None:
            return Refusal("This user may not log in.")
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


def _operators_tenant(user: User, tenant_slug: str | None) -> Caller | Refusal:
    """A superuser acts in any tenant, by default the oldest."""
    tenants = Tenant.objects.filter(active=True)
    if tenant_slug is not None:
        tenants = tenants.filter(slug=tenant_slug)
    tenant = tenants.order_by("pk").first()
    return NO_MEMBER if tenant is None else _caller(tenant, user_id=user.pk, scopes=scopes.ALL)


def _scopes_of(user: User, role: Role) -> frozenset[str]:
    if user.is_superuser:
        return scopes.ALL
    return scopes.DEFAULT - ({scopes.INFERENCE} if role == Role.VIEWER else set())


def _caller(
    tenant: Tenant,
    *,
    scopes: frozenset[str],
    key_id: int | None = None,
    user_id: int | None = None,
    key_requests_per_minute: int | None = None,
    key_tokens_per_minute: int | None = None,
) -> Caller:
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
        key_requests_per_minute=key_requests_per_minute,
        key_tokens_per_minute=key_tokens_per_minute,
        kv_reserved_fraction=tenant.kv_reserved_fraction,
        kv_max_fraction=tenant.kv_max_fraction,
    )


def _unavailable(error: Exception) -> ServiceUnavailable:
    logger.error("keys can't be checked, the database is away: %s", error)
    return ServiceUnavailable("Keys can't be checked right now. Try again in a moment.")


def forget(**_: object) -> None:
    """Look everything up anew in this process: a key or a tenant has changed."""
    _known.clear()
    _guesses.clear()


events.key_changed.connect(forget, dispatch_uid="tenants.authentication")
events.tenant_changed.connect(forget, dispatch_uid="tenants.authentication")
