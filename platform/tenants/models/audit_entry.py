"""Who did what to what, when. Written in the same transaction as the deed."""

from typing import Any

from django.conf import settings
from django.core.serializers.json import DjangoJSONEncoder
from django.db import models

from tenants.models.api_key import ApiKey
from tenants.models.tenant import Tenant


class AppendOnly(Exception):
    """An audit entry was to be changed or deleted."""


class ActorKind(models.TextChoices):
    """What acted."""

    PERSON = "person", "Person"
    KEY = "key", "API key"
    COMMAND = "command", "Command"
    SYSTEM = "system", "System"


class AuditQuerySet(models.QuerySet):
    """Reads and adds."""

    def update(self, **kwargs: Any) -> int:
        raise AppendOnly("Audit entries can't be changed.")

    def bulk_update(self, *args: Any, **kwargs: Any) -> int:
        raise AppendOnly("Audit entries can't be changed.")

    def delete(self) -> tuple[int, dict[str, int]]:
        raise AppendOnly("Audit entries can't be deleted.")


class AuditEntry(models.Model):
    """Who did what to what, when. None can be changed, or deleted but by `tenants.audit_retention`.

    `details["changes"]` holds `{field: [before, after]}`. Actor and key are no constraints: what
    they did stays, under their ids, whatever becomes of them.
    """

    at = models.DateTimeField(auto_now_add=True, db_index=True)
    actor = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        models.DO_NOTHING,
        db_constraint=False,
        null=True,
        blank=True,
        related_name="+",
    )
    actor_kind = models.CharField(max_length=10, choices=ActorKind, default=ActorKind.SYSTEM)
    actor_label = models.CharField(max_length=200)
    actor_key = models.ForeignKey(
        ApiKey, models.DO_NOTHING, db_constraint=False, null=True, blank=True, related_name="+"
    )
    address = models.CharField(max_length=45, blank=True, help_text="Client IP address.")
    tenant = models.ForeignKey(Tenant, models.PROTECT, null=True, blank=True, related_name="+")
    action = models.CharField(max_length=60, db_index=True)
    target_type = models.CharField(max_length=60)
    target_id = models.CharField(max_length=60)
    target_label = models.CharField(max_length=250)
    details = models.JSONField(default=dict, encoder=DjangoJSONEncoder)

    objects = AuditQuerySet.as_manager()

    class Meta:
        verbose_name_plural = "audit entries"
        ordering = ["-pk"]

    def __str__(self) -> str:
        return f"{self.actor_label}: {self.action} {self.target_label}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        if self.pk is not None:
            raise AppendOnly("An audit entry can't be changed.")
        super().save(*args, **kwargs)

    def delete(self, *args: Any, **kwargs: Any) -> tuple[int, dict[str, int]]:
        raise AppendOnly("An audit entry can't be deleted.")
