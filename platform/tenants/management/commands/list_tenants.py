from typing import Any

from django.db.models import Count, Q
from django.utils import timezone

from common.commands import QuireCommand
from tenants.models import Tenant

HEAD = ("TENANT", "NAME", "STATE", "WEIGHT", "KV CACHE", "REQUESTS/MIN", "TOKENS/MIN", "KEYS")


class Command(QuireCommand):
    help = "List tenants with their limits and their number of valid keys."

    def handle(self, *args: Any, **options: Any) -> None:
        works = Q(api_keys__revoked_at=None) & (
            Q(api_keys__expires_at=None) | Q(api_keys__expires_at__gt=timezone.now())
        )
        tenants = Tenant.objects.annotate(num_keys=Count("api_keys", filter=works))
        self.table(HEAD, [row(tenant) for tenant in tenants])


def row(tenant: Any) -> tuple[object, ...]:
    """A tenant's cells; `tenant.num_keys` is an annotation."""
    return (
        tenant.slug,
        tenant.name,
        "on" if tenant.active else "off",
        f"{tenant.weight:g}",
        f"{tenant.kv_reserved_fraction:.0%} to {tenant.kv_max_fraction:.0%}",
        limit(tenant.requests_per_minute),
        limit(tenant.tokens_per_minute),
        tenant.num_keys,
    )


def limit(value: int | None) -> str:
    """None is the installation's default, 0 no limit."""
    return "default" if value is None else str(value or "none")
