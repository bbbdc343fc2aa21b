"""Who is asking: from an API key or from a session to a `Caller`.

A key costs a database look-up every second or so and process, shared by the requests that wait for
it; who asks often waits for none, since the next answer is looked up before the last is too old.
Every refusal takes the same way: hash, look-up, comparison in constant time.
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
from common.errors import AuthenticationFailed, PermissionDenied, ServiceUnavailable
from common.outbound_http import networks_of
from tenants import api_keys as scopes
from tenants import api_keys as secrets
from tenants import signals as events
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

#: A revoked key works at most this long in other processes; in the one that revoked it, no longer.
#: Streams look every half second, from half of that time on by an answer that is looked up
#: meanwhile, so that those of a revoked key have ended within two seconds.
TTL_S = 1.6
#: With the database away, keys seen this recently go on working.
STALE_S = 60.0
CACHED_KEYS = 10_000
LAST_USED_EVERY = timedelta(minutes=1)
MAX_HEADER = secrets.MAX_CHARS + 16
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
# Guesses have a place of their own: a flood of them can't push working keys out.
_guesses: AsyncTTLCache[str, Caller | AuthFailure] = AsyncTTLCache(ttl=TTL_S, size=CACHED_KEYS)


class FailureLimiter(Protocol):
    """Bounds what an address may guess."""

    async def check(self) -> None:
        """Raise when it has guessed too much; asked before the database is."""

    async def count(self) -> None:
        """It has sent a key that doesn't exist."""


async def authenticate(
    authorization: str | None, x_api_key: str | None = None, *, guard: FailureLimiter | None = None
) -> Caller:
    """The caller behind an `Authorization: Bearer` header, or behind `x-api-key` without one.

    Raises: `AuthenticationFailed` (401), `PermissionDenied` (403, the tenant is switched off),
    `ServiceUnavailable` (503, the database is away and the key was not seen lately), what the
    guard raises for a key that wasn't seen lately.
    """
    token = _token(authorization, x_api_key)
    if token is None:
        raise MISSING.error()
    digest = secrets.hash_key(token)
    # Any text is looked up, whether a key has its name or not: the time tells nothing.
    public_id = secrets.lookup_id(token)
    answer = _get_cached(digest, lambda: _look_up(public_id, digest))
    if answer is None:
        # Who had a key that works is no guesser: others behind the same address don't lock it out.
        guess = guard if _key_cache.get_if_younger(digest, STALE_S) is None else None
        if guess is not None and _guesses.is_fresh(digest) is None:
            await guess.check()
        answer = await _find(digest, lambda: _look_up(public_id, digest), guess)
    if isinstance(answer, AuthFailure):
        raise answer.error()
    return answer


def cached_tenant(authorization: str | None, x_api_key: str | None) -> str:
    """Whose key this was when it was seen lately, without asking anybody; "" where it wasn't.

    For whose turn it is alone: the key may have been revoked since.
    """
    token = _token(authorization, x_api_key)
    known = None if token is None else _key_cache.get_if_younger(secrets.hash_key(token), STALE_S)
    return known.tenant if isinstance(known, Caller) else ""


def get_cached_caller(authorization: str | None, x_api_key: str | None) -> Caller | None:
    """Who `authenticate` would say it is, where that takes no look into the database; None
    elsewhere, and where it raises.
    """
    token = _token(authorization, x_api_key)
    if token is None:
        return None
    digest = secrets.hash_key(token)
    known = _get_cached(digest, lambda: _look_up(secrets.lookup_id(token), digest))
    return known if isinstance(known, Caller) else None


def authenticate_sync(
    authorization: str | None, x_api_key: str | None = None, *, guard: FailureLimiter
) -> Caller:
    """`authenticate` for synchronous views that are seldom asked: nothing is remembered."""
    token = _token(authorization, x_api_key)
    if token is None:
        raise MISSING.error()
    async_to_sync(guard.check)()
    answer = _look_up(secrets.lookup_id(token), secrets.hash_key(token))
    if isinstance(answer, AuthFailure):
        if answer is UNKNOWN:
            async_to_sync(guard.count)()
        raise answer.error()
    return answer


async def _find(
    name: str, look_up: Callable[[], Caller | AuthFailure], guard: FailureLimiter | None = None
) -> Caller | AuthFailure:
    """Ask the database, or take what was known lately while it is away."""

    async def ask() -> Caller | AuthFailure:
        found = await in_admission_thread(look_up)
        if found is UNKNOWN and guard is not None:
            await guard.count()
        return found

    generation = _key_cache.generation
    try:
        answer = await _guesses.get(name, ask)
    except ServiceUnavailable:
        stale = _key_cache.get_if_younger(name, STALE_S)
        if stale is None:
            raise
        return stale
    if answer is not UNKNOWN:
        _guesses.forget(name)
        _key_cache.store(name, answer, generation)
    return answer


def _get_cached(
    name: str, look_up: Callable[[], Caller | AuthFailure]
) -> Caller | AuthFailure | None:
    """The answer when it's known and young enough; an older one is looked up anew meanwhile."""
    return _key_cache.get_cached(name, lambda: in_admission_thread(look_up))


def is_still_valid_cached(caller: Caller) -> bool:
    """`check_still_valid` where that takes no look into the database; False elsewhere.

    Raises: what `authenticate` raises.
    """
    if caller.key_id is None and caller.user_id is None:
        return True
    answer = _get_cached(*_again(caller.key_id, caller.user_id, caller.tenant))
    if isinstance(answer, AuthFailure):
        raise answer.error()
    return answer is not None


