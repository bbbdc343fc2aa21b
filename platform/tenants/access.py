"""The one way to read a tenant's objects. What a user may not see is `NotFound` (404)."""

from django.db.models import QuerySet

from tenants.actors import as_actor, require_role, role_in
from tenants.errors import NotFound
from tenants.models import ApiKey, AuditEntry, Membership, Role, Tenant, User


def access_tenants(user: User) -> QuerySet[Tenant]:
    """The tenants that the user belongs to; all of them for an operator."""
    if as_actor(user).is_operator:
        return Tenant.objects.all()
    if not user.is_active:
        return Tenant.objects.none()
    return Tenant.objects.filter(memberships__user=user)


def access_tenant(user: User, slug: str) -> Tenant:
    """Raises `NotFound` for a tenant that isn't there or isn't the user's."""
    tenant = access_tenants(user).filter(slug=slug).first()
    if tenant is None:
        raise NotFound(f"There is no tenant {slug!r}.", param="tenant")
    return tenant


def access_role(user: User, tenant: Tenant) -> Role:
    """What the user is in the tenant (an operator counts as owner). `NotFound` for a stranger."""
    require_role(as_actor(user), tenant, Role.VIEWER)
    return role_in(user, tenant) or Role.OWNER


def access_members(user: User, tenant: Tenant) -> QuerySet[Membership]:
    """All members, for any member."""
    require_role(as_actor(user), tenant, Role.VIEWER)
    return Membership.objects.filter(tenant=tenant).select_related("user", "tenant")


def access_member(user: User, tenant: Tenant, pk: int) -> Membership:
    """Raises `NotFound`."""
    membership = access_members(user, tenant).filter(pk=pk).first()
    if membership is None:
        raise NotFound("There is no such member.")
    return membership


def access_keys(user: User, tenant: Tenant) -> QuerySet[ApiKey]:
    """All keys for admins and owners; for others those that they made."""
    role = access_role(user, tenant)
    keys = ApiKey.objects.filter(tenant=tenant).select_related("tenant", "created_by")
    return keys if role.rank >= Role.ADMIN.rank else keys.filter(created_by=user)


def access_key(user: User, tenant: Tenant, pk: int) -> ApiKey:
    """Raises `NotFound`."""
    key = access_keys(user, tenant).filter(pk=pk).first()
    if key is None:
        raise NotFound("There is no such key.")
    return key


def access_audit(user: User, tenant: Tenant) -> QuerySet[AuditEntry]:
    """The tenant's audit log, newest first, for admins and owners."""
    require_role(as_actor(user), tenant, Role.ADMIN)
    return AuditEntry.objects.filter(tenant=tenant).select_related("actor")
