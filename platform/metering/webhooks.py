"""Webhook events of tenants, and of operators (tenant None).

Each event is stored as a row first, then sent until it is accepted or given up.

A POST of JSON with `X-Quire-Event`, the event's id, which is the same for every attempt, and
`X-Quire-Signature: t=<seconds>,v1=<hex>`, the HMAC-SHA256 of `<seconds>.<body>` under the secret.

A webhook that never answers delays only its own tenant: workers send one event per tenant at a
time, pause an address after several failures in a row, and limit the pending events.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import time
import uuid
from datetime import timedelta
from functools import partial
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from django.db import transaction
from django.db.models import Count, F, Min, QuerySet
from django.utils import timezone

from common.errors import RateLimited
from common.outbound_http import CircuitBreaker, post_webhook
from common.task_queue import send_task_best_effort
from engine.contract.errors import QuireError
from metering.models import RETRY_DELAYS, Webhook, WebhookDelivery
from metering.redis_scripts import redis_key, sync_client
from metering.retention import remove_rows
from tenants.models import Tenant

logger = logging.getLogger(__name__)

DELIVER = "metering.deliver"
#: Retention of a tenant's delivery log,
LOG_RETENTION = timedelta(days=30)
#: and its maximum length.
MAX_LOGGED = 10_000
#: Maximum number of a tenant's pending events.
MAX_WAITING = 1000
#: A tenant's lock expires after this time, in case its holder died: longer than the time limit of
#: this queue's tasks.
LOCK_S = 30.0


def create_event(
    tenant: Tenant | None, kind: str, values: dict[str, Any]
) -> WebhookDelivery | None:
    """Store an event for the webhook, if there is one; workers send it after the commit.

    Raises: `RateLimited` if `MAX_WAITING` events are pending.
    """
    hook = Webhook.objects.filter(tenant=tenant).first()
    if hook is None:
        return None
    check_waiting(tenant)
    event_id = str(uuid.uuid4())
    payload = {"id": event_id, "type": kind, "tenant": tenant and tenant.slug, **values}
    delivery = WebhookDelivery.objects.create(
        tenant=tenant,
        event_id=event_id,
        kind=kind,
        url=hook.url,
        body=json.dumps(payload, separators=(",", ":")),
        next_try_at=timezone.now(),
    )
    transaction.on_commit(partial(send_task_best_effort, DELIVER, delivery.pk))
    return delivery


def check_waiting(tenant: Tenant | None) -> None:
    """Raise `RateLimited` if the webhook has too many pending events."""
    waiting = WebhookDelivery.objects.filter(tenant=tenant, next_try_at__isnull=False)
    if waiting.count() >= MAX_WAITING:
        raise RateLimited(f"{MAX_WAITING:,} events wait for the webhook already.", retry_after=60)


def deliver_event(pk: int) -> WebhookDelivery | None:
    """Attempt delivery if it is due and allowed now; None if it wasn't attempted.

    After each attempt a task is queued for the tenant's next event, so a worker that finds the
    tenant locked can safely drop its own.
    """
    row = _due().select_related("tenant").filter(pk=pk).first()
    if row is None:
        return None
    hook = Webhook.objects.filter(tenant=row.tenant).first()
    if hook is not None and _breaker(hook).is_open:
        return None
    with sync_client() as client:
        lock = client.lock(redis_key(f"webhook:{row.tenant_id}"), timeout=LOCK_S)
        if not lock.acquire(blocking=False):
            return None
        try:
            tried = _try(row, hook)
        finally:
            lock.release()
    following = _due().filter(tenant=row.tenant).order_by("next_try_at").first()
    if following is not None:
        send_task_best_effort(DELIVER, following.pk)
    return tried


def deliver_due_events() -> int:
    """Queue a task for one due event of each tenant; returns the number of tenants.

    For events whose task was lost, whose attempt failed, or whose address was paused.
    """
    first = _due().order_by().values("tenant").annotate(first=Min("pk"))
    due = list(first.values_list("first", flat=True))
    for pk in due:
        send_task_best_effort(DELIVER, pk)
    return len(due)


def _due() -> QuerySet[WebhookDelivery]:
    return WebhookDelivery.objects.filter(next_try_at__lte=timezone.now())


def _breaker(hook: Webhook) -> CircuitBreaker:
    return CircuitBreaker(f"webhook:{hook.pk}")


def _try(row: WebhookDelivery, hook: Webhook | None) -> WebhookDelivery | None:
    """The event after one attempt; None if another worker attempted it meanwhile."""
    # Schedule the next attempt before this one: it must survive if this worker is killed.
    again = row.attempts < len(RETRY_DELAYS)
    next_try_at = timezone.now() + RETRY_DELAYS[row.attempts] if again else None
    claimed = WebhookDelivery.objects.filter(pk=row.pk, next_try_at=row.next_try_at)
    if not claimed.update(next_try_at=next_try_at, attempts=F("attempts") + 1):
        return None
    row.attempts, row.next_try_at = row.attempts + 1, next_try_at
    if hook is None or hook.url != row.url:
        row.error, row.next_try_at = "The webhook was changed or removed.", None
    else:
        _send(row, hook)
    row.save(update_fields=["status", "error", "next_try_at", "delivered_at"])
    return row


def forget_old() -> int:
    """Trim the log; returns the number of deleted rows."""
    settled = WebhookDelivery.objects.filter(next_try_at=None)
    removed = remove_rows(settled.filter(created_at__lt=timezone.now() - LOG_RETENTION))
    counts = settled.order_by().values("tenant").annotate(count=Count("pk"))
    for tenant_id in counts.filter(count__gt=MAX_LOGGED).values_list("tenant", flat=True):
        rows = settled.filter(tenant=tenant_id)
        newest = rows.order_by("-pk").values_list("pk", flat=True)
        if last := newest[MAX_LOGGED : MAX_LOGGED + 1]:
            removed += remove_rows(rows.filter(pk__lte=last[0]))
    return removed


def _send(row: WebhookDelivery, hook: Webhook) -> None:
    body = row.body.encode()
    headers = {
        "Content-Type": "application/json",
        "X-Quire-Event": row.event_id,
        "X-Quire-Signature": signature(hook.secret, body, int(time.time())),
    }
    row.status, row.error = None, ""
    breaker = _breaker(hook)
    breaker.attempt()
    try:
        row.status = post_webhook(hook.url, body, headers)
    except QuireError as error:
        row.error = error.message[:300]
    except SoftTimeLimitExceeded:
        row.error = "The try took too long."
    if row.status is not None and 200 <= row.status < 300:
        breaker.succeed()
        row.delivered_at, row.next_try_at = timezone.now(), None
        return
    reason = row.error or f"it answered {row.status}"
    logger.warning("webhook delivery failed: %s, event %s: %s", hook, row, reason)


def signature(secret: str, body: bytes, seconds: int) -> str:
    """`t=...,v1=...`: the timestamp is signed, so that receivers can reject replayed events."""
    signed = hmac.new(secret.encode(), f"{seconds}.".encode() + body, hashlib.sha256)
    return f"t={seconds},v1={signed.hexdigest()}"
