"""The one way to read adapters. What a user may not see is `NotFound` (404)."""

from __future__ import annotations

from django.db.models import Q, QuerySet

from adapters.actions.rights import require
from adapters.errors import NotFound
from adapters.models import Adapter, AdapterAlias, AdapterUpload, AdapterVersion
from catalog.access import access_served_models
from tenants.access import access_role
from tenants.actors import Actor, as_actor, require_operator
from tenants.models import Role, Tenant, User

Reader = Actor | User


def access_adapters(user: Reader, tenant: Tenant | None) -> QuerySet[Adapter]:
    """A tenant's own and those shared with it, for any member; without a tenant all the shared
    ones, for operators.
    """
    rows = Adapter.objects.select_related("tenant", "served_model")
    if tenant is None:
        require_operator(as_actor(user))
        return rows.filter(tenant__isnull=True)
    access_role(user, tenant)
    models = access_served_models(tenant).values("pk")
    return rows.filter(Q(tenant=tenant) | Q(tenant__isnull=True, served_model__in=models))


def access_adapter(user: Reader, tenant: Tenant | None, pk: int) -> Adapter:
    """Raises `NotFound`."""
    found = access_adapters(user, tenant).filter(pk=pk).first()
    if found is None:
        raise NotFound("Adapter not found.")
    return found


def access_all_adapters(user: Reader) -> QuerySet[Adapter]:
    """Everybody's. `PermissionDenied` for all but operators."""
    require_operator(as_actor(user))
    return Adapter.objects.select_related("tenant", "served_model")


def access_version(user: Reader, adapter: Adapter, number: int) -> AdapterVersion:
    """A version of an adapter that the user may see. Raises `NotFound`."""
    found = adapter.versions.filter(number=number).first()
    if found is None:
        raise NotFound(f"{adapter} has no version {number}.")
    found.adapter = adapter
    return found


def access_alias(user: Reader, adapter: Adapter, name: str) -> AdapterAlias:
    """A name of an adapter that the user may see; "" is the adapter's own. Raises `NotFound`."""
    rows = adapter.aliases.select_related("version", "canary", "previous")
    found = rows.filter(name=name or adapter.name).first()
    if found is None:
        raise NotFound(f"{adapter} has no alias {name[:100]!r}.", param="alias")
    found.adapter = adapter
    return found


def access_uploads(user: Reader, tenant: Tenant | None) -> QuerySet[AdapterUpload]:
    """Those under way, for members; without a tenant those of shared adapters, for operators."""
    require(as_actor(user), tenant, Role.MEMBER)
    return AdapterUpload.objects.filter(tenant=tenant).select_related("tenant", "served_model")


def access_upload(user: Reader, tenant: Tenant | None, public_id: str) -> AdapterUpload:
    """Raises `NotFound`."""
    found = access_uploads(user, tenant).filter(public_id=public_id).first()
    if found is None:
        raise NotFound("Upload not found.")
    return found
