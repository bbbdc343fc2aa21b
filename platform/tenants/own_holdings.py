"""What this app keeps of a tenant."""

from __future__ import annotations

from tenants.holdings import Holding, of_tenant, register, remove_in_parts
from tenants.models import ApiKey, AuditEntry, Invitation, Membership, ServiceAccount, Tenant


def _erase_keys(tenant: Tenant) -> int:
    """Those that followed another by rotation protect it: they let go first."""
    keys = ApiKey.objects.filter(tenant=tenant)
    keys.update(first=None)
    return remove_in_parts(keys)


def register_all() -> None:
    """Keys before the accounts that hold them."""
    register(
        Holding(
            "keys",
            lambda tenant: ApiKey.objects.filter(tenant=tenant),
            ApiKey,
            secret=("digest",),
            erase=_erase_keys,
        )
    )
    register(of_tenant("service-accounts", ServiceAccount))
    register(of_tenant("invitations", Invitation, secret=("digest",)))
    register(of_tenant("members", Membership))
    register(of_tenant("audit-log", AuditEntry, stays=True))
