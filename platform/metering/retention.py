"""Retention of tenants' usage and request logs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db import router
from django.db.models import QuerySet
from django.utils import timezone

from metering.models import (
    Budget,
    RequestContent,
    RequestEntry,
    RequestFeedback,
    UsageDay,
    UsageEntry,
    UsageHour,
    Webhook,
    WebhookDelivery,
)
from tenants.models import Tenant
from tenants.tenant_data import TenantDataKind, register_data_kind, simple_kind

#: Days that the request log and its contents are retained,
REQUEST_RETENTION_DAYS = 30
#: and maximum rows per tenant: some 100 MB of requests and 60 MB of contents.
MAX_RETAINED_REQUESTS, MAX_RETAINED_CONTENTS = 100_000, 2_000
#: Rows per statement, few enough that other writers don't wait long for it.
PART = 5000


def delete_expired_usage() -> int:
    """Delete ledger rows beyond their tenants' retention; sums by hour and day stay."""
    removed = 0
    for tenant in Tenant.objects.exclude(keep_usage_days=None):
        cutoff = timezone.now() - timedelta(days=tenant.keep_usage_days or 0)
        removed += remove_rows(UsageEntry.objects.filter(tenant=tenant, started_at__lt=cutoff))
    return removed


def remove_old_requests() -> int:
    """Delete requests older than `REQUEST_RETENTION_DAYS`; contents by their tenants' retention."""
    cutoff = timezone.now() - timedelta(days=REQUEST_RETENTION_DAYS)
    removed = remove_rows(RequestEntry.objects.filter(started_at__lt=cutoff))
    removed += remove_rows(RequestContent.objects.filter(at__lt=cutoff))
    removed += remove_rows(RequestFeedback.objects.filter(changed_at__lt=cutoff))
    for tenant in Tenant.objects.filter(keep_content_days__lt=REQUEST_RETENTION_DAYS):
        sooner = timezone.now() - timedelta(days=tenant.keep_content_days or 0)
        removed += remove_rows(RequestContent.objects.filter(tenant=tenant, at__lt=sooner))
    return removed


def trim_requests(tenant_id: int) -> int:
    """Delete a tenant's oldest rows beyond `MAX_RETAINED_REQUESTS` and `MAX_RETAINED_CONTENTS`."""
    removed = 0
    for rows, max_rows, moment in (
        (RequestEntry.objects.filter(tenant_id=tenant_id), MAX_RETAINED_REQUESTS, "started_at"),
        (RequestContent.objects.filter(tenant_id=tenant_id), MAX_RETAINED_CONTENTS, "at"),
    ):
        newest = rows.order_by(f"-{moment}").values_list(moment, flat=True)
        if last := newest[max_rows : max_rows + 1]:
            removed += remove_rows(rows.filter(**{f"{moment}__lte": last[0]}))
    return removed


def register_all() -> None:
    """Register the kinds of tenant data that this app stores."""
    register_data_kind(_bulk_kind("usage", UsageEntry))
    register_data_kind(_bulk_kind("usage-hours", UsageHour))
    register_data_kind(_bulk_kind("usage-days", UsageDay))
    register_data_kind(_bulk_kind("requests", RequestEntry))
    register_data_kind(_bulk_kind("request-contents", RequestContent))
    register_data_kind(simple_kind("feedback", RequestFeedback))
    register_data_kind(simple_kind("budgets", Budget))
    register_data_kind(simple_kind("webhook-deliveries", WebhookDelivery))
    register_data_kind(simple_kind("webhook", Webhook, secret=("secret",)))


def _bulk_kind(name: str, model: Any) -> TenantDataKind:
    """A data kind of millions of rows that nothing refers to."""
    kind = simple_kind(name, model)

    def erase(tenant: Tenant) -> int:
        return remove_rows(model.objects.filter(tenant=tenant))

    return TenantDataKind(name, kind.rows, model, erase=erase)


def remove_rows(rows: QuerySet[Any]) -> int:
    """Delete rows that nothing refers to, without loading them."""
    using, removed = router.db_for_write(rows.model), 0
    while keys := list(rows.order_by("pk").values_list("pk", flat=True)[:PART]):
        part = rows.model.objects.filter(pk__gte=keys[0], pk__lte=keys[-1], pk__in=keys)
        removed += part.order_by()._raw_delete(using)
    return removed
