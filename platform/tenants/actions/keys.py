"""Creating, rotating and revoking API keys, and ending a user's access."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial

from django.db import transaction
from django.db.models import F
from django.db.models.signals import pre_delete
from django.dispatch import receiver
from django.utils import timezone

from common.db import save_valid
from common.errors import Conflict, NotFound, PermissionDenied
from engine.contract.errors import InvalidRequest
from tenants import api_keys
from tenants.actors import (
    SYSTEM_ACTOR,
    Actor,
    require_manager_of,
    require_operator,
    require_role,
    to_actor,
)
from tenants.audit import log_action
from tenants.models import ApiKey, Invitation, Role, ServiceAccount, Tenant, User
from tenants.signals import access_revoked, api_key_changed

#: Restrictions besides scopes, which a key's replacement inherits.
RATE_FIELDS = (
    "requests_per_minute",
    "tokens_per_minute",
    "media_per_minute",
    "media_bytes_per_minute",
    "media_seconds_per_minute",
    "max_running_requests",
    "max_context_tokens",
)
KEY_LIMIT_FIELDS = (*RATE_FIELDS, "allowed_models", "endpoints", "addresses")
MAX_OVERLAP = timedelta(days=30)


@dataclass(frozen=True)
class NewKey:
    """A new key. `secret` isn't stored: only this object and the key's owner have it."""

    key: ApiKey
    secret: str = field(repr=False)


@transaction.atomic
def create_key(
    *,
    actor: Actor | User,
    tenant: Tenant,
    name: str = "",
    scopes: Collection[str] | None = None,
    expires_at: datetime | None = None,
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
    media_per_minute: int | None = None,
    media_bytes_per_minute: int | None = None,
    media_seconds_per_minute: int | None = None,
    max_running_requests: int | None = None,
    max_context_tokens: int | None = None,
    allowed_models: Collection[str] | None = None,
    endpoints: Collection[str] | None = None,
    addresses: Collection[str] | None = None,
    service_account: ServiceAccount | None = None,
    secret: str | None = None,
) -> NewKey:
    """Create a key, held by the actor or by a service account (for admins only).

    `secret`: the key's text, chosen by this instance's operator; by default random.

    Raises: `NotFound` for non-members, `PermissionDenied` (viewers, scopes that the actor can't
    grant), `InvalidRequest` with `param`, `Conflict` for a tenant that is inactive.
    """
    actor = to_actor(actor)
    if service_account is None and actor.key is not None:
        service_account = actor.key.service_account
    checked_scopes = api_keys.check_scopes(
        api_keys.default_scopes() if scopes is None else list(scopes)
    )
    _check_rights(actor, tenant, checked_scopes, service_account)
    if not tenant.active:
        raise Conflict(f"The tenant {tenant.slug} is disabled.")
    if expires_at is not None and expires_at <= timezone.now():
        raise InvalidRequest("expires_at must be in the future.", param="expires_at")
    if secret is None:
        public_id = api_keys.new_public_id()
        secret = api_keys.new_key(public_id)
    else:
        require_operator(actor)
        api_keys.validate_operator_key(secret)
        public_id = api_keys.lookup_id(secret)
    key = ApiKey(
        tenant=tenant,
        name=name,
        public_id=public_id,
        digest=api_keys.hash_key(secret),
        scopes=checked_scopes,
        created_by=actor.user,
        service_account=service_account,
        expires_at=expires_at,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        media_per_minute=media_per_minute,
        media_bytes_per_minute=media_bytes_per_minute,
        media_seconds_per_minute=media_seconds_per_minute,
        max_running_requests=max_running_requests,
        max_context_tokens=max_context_tokens,
        allowed_models=list(allowed_models or ()),
        endpoints=list(endpoints or ()),
        addresses=list(addresses or ()),
    )
    _check_not_broader(actor, key)
    save_valid(key)
    log_action(
        actor,
        "api_key.create",
        key,
        tenant=tenant,
        scopes=checked_scopes,
        expires_at=expires_at,
        **{"service_account": service_account.name} if service_account else {},
        **{name: value for name in KEY_LIMIT_FIELDS if (value := getattr(key, name))},
    )
    return NewKey(key, secret)


def _check_rights(
    actor: Actor, tenant: Tenant, scopes: list[str], account: ServiceAccount | None
) -> None:
    """Raise the errors of `create_key` for an actor who may not create such a key."""
    require_role(actor, tenant, Role.MEMBER)
    if api_keys.OPERATOR in scopes:
        require_operator(actor)
    if api_keys.TENANT_ADMIN in scopes:
        require_role(actor, tenant, Role.ADMIN)
    missing = set(scopes).difference(scopes if actor.key is None else actor.key.scopes)
    if missing and not actor.is_operator:
        raise PermissionDenied(
            f"This key can't give scopes that it lacks: {', '.join(sorted(missing))}."
        )
    if account is None:
        return
    if account.tenant_id != tenant.pk:
        raise NotFound("Service account not found.")
    if api_keys.OPERATOR in scopes:
        raise PermissionDenied(
            "A service account belongs to a tenant: it can't have operator rights."
        )
    if not account.active:
        raise Conflict(f"The service account {account} is disabled.")
    require_manager_of(actor, tenant, Role(account.role))


def _check_not_broader(actor: Actor, key: ApiKey) -> None:
    """Raise `PermissionDenied` for a key with more rights than the key that creates it."""
    if actor.key is None or actor.is_operator:
        return
    for name in ("allowed_models", "endpoints", "addresses"):
        actor_value, key_value = getattr(actor.key, name), getattr(key, name)
        if actor_value and (not key_value or not set(key_value) <= set(actor_value)):
            raise PermissionDenied(
                f"A new key may have at most this key's {name}: {', '.join(actor_value)}."
            )
    for name in RATE_FIELDS:
        actor_value, key_value = getattr(actor.key, name), getattr(key, name)
        if actor_value and not (key_value and key_value <= actor_value):
            raise PermissionDenied(f"A new key may have at most this key's {name}: {actor_value}.")
    end = actor.key.expires_at
    if end is not None and (key.expires_at is None or key.expires_at > end):
        raise PermissionDenied(
            f"A new key must expire with this one at the latest: {end:%F %R} UTC."
        )


@transaction.atomic
def revoke_key(*, actor: Actor | User, key: ApiKey) -> ApiKey:
    """Revoke a key; all processes refuse it within seconds. Revoking twice changes nothing.

    Members may revoke keys that they created, admins any.
    """
    actor = to_actor(actor)
    require_role(actor, key.tenant, Role.MEMBER if _is_held_by(actor, key) else Role.ADMIN)
    row = ApiKey.objects.select_for_update().select_related(None).filter(pk=key.pk).first()
    if row is None:
        raise NotFound("Key not found.")
    if row.revoked_at is None:
        _revoke(actor, row)
    return row


@transaction.atomic
def rotate_key(
    *, actor: Actor | User, key: ApiKey, overlap: timedelta = timedelta(days=1)
) -> NewKey:
    """Replace a key by a new one with the same holder, restrictions and expiry.

    The old one remains valid for `overlap` (0: not at all), so that its users can switch. Members
    may rotate keys that they created, admins any; the actor counts as the new key's creator.

    Raises: the errors of `create_key` and `revoke_key`; `Conflict` for a key that is no longer
    valid, `InvalidRequest` for an overlap that isn't in [0, 30 days].
    """
    actor = to_actor(actor)
    if not timedelta(0) <= overlap <= MAX_OVERLAP:
        raise InvalidRequest("overlap must be from 0 to 30 days.", param="overlap")
    require_role(actor, key.tenant, Role.MEMBER if _is_held_by(actor, key) else Role.ADMIN)
    old = ApiKey.objects.select_for_update().select_related(None).filter(pk=key.pk).first()
    if old is None:
        raise NotFound("Key not found.")
    if old.state() != "active":
        raise Conflict(f"The key {old.prefix} is {old.state()}: make a new one instead.")
    new_key = create_key(
        actor=actor,
        tenant=key.tenant,
        name=old.name,
        scopes=old.scopes,
        expires_at=old.expires_at,
        service_account=old.service_account,
        **{name: getattr(old, name) for name in KEY_LIMIT_FIELDS},
    )
    new_key.key.first_id = old.first_id or old.pk
    new_key.key.save(update_fields=["first"])
    if overlap:
        _end_within(actor, old, overlap)
    else:
        _revoke(actor, old)
    return new_key


def revoke_keys_of(*, actor: Actor, user: User, tenant: Tenant | None = None) -> None:
    """Revoke a user's keys, in one tenant or all. The caller has checked the permission."""
    keys = ApiKey.objects.filter(created_by=user, service_account=None, revoked_at=None)
    if tenant is not None:
        keys = keys.filter(tenant=tenant)
    for key in keys.select_for_update():
        _revoke(actor, key)


