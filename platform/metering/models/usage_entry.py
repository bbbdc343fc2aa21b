"""The usage ledger."""

from django.conf import settings
from django.db import models

from tenants.models import ApiKey, Tenant


class UsageEntry(models.Model):
    """What one request used. Written once, keyed by its request id, and never changed.

    The references carry no database constraint: what was used stays on the bill whatever becomes of
    a key or a user, and one odd row can't hold up the spool behind it.
    """

    request_id = models.CharField(max_length=200, unique=True)
    tenant = models.ForeignKey(
        Tenant, models.DO_NOTHING, db_constraint=False, related_name="usage", db_index=False
    )
    api_key = models.ForeignKey(
        ApiKey,
        models.DO_NOTHING,
        db_constraint=False,
        null=True,
        blank=True,
        related_name="usage",
        verbose_name="API key",
    )
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        models.DO_NOTHING,
        db_constraint=False,
        null=True,
        blank=True,
        related_name="+",
    )
    endpoint = models.CharField(max_length=100)
    model = models.CharField(max_length=200)
    adapter = models.CharField(max_length=100, blank=True, default="")
    adapter_digest = models.CharField(
        max_length=64, blank=True, default="", help_text="Sha256 of the content that answered."
    )
    in_place_of = models.CharField(
        max_length=200,
        blank=True,
        default="",
        help_text="Requested model, if a fallback answered.",
    )
    prompt_tokens = models.PositiveBigIntegerField()
    cached_tokens = models.PositiveBigIntegerField(
        help_text="Prompt tokens that came from the prefix cache; part of the prompt tokens."
    )
    completion_tokens = models.PositiveBigIntegerField()
    cost_nanos = models.PositiveBigIntegerField(
        "cost (1e-9)", default=0, help_text="In 1e-9 of the currency, at the prices of its start."
    )
    finish_reason = models.CharField(max_length=40, blank=True)
    status = models.PositiveSmallIntegerField(help_text="HTTP status, 499 when the client left.")
    started_at = models.DateTimeField()
    ttft_ms = models.FloatField(null=True, blank=True, verbose_name="TTFT (ms)")
    duration_ms = models.FloatField(verbose_name="duration (ms)")
    stream = models.BooleanField()
    recorded_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name_plural = "usage entries"
        ordering = ["-started_at", "-pk"]
        indexes = [
            models.Index(fields=["tenant", "started_at"]),
            models.Index(fields=["started_at"]),
            models.Index(fields=["model", "started_at"]),
            models.Index(
                fields=["tenant", "model", "adapter", "started_at"],
                condition=~models.Q(adapter=""),
                name="usage_of_adapters",
            ),
        ]

    def __str__(self) -> str:
        return self.request_id

    @property
    def total_tokens(self) -> int:
        """Prompt and output together."""
        return self.prompt_tokens + self.completion_tokens
