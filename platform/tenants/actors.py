"""The actor of an action: a user, an API key, a command, or the system."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import NotFound, PermissionDenied
from tenants import api_keys
from tenants.models import ActorKind, ApiKey, Membership, Role, Tenant, User


@dataclass(frozen=True)
class Actor:
    """The actor of an action. Commands and the system may do anything.

    Attributes:
        label: its name in the audit log, which stays when the row is deleted.
        user: the user, also as the holder of the key.
        key: the key that authenticated the request.
    """

    label: str
    user: User | None = None
    kind: ActorKind = ActorKind.SYSTEM
    key: ApiKey | None = None

    @property
    def is_operator(self) -> bool:
        """Whether it is an operator of the installation."""
        if self.kind in (ActorKind.SYSTEM, ActorKind.COMMAND):
            return True
        if self.key is not None and api_keys.OPERATOR not in self.key.scopes:
            return False
        if self.user is not None:
            return self.user.is_active and self.user.is_superuser
        return self.key is not None  # an operator granted its scope

    def role_in(self, tenant: Tenant) -> Role | None:
        """The actor's role in the tenant, or None. A key acts only in its own tenant."""
        if self.key is not None and self.key.tenant_id != tenant.pk:
            return None
        if self.user is not None:
            return role_in(self.user, tenant) or self._operators_role()
        if self.key is None:
            return None
        account = self.key.service_account
        if account is None:
            return Role.ADMIN  # the tenant's own key, made by a command
        return Role(account.role) if account.active else None

    def _operators_role(self) -> Role | None:
        """The role of an operator's key in its tenant, of which the holder need not be a member."""
        operator = self.user is not None and self.user.is_active and self.user.is_superuser
        return Role.OWNER if operator and self.key is not None else None


SYSTEM_ACTOR = Actor("system")
CLI_ACTOR = Actor("command line", kind=ActorKind.COMMAND)


def to_actor(actor: Actor | User) -> Actor:
    """Convert a user to an actor."""
    if isinstance(actor, Actor):
        return actor
    return Actor(actor.get_username(), actor, ActorKind.PERSON)


def key_actor(key: ApiKey) -> Actor:
    holder = key.created_by if key.service_account_id is None else None
    return Actor(f"API key {key}", holder, ActorKind.KEY, key)


def require_operator(actor: Actor | User) -> Actor:
    """Return the actor. Raises `PermissionDenied` unless it is the installation's operator."""
    actor = to_actor(actor)
    if not actor.is_operator:
        raise PermissionDenied("Only the operator of this installation may do this.")
    return actor


def require_role(actor: Actor | User, tenant: Tenant, role: Role) -> Actor:
    """Return the actor. Raises `NotFound` for non-members, `PermissionDenied` for a lower role."""
    actor = to_actor(actor)
    if actor.is_operator:
        return actor
    actual = actor.role_in(tenant)
    if actual is None:
        raise NotFound(f"Tenant {tenant.slug!r} not found.")
    if actual.rank < role.rank:
        raise PermissionDenied(f"This needs the role {role.label.lower()} in {tenant.slug}.")
    return actor


def require_manager_of(actor: Actor | User, tenant: Tenant, role: Role) -> Actor:
    """Return an actor that is an admin whose role is at least `role`. Raises as `require_role`."""
    actor = require_role(actor, tenant, Role.ADMIN)
    if actor.is_operator:
        return actor
    actor_role = actor.role_in(tenant)
    if actor_role is None or actor_role.rank < role.rank:
        raise PermissionDenied("You can't manage a role above your own.")
    return actor


def role_in(user: User | None, tenant: Tenant) -> Role | None:
    """The user's role; None for non-members and users who may not log in."""
    if user is None or not user.is_active:
        return None
    # Queried at every request; loading the whole row would take twice as long.
    roles = Membership.objects.filter(user=user, tenant=tenant).values_list("role", flat=True)
    role = roles.first()
    return Role(role) if role else None