def revoke_keys_of_account(*, actor: Actor, account: ServiceAccount) -> None:
    """Revoke a service account's keys. The caller has checked the permission."""
    keys = ApiKey.objects.filter(service_account=account, revoked_at=None)
    for key in keys.select_for_update():
        _revoke(actor, key)


def _is_held_by(actor: Actor, key: ApiKey) -> bool:
    is_personal = key.service_account_id is None and key.created_by_id is not None
    return is_personal and actor.user is not None and key.created_by_id == actor.user.pk


def _end_within(actor: Actor, key: ApiKey, overlap: timedelta) -> None:
    end, expires_at = timezone.now() + overlap, key.expires_at
    key.expires_at = end if expires_at is None else min(expires_at, end)
    key.save(update_fields=["expires_at"])
    log_action(
        actor,
        "api_key.rotate",
        key,
        tenant=key.tenant,
        changes={"expires_at": [expires_at, key.expires_at]},
    )
    transaction.on_commit(partial(api_key_changed.send, sender=ApiKey, key=key))


def _revoke(actor: Actor, key: ApiKey) -> None:
    key.revoked_at = timezone.now()
    key.save(update_fields=["revoked_at"])
    log_action(actor, "api_key.revoke", key, tenant=key.tenant)
    transaction.on_commit(partial(api_key_changed.send, sender=ApiKey, key=key))