async def check_still_valid(caller: Caller) -> None:
    """Whether a caller admitted earlier would be today; cheap enough to ask during a stream.

    Raises: what `authenticate` raises. A database that is away refuses nobody.
    """
    if caller.key_id is None and caller.user_id is None:
        return
    try:
        await reload_caller(caller.key_id, caller.user_id, caller.tenant)
    except ServiceUnavailable:
        return


async def reload_caller(key_id: int | None, user_id: int | None, tenant: str) -> Caller:
    """The caller behind work that was asked for earlier, with the rights of today.

    Raises: what `authenticate` raises; `AuthenticationFailed` when key and user are gone.
    """
    name, look_up = _again(key_id, user_id, tenant)
    answer = _get_cached(name, look_up) or await _find(name, look_up)
    if isinstance(answer, AuthFailure):
        raise answer.error()
    return answer


def _again(
    key_id: int | None, user_id: int | None, tenant: str
) -> tuple[str, Callable[[], Caller | AuthFailure]]:
    """Under which name a caller of earlier is remembered, and how it's looked up."""
    if key_id is not None:
        return f"#{key_id}", partial(_look_up_id, key_id)
    if user_id is not None:
        return f"@{user_id}/{tenant}", partial(_look_up_user, user_id, tenant)
    raise UNKNOWN.error()


async def caller_for_user(user: User, tenant_slug: str | None = None) -> Caller:
    """The caller behind a logged-in user, in the tenant named or the first that they joined.

    Raises: `AuthenticationFailed` for nobody or a disabled user; `PermissionDenied` for a stranger
    to the tenant, a viewer's missing right shows in `scopes`.
    """
    if not getattr(user, "is_authenticated", False):
        raise AuthenticationFailed("Log in first.", code="not_logged_in")
    answer = await in_admission_thread(_look_up_user, user.pk, tenant_slug)
    if isinstance(answer, AuthFailure):
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


def _look_up(public_id: str, digest: str) -> Caller | AuthFailure:
    """One indexed query, one comparison, whatever was sent."""
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
    """Keys with all that decides about them: tenant, holder and the holder's role. One query."""
    role = Membership.objects.filter(user=OuterRef("created_by"), tenant=OuterRef("tenant"))
    return ApiKey.objects.select_related("tenant", "created_by", "service_account").annotate(
        holders_role=Subquery(role.values("role")[:1])
    )


def _scopes_of_key(key: ApiKey) -> frozenset[str] | None:
    """What the key's holder may still use it for; None when they may not use it at all."""
    granted = frozenset(key.scopes)
    account, person = key.service_account, key.created_by
    if account is not None:
        return granted & _scopes_for(Role(account.role)) if account.active else None
    if person is None:
        return granted  # made by a command: the tenant's own
    if not person.is_active:
        return None
    if person.is_superuser:
        return granted
    role: str | None = key.holders_role  # type: ignore[attr-defined]
    return None if role is None else granted & _scopes_for(Role(role))


def _check_key(key: ApiKey) -> Caller | AuthFailure:
    """Whether a key whose secret was shown may be used."""
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
        key_family=key.first_id or key.pk,
        key_max_running_requests=key.max_running_requests,
        max_context_tokens=key.max_context_tokens,
        models=key.allowed_models,
        endpoints=tuple(key.endpoints),
        networks=networks_of(key.addresses),
    )


def _update_last_used(key: ApiKey) -> None:
    """Note the use, at most once a minute: a request must not cost a write."""
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


def _operators_tenant(user: User, tenant_slug: str | None) -> Caller | AuthFailure:
    """A superuser acts in any tenant, by default the oldest."""
    tenants = Tenant.objects.filter(active=True)
    if tenant_slug is not None:
        tenants = tenants.filter(slug=tenant_slug)
    tenant = tenants.order_by("pk").first()
    return NO_MEMBER if tenant is None else _caller(tenant, user_id=user.pk, scopes=scopes.ALL)


def _scopes_of(user: User, role: Role) -> frozenset[str]:
    if user.is_superuser:
        return scopes.ALL
    return _scopes_for(role) & scopes.DEFAULT


def _scopes_for(role: Role) -> frozenset[str]:
    """What a key may hold whose holder has this role."""
    if role.rank >= Role.ADMIN.rank:
        return scopes.ALL - {scopes.OPERATOR}
    return scopes.DEFAULT - ({scopes.INFERENCE} if role == Role.VIEWER else set())


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
    **of_key: Any,
) -> Caller:
    lists = [frozenset(names) for names in (tenant.allowed_models, models) if names]
    contexts = [most for most in (tenant.max_context_tokens, max_context_tokens) if most]
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
        max_running_requests=tenant.max_running_requests,
        max_context_tokens=min(contexts, default=None),
        store_prompts=tenant.store_prompts,
        models=frozenset.intersection(*lists) if lists else None,
        tenant_models=frozenset(tenant.allowed_models) if tenant.allowed_models else None,
        key_models=frozenset(models) if models else None,
        **of_key,
    )


def _unavailable(error: Exception) -> ServiceUnavailable:
    logger.error("key check failed, database unreachable: %s", error)
    return ServiceUnavailable("Keys can't be checked right now. Try again in a moment.")


def clear_cache(**_: object) -> None:
    """Look everything up anew in this process: a key or a tenant has changed."""
    _key_cache.clear()
    _guesses.clear()


events.api_key_changed.connect(clear_cache, dispatch_uid="tenants.authentication")
events.tenant_changed.connect(clear_cache, dispatch_uid="tenants.authentication")
events.access_revoked.connect(clear_cache, dispatch_uid="tenants.authentication")
