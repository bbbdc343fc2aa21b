"""What tenants may reserve of the KV caches, all together."""

import math

from engine.contract.errors import InvalidRequest
from tenants.models import Tenant

#: Of each replica's KV cache, over all active tenants: the rest is everybody's.
MAX_RESERVED = 0.9


def check_kv_shares(tenant: Tenant) -> None:
    """Refuse a reserve above the tenant's own maximum, or one too many beside the others'.

    Call it in the transaction that saved the tenant: the rows of all who reserve are locked, so
    that two reserves set at once are counted in turn.

    Raises: `InvalidRequest` with `param` and, beside others, the sum.
    """
    reserved = tenant.kv_reserved_fraction
    if reserved > tenant.kv_max_fraction:
        raise InvalidRequest(
            f"kv_reserved_fraction is {reserved:g}, above the tenant's own kv_max_fraction of "
            f"{tenant.kv_max_fraction:g}.",
            param="kv_reserved_fraction",
        )
    if not reserved or not tenant.active:
        return
    reserving = Tenant.objects.select_for_update().filter(active=True, kv_reserved_fraction__gt=0)
    shares = reserving.order_by("pk").values_list("kv_reserved_fraction", flat=True)
    total = math.fsum(shares)
    if total > MAX_RESERVED + 1e-9:
        raise InvalidRequest(
            f"Reserved KV cache of all tenants would be {total:g}; the maximum is "
            f"{MAX_RESERVED:g}.",
            param="kv_reserved_fraction",
        )
