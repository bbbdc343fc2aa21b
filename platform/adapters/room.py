"""How much room adapters have, one and all of a tenant's together."""

from __future__ import annotations

from django.conf import settings
from django.db.models import Sum

from adapters.errors import AdapterTooLarge
from adapters.models import AdapterUpload, AdapterVersion
from tenants.models import Tenant

#: The code of what is refused because of what a tenant keeps already.
FULL = "adapter_storage_full"


def most_of_one() -> int:
    """Bytes that one adapter may have."""
    return int(settings.QUIRE["MAX_ADAPTER_BYTES"])


def most_of_tenant() -> int:
    """Bytes that all of a tenant's may have together; 0 is no limit."""
    return int(settings.QUIRE["TENANT_ADAPTER_BYTES"])


def used(tenant: Tenant) -> int:
    """Bytes of all versions, and of the uploads under way."""
    kept = AdapterVersion.objects.filter(adapter__tenant=tenant).aggregate(sum=Sum("num_bytes"))
    coming = AdapterUpload.objects.filter(tenant=tenant)
    return int(kept["sum"] or 0) + int(coming.aggregate(sum=Sum("num_bytes"))["sum"] or 0)


def check(tenant: Tenant | None, size: int) -> None:
    """Raise `AdapterTooLarge` when there's no room for so many bytes more.

    In a transaction: the tenant's row is locked, so that two can't both take the last room.
    """
    if size > most_of_one():
        raise AdapterTooLarge(
            f"The adapter has {size} bytes; at most {most_of_one()} are allowed.", param="files"
        )
    if tenant is None or not most_of_tenant():
        return
    Tenant.objects.select_for_update().get(pk=tenant.pk)
    taken = used(tenant)
    if taken + size > most_of_tenant():
        raise AdapterTooLarge(
            f"{tenant} may keep {most_of_tenant()} bytes of adapters and has {taken}: delete a "
            "version first.",
            param="files",
            code=FULL,
        )
