"""Telling tenants' webhooks: each event is a row first, then tried until it's taken or given up.

A POST of JSON with `X-Quire-Event`, its id, which stays the same when it's tried again, and
`X-Quire-Signature: t=<seconds>,v1=<hex>`, the HMAC-SHA256 of `<seconds>.<body>` under the secret.
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

from django.db import transaction
from django.db.models import F
from django.utils import timezone

from engine.contract.errors import QuireError
from metering.models import Webhook, WebhookDelivery
from metering.models.webhook_delivery import PAUSES
from tenants.egress import post
from tenants.models import Tenant
from tenants.work import hint

logger = logging.getLogger(__name__)

DELIVER = "metering.deliver"
#: A try that a worker has begun is another's when nothing was heard of it for so long.
CLAIM = timedelta(minutes=2)
#: The log of a tenant's deliveries goes back so far.
KEEP = timedelta(days=30)
#: Of one look at what is due.
MOST = 200


def queue_event(tenant: Tenant, kind: str, values: dict[str, Any]) -> WebhookDelivery | None:
    """Note an event for the tenant's webhook, if there's one; workers send it after the commit."""
    hook = Webhook.objects.filter(tenant=tenant).first()
    if hook is None:
        return None
    event_id = str(uuid.uuid4())
    told = {"id": event_id, "type": kind, "tenant": tenant.slug, **values}
    made = WebhookDelivery.objects.create(
        tenant=tenant,
        event_id=event_id,
        kind=kind,
        url=hook.url,
        body=json.dumps(told, separators=(",", ":")),
        next_try_at=timezone.now(),
    )
    transaction.on_commit(partial(hint, DELIVER, made.pk))
    return made


def deliver(pk: int) -> WebhookDelivery | None:
    """Try it if it's due and no other worker does; how it went, or None."""
    now = timezone.now()
    due = WebhookDelivery.objects.filter(pk=pk, next_try_at__lte=now)
    if not due.update(next_try_at=now + CLAIM, attempts=F("attempts") + 1):
        return None
    row = WebhookDelivery.objects.select_related("tenant").get(pk=pk)
    hook = Webhook.objects.filter(tenant=row.tenant).first()
    if hook is None or hook.url != row.url:
        row.error, row.next_try_at = "The webhook was changed or removed.", None
    else:
        _send(row, hook)
    row.save(update_fields=["status", "error", "next_try_at", "delivered_at"])
    return row


def deliver_due() -> int:
    """Try what is due: new events whose hint was lost, and later tries. How many were taken."""
    due = WebhookDelivery.objects.filter(next_try_at__lte=timezone.now()).order_by("next_try_at")
    tried = [deliver(pk) for pk in list(due.values_list("pk", flat=True)[:MOST])]
    return sum(row is not None and row.state == "delivered" for row in tried)


def forget_old() -> int:
    """Shorten the log; how many rows went."""
    old = WebhookDelivery.objects.filter(next_try_at=None, created_at__lt=timezone.now() - KEEP)
    return old.delete()[0]


def _send(row: WebhookDelivery, hook: Webhook) -> None:
    body = row.body.encode()
    headers = {
        "Content-Type": "application/json",
        "X-Quire-Event": row.event_id,
        "X-Quire-Signature": signature(hook.secret, body, int(time.time())),
    }
    row.status, row.error = None, ""
    try:
        row.status = post(hook.url, body, headers)
    except QuireError as error:
        row.error = error.message[:300]
    if row.status is not None and 200 <= row.status < 300:
        row.delivered_at, row.next_try_at = timezone.now(), None
        return
    told = row.error or f"it answered {row.status}"
    logger.warning("the webhook of %s was not told of %s: %s", row.tenant, row, told)
    again = row.attempts <= len(PAUSES)
    row.next_try_at = timezone.now() + PAUSES[row.attempts - 1] if again else None


def signature(secret: str, body: bytes, seconds: int) -> str:
    """`t=...,v1=...`: the receiver checks both, so that nobody sends an old event again."""
    signed = hmac.new(secret.encode(), f"{seconds}.".encode() + body, hashlib.sha256)
    return f"t={seconds},v1={signed.hexdigest()}"