# Gateways check sessions at each request, and keys and open sockets once a second: access ends
# everywhere within two seconds of the commit.


def end_sessions(user: User) -> None:
    """End every session of the user's, and the sockets opened with them."""
    User.objects.filter(pk=user.pk).update(session_epoch=F("session_epoch") + 1)
    user.refresh_from_db(fields=["session_epoch"])
    transaction.on_commit(partial(access_revoked.send, sender=User, user=user))


def revoke_access(*, actor: Actor, user: User, tenant: Tenant | None = None) -> None:
    """End a user's sessions, and their keys and invitations in one tenant or all of them.

    The caller has checked the actor's permission, and writes the operation's audit row.
    """
    revoke_keys_of(actor=actor, user=user, tenant=tenant)
    invitations = Invitation.objects.filter(created_by=user, accepted_at=None, revoked_at=None)
    if tenant is not None:
        invitations = invitations.filter(tenant=tenant)
    for invitation in invitations.select_for_update():
        revoke_invitation_of(actor, invitation)
    end_sessions(user)


def revoke_invitation_of(actor: Actor, invitation: Invitation) -> None:
    """Revoke an invitation. The caller has checked the actor's permission."""
    invitation.revoked_at = timezone.now()
    invitation.save(update_fields=["revoked_at"])
    log_action(actor, "invitation.revoke", invitation, tenant=invitation.tenant)


@receiver(pre_delete, sender=User, dispatch_uid="tenants.offboarding")
def _revoke_keys_on_delete(instance: User, **_: object) -> None:
    """Runs however a user is deleted: a key without its holder must not become the tenant's."""
    with transaction.atomic():
        revoke_keys_of(actor=SYSTEM_ACTOR, user=instance)
