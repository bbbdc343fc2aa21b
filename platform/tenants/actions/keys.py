"""Making, rotating and revoking API keys."""

from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial

from django.db import transaction
from django.utils import timezone

from engine.errors import InvalidRequest
from tenants import scopes as known_scopes
from tenants import secrets
from tenants.actors import Actor, as_actor, require_operator, require_role
from tenants.audit import record
from tenants.errors import Conflict, NotFound
from tenants.events import key_changed
from tenants.models import ApiKey, Role, Tenant, User
from tenants.validation import save_valid

LONGEST_OVERLAP = timedelta(days=30)


@dataclass(frozen=True)
class NewKey:
    """A key that was just made. `secret` exists here and with its owner, nowhere else."""

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
) -> NewKey:
    """A new key for the tenant's members.

    Raises: `NotFound` for strangers, `PermissionDenied` (viewers, the operator's scope),
    `InvalidRequest` with `param`, `Conflict` for a tenant that is switched off.
    """
    actor = as_actor(actor)
    require_role(actor, tenant, Role.MEMBER)
    wanted = known_scopes.check_scopes(
        known_scopes.default_scopes() if scopes is None else list(scopes)
    )
    if known_scopes.OPERATOR in wanted:
        require_operator(actor)
    if not tenant.active:
        raise Conflict(f"The tenant {tenant.slug} is switched off.")
    if expires_at is not None and expires_at <= timezone.now():
        raise InvalidRequest("expires_at must lie in the future.", param="expires_at")
    public_id = secrets.new_public_id()
    secret = secrets.new_key(public_id)
    key = ApiKey(
        tenant=tenant,
        name=name,
        public_id=public_id,
        digest=secrets.digest(secret),
        scopes=wanted,
        created_by=actor.user,
        expires_at=expires_at,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
    )
    save_valid(key)
    record(
        actor=actor,
        action="api_key.create",
        target=key,
        tenant=tenant,
        scopes=wanted,
        expires_at=expires_at,
    )
    return NewKey(key, secret)


@transaction.atomic
def revoke_key(*, actor: Actor | User, key: ApiKey) -> ApiKey:
    """Refuse the key from now on, everywhere within seconds. Revoking twice changes nothing.

    Members revoke keys that they made, admins any.
    """
    actor = as_actor(actor)
    own = actor.user is not None and key.created_by_id == actor.user.pk
    require_role(actor, key.tenant, Role.MEMBER if own else Role.ADMIN)
    found = ApiKey.objects.select_for_update().select_related(None).filter(pk=key.pk).first()
    if found is None:
        raise NotFound("There is no such key.")
    if found.revoked_at is None:
        _revoke(actor, found)
    return found


@transaction.atomic
def rotate_key(
    *, actor: Actor | User, key: ApiKey, overlap: timedelta = timedelta(days=1)
) -> NewKey:
    """A new key in the place of an old one, for the same and with the same limits and end.

    The old one goes on working for `overlap` (0: not at all), so that its users can change over.
    Members rotate keys that they made, admins any; the new key is the actor's.

    Raises: what `create_key` and `revoke_key` raise; `Conflict` for a key that doesn't work any
    more, `InvalidRequest` for an overlap that isn't in [0, 30 days].
    """
    actor = as_actor(actor)
    if not timedelta(0) <= overlap <= LONGEST_OVERLAP:
        raise InvalidRequest("overlap must be from 0 to 30 days.", param="overlap")
    own = actor.user is not None and key.created_by_id == actor.user.pk
    require_role(actor, key.tenant, Role.MEMBER if own else Role.ADMIN)
    old = ApiKey.objects.select_for_update().select_related(None).filter(pk=key.pk).first()
    if old is None:
        raise NotFound("There is no such key.")
    if old.state() != "active":
        raise Conflict(f"The key {old.prefix} is {old.state()}: make a new one instead.")
    made = create_key(
        actor=actor,
        tenant=key.tenant,
        name=old.name,
        scopes=old.scopes,
        expires_at=old.expires_at,
        requests_per_minute=old.requests_per_minute,
        tokens_per_minute=old.tokens_per_minute,
    )
    if overlap:
        _end_within(actor, old, overlap)
    else:
        _revoke(actor, old)
    return made


def revoke_keys_of(*, actor: Actor, tenant: Tenant, user: User) -> None:
    """Revoke what a user made in a tenant; the caller has checked the actor's right."""
    keys = ApiKey.objects.filter(tenant=tenant, created_by=user, revoked_at=None)
    for key in keys.select_for_update():
        _revoke(actor, key)


def _end_within(actor: Actor, key: ApiKey, overlap: timedelta) -> None:
    end = timezone.now() + overlap
    key.expires_at = end if key.expires_at is None else min(key.expires_at, end)
    key.save(update_fields=["expires_at"])
    record(
        actor=actor,
        action="api_key.rotate",
        target=key,
        tenant=key.tenant,
        expires_at=key.expires_at,
    )
    transaction.on_commit(partial(key_changed.send, sender=ApiKey, key=key))


def _revoke(actor: Actor, key: ApiKey) -> None:
    key.revoked_at = timezone.now()
    key.save(update_fields=["revoked_at"])
    record(actor=actor, action="api_key.revoke", target=key, tenant=key.tenant)
    transaction.on_commit(partial(key_changed.send, sender=ApiKey, key=key))
