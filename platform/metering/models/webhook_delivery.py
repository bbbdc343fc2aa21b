"""What was, or shall be, sent to a tenant's webhook."""

from __future__ import annotations

from datetime import timedelta

from django.db import models

from tenants.models import Tenant

#: Waits before the second try, the third and so on; after the last one it's given up.
PAUSES = tuple(timedelta(minutes=m) for m in (1, 5, 30, 120, 360))


class WebhookDelivery(models.Model):
    """One event on its way to a webhook, and how that went.

    `body` is sent byte for byte at every try. `next_try_at` is empty once it was taken or given up.
    """

    tenant = models.ForeignKey(Tenant, models.CASCADE, related_name="+")
    event_id = models.CharField(max_length=36, unique=True)
    kind = models.CharField(max_length=60)
    url = models.CharField(max_length=2000)
    body = models.TextField()
    created_at = models.DateTimeField(auto_now_add=True)
    attempts = models.PositiveSmallIntegerField(default=0)
    next_try_at = models.DateTimeField(null=True, blank=True, db_index=True)
    status = models.PositiveSmallIntegerField(
        null=True, blank=True, help_text="HTTP status of the last attempt."
    )
    error = models.CharField(max_length=300, blank=True)
    delivered_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        verbose_name_plural = "webhook deliveries"
        ordering = ["-pk"]

    def __str__(self) -> str:
        return f"{self.kind} {self.event_id}"

    @property
    def state(self) -> str:
        """ "delivered", "waiting" or "failed"."""
        if self.delivered_at is not None:
            return "delivered"
        return "failed" if self.next_try_at is None else "waiting"
