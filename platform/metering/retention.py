"""What metering keeps of tenants, and for how long."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db import router
from django.db.models import QuerySet
from django.utils import timezone

from metering.models import Budget, UsageDay, UsageEntry, UsageHour, Webhook, WebhookDelivery
from tenants.holdings import Holding, of_tenant, register
from tenants.models import Tenant

#: Rows of one statement: nobody who writes waits for long behind it.
PART = 5000


def remove_old_entries() -> int:
    """Remove single requests that their tenants keep no longer; sums by hour and day stay."""
    removed = 0
    for tenant in Tenant.objects.exclude(keep_usage_days=None):
        before = timezone.now() - timedelta(days=tenant.keep_usage_days or 0)
        removed += _remove(UsageEntry.objects.filter(tenant=tenant, started_at__lt=before))
    return removed


def register_all() -> None:
    """Name what this app keeps."""
    register(_many("usage", UsageEntry))
    register(_many("usage-hours", UsageHour))
    register(_many("usage-days", UsageDay))
    register(of_tenant("budgets", Budget))
    register(of_tenant("webhook-deliveries", WebhookDelivery))
    register(of_tenant("webhook", Webhook, secret=("secret",)))


def _many(name: str, model: Any) -> Holding:
    """Rows by the million that nothing refers to."""
    plain = of_tenant(name, model)

    def erase(tenant: Tenant) -> int:
        return _remove(model.objects.filter(tenant=tenant))

    return Holding(name, plain.rows, model, erase=erase)


def _remove(rows: QuerySet[Any]) -> int:
    """Delete rows that nothing refers to, without loading them."""
    using, removed = router.db_for_write(rows.model), 0
    while keys := list(rows.order_by("pk").values_list("pk", flat=True)[:PART]):
        part = rows.model.objects.filter(pk__gte=keys[0], pk__lte=keys[-1], pk__in=keys)
        removed += part.order_by()._raw_delete(using)
    return removed
