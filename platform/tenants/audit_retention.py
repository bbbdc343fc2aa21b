"""Retention of the audit log.

Changes of files, batches and conversations by keys and users are routine and numerous, and are
deleted first. Everything else concerns permissions, and is kept longer.

Rows are deleted in pages. Monthly partitions couldn't be dropped whole: rows of one month expire at
different times, by kind and by the tenant's number of rows.
"""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.db import router
from django.db.models import Count, QuerySet
from django.utils import timezone

from tenants.audit import deletions_allowed
from tenants.models import AuditEntry

ROUTINE = (
    *("file.create", "file.delete", "upload.create", "upload.cancel"),
    *("batch.create", "batch.cancel", "batch.delete"),
    *("conversation.create", "conversation.update", "conversation.delete"),
    *("item_conversation.create", "item_conversation.update", "item_conversation.delete"),
    *("item_conversation.delete_item",),
)
#: Retention of routine rows,
ROUTINE_DAYS = 30
#: and their maximum number per tenant: some 50 MB.
MAX_ROUTINE = 100_000
#: Rows deleted per transaction, few enough that other writers don't wait long for it.
PAGE = 5000


def remove_old() -> int:
    """Delete expired rows; returns how many."""
    routine = AuditEntry.objects.filter(action__in=ROUTINE)
    removed = _remove(routine.filter(at__lt=timezone.now() - timedelta(days=ROUTINE_DAYS)))
    counts = routine.order_by().values("tenant_id").annotate(count=Count("pk"))
    for tenant_id in counts.filter(count__gt=MAX_ROUTINE).values_list("tenant_id", flat=True):
        rows = routine.filter(tenant_id=tenant_id)
        newest = rows.order_by("-pk").values_list("pk", flat=True)
        if last := newest[MAX_ROUTINE : MAX_ROUTINE + 1]:
            removed += _remove(rows.filter(pk__lte=last[0]))
    if days := settings.QUIRE.audit_days:
        cutoff = timezone.now() - timedelta(days=days)
        removed += _remove(AuditEntry.objects.filter(at__lt=cutoff))
    return removed


def _remove(rows: QuerySet[AuditEntry]) -> int:
    """Delete them in pages, the oldest first."""
    using, removed = router.db_for_write(AuditEntry), 0
    while page := list(rows.order_by("pk").values_list("pk", flat=True)[:PAGE]):
        with deletions_allowed(using):
            removed += rows.filter(pk__lte=page[-1]).order_by()._raw_delete(using)
    return removed
