"""Who acts: a user, or the system itself."""

from __future__ import annotations

from dataclasses import dataclass

from tenants.errors import NotFound, PermissionDenied
from tenants.models import Membership, Role, Tenant, User


@dataclass(frozen=True)
class Actor:
    """Who acts. Without a user it's the installation itself, which may do anything."""

    label: str
    user: User | None = None

    @property
    def is_operator(self) -> bool:
        """Whether it runs the whole installation."""
        return self.user is None or (self.user.is_active and self.user.is_superuser)


SYSTEM = Actor("system")
COMMAND_LINE = Actor("command line")


def as_actor(actor: Actor | User) -> Actor:
    """Users may be passed where an actor is wanted."""
    return actor if isinstance(actor, Actor) else Actor(actor.get_username(), actor)


def require_operator(actor: Actor) -> None:
    """Raise `PermissionDenied` unless the actor runs the whole installation."""
    if not actor.is_operator:
        raise PermissionDenied("Only the operator of this installation may do this.")


def require_role(actor: Actor, tenant: Tenant, role: Role) -> None:
    """Raise `NotFound` for a stranger and `PermissionDenied` for a member of a lower role."""
    if actor.is_operator:
        return
    found = role_in(actor.user, tenant)
    if found is None:
        raise NotFound(f"There is no tenant {tenant.slug!r}.")
    if found.rank < role.rank:
        raise PermissionDenied(f"This needs the role {role.label.lower()} in {tenant.slug}.")


def role_in(user: User | None, tenant: Tenant) -> Role | None:
    """The user's role, or None for a stranger or a user who may not log in."""
    if user is None or not user.is_active:
        return None
    membership = Membership.objects.filter(user=user, tenant=tenant).first()
    return Role(membership.role) if membership else None
