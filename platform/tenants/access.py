"""The only functions that read a tenant's objects. Without access they raise `NotFound` (404)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from django.db.models import QuerySet

from common.errors import NotFound, PermissionDenied
from tenants.actors import Actor, key_actor, require_operator, require_role, to_actor
from tenants.models import (
    ApiKey,
    AuditEntry,
    Invitation,
    Membership,
    Role,
    ServiceAccount,
    Tenant,
    User,
)

# Apps that depend on this one know the names of models; each registers a source when it starts.

#: Returns the model names of one kind that a tenant may request.
NameSource = Callable[["Tenant"], Iterable[str]]
_sources: list[NameSource] = []


def register_name_source(source: NameSource) -> None:
    """Add a source of model names for `find_unknown_models`."""
    _sources.append(source)


def find_unknown_models(tenant: Tenant, names: Iterable[str]) -> list[str]:
    """Return the names that match no model or adapter of the tenant's, in their order."""
    existing = {name for source in _sources for name in source(tenant)}
    return [name for name in names if name not in existing]


AccessSubject = Actor | User


def access_tenants(user: AccessSubject) -> QuerySet[Tenant]:
    """The user's tenants; all for an operator; for a key its tenant."""
    actor = to_actor(user)
    if actor.is_operator:
        return Tenant.objects.all()
    if actor.key is not None:
        if actor.role_in(actor.key.tenant) is None:
            return Tenant.objects.none()
        return Tenant.objects.filter(pk=actor.key.tenant_id)
    if actor.user is None or not actor.user.is_active:
        return Tenant.objects.none()
    return Tenant.objects.filter(memberships__user=actor.user)


def access_tenant(user: AccessSubject, slug: str) -> Tenant:
    """Raises `NotFound` for a tenant that doesn't exist or isn't the user's."""
    tenant = access_tenants(user).filter(slug=slug).first()
    if tenant is None:
        raise NotFound(f"Tenant {slug!r} not found.", param="tenant")
    return tenant


def access_role(user: AccessSubject, tenant: Tenant) -> Role:
    """The user's role in the tenant; operators count as owners. `NotFound` for non-members."""
    actor = to_actor(user)
    require_role(actor, tenant, Role.VIEWER)
    return actor.role_in(tenant) or Role.OWNER


def access_roles(user: AccessSubject) -> set[Role]:
    """The user's roles in their active tenants; operators count as owners."""
    actor = to_actor(user)
    if actor.is_operator:
        return {Role.OWNER}
    memberships = Membership.objects.filter(user=actor.user, tenant__in=access_tenants(user))
    roles = memberships.filter(tenant__active=True).values_list("role", flat=True)
    return {Role(role) for role in roles}


def access_members(user: AccessSubject, tenant: Tenant) -> QuerySet[Membership]:
    """Members of the tenant, for any of them."""
    require_role(user, tenant, Role.VIEWER)
    return Membership.objects.filter(tenant=tenant).select_related("user", "tenant")


def access_member(user: AccessSubject, tenant: Tenant, pk: int) -> Membership:
    """Raises `NotFound`."""
    membership = access_members(user, tenant).filter(pk=pk).first()
    if membership is None:
        raise NotFound("Member not found.")
    return membership


def access_keys(user: AccessSubject, tenant: Tenant) -> QuerySet[ApiKey]:
    """All keys for admins and owners; for others the keys that they created."""
    role = access_role(user, tenant)
    keys = ApiKey.objects.filter(tenant=tenant).select_related(
        "tenant", "created_by", "service_account"
    )
    if role.rank >= Role.ADMIN.rank:
        return keys
    creator = to_actor(user).user
    return keys.filter(created_by=creator) if creator is not None else keys.none()


def access_key(user: AccessSubject, tenant: Tenant, pk: int) -> ApiKey:
    """Raises `NotFound`."""
    key = access_keys(user, tenant).filter(pk=pk).first()
    if key is None:
        raise NotFound("Key not found.")
    return key


def access_key_actor(pk: int | None) -> Actor:
    """The actor behind an operator's key. Raises `PermissionDenied` if it was revoked meanwhile."""
    rows = ApiKey.objects.select_related("tenant", "created_by", "service_account")
    key = rows.filter(pk=pk).first() if pk is not None else None
    if key is None:
        raise PermissionDenied("This needs an operator's key.")
    return key_actor(key)


def access_audit(user: AccessSubject, tenant: Tenant) -> QuerySet[AuditEntry]:
    """The tenant's audit log, newest first, for admins and owners."""
    require_role(user, tenant, Role.ADMIN)
    return AuditEntry.objects.filter(tenant=tenant).select_related("tenant")


def access_all_audit(user: AccessSubject) -> QuerySet[AuditEntry]:
    """The installation's audit log. Raises `PermissionDenied` unless the user is an operator."""
    require_operator(user)
    return AuditEntry.objects.select_related("tenant")


def access_service_accounts(user: AccessSubject, tenant: Tenant) -> QuerySet[ServiceAccount]:
    """The tenant's service accounts, for any member."""
    require_role(user, tenant, Role.VIEWER)
    return ServiceAccount.objects.filter(tenant=tenant).select_related("tenant")


def access_service_account(user: AccessSubject, tenant: Tenant, pk: int) -> ServiceAccount:
    """Raises `NotFound`."""
    account = access_service_accounts(user, tenant).filter(pk=pk).first()
    if account is None:
        raise NotFound("Service account not found.")
    return account


def access_users(user: AccessSubject) -> QuerySet[User]:
    """All users. Raises `PermissionDenied` unless the user is an operator."""
    require_operator(user)
    return User.objects.order_by("username")


def access_invitations(user: AccessSubject, tenant: Tenant) -> QuerySet[Invitation]:
    """The tenant's invitations, newest first, for admins and owners."""
    require_role(user, tenant, Role.ADMIN)
    return Invitation.objects.filter(tenant=tenant).select_related("tenant", "created_by")


def access_invitation(user: AccessSubject, tenant: Tenant, pk: int) -> Invitation:
    """Raises `NotFound`."""
    invitation = access_invitations(user, tenant).filter(pk=pk).first()
    if invitation is None:
        raise NotFound("Invitation not found.")
    return invitation


def first_tenant(user: AccessSubject) -> Tenant | None:
    """The oldest active tenant that the user may see, or None."""
    return access_tenants(user).filter(active=True).order_by("pk").first()
