"""A key of a tenant. The database holds its hash alone."""

from datetime import datetime

from django.conf import settings
from django.db import models
from django.utils import timezone

from tenants import secrets
from tenants.key_limits import check_addresses, check_endpoints, check_models
from tenants.models.service_account import ServiceAccount
from tenants.models.tenant import Tenant
from tenants.scopes import default_scopes


class ApiKey(models.Model):
    """A key of a tenant: `tenants.secrets` says how it's made and why a fast hash is enough.

    It's held by a service account, or else by the person who made it and ends with them, or else
    (made by a command) by the tenant itself.
    """

    tenant = models.ForeignKey(Tenant, models.PROTECT, related_name="api_keys")
    name = models.CharField(max_length=100, blank=True, help_text="Purpose of the key.")
    public_id = models.CharField(max_length=16, unique=True, editable=False)
    digest = models.CharField(max_length=64, editable=False)
    scopes = models.JSONField(default=default_scopes)
    requests_per_minute = models.PositiveBigIntegerField(
        null=True, blank=True, help_text="A limit of this key alone, within the tenant's."
    )
    tokens_per_minute = models.PositiveBigIntegerField(null=True, blank=True)
    max_running_requests = models.PositiveIntegerField(
        null=True, blank=True, help_text="Maximum concurrent requests. Empty: no limit."
    )
    max_context_tokens = models.PositiveIntegerField(
        null=True, blank=True, help_text="Of prompt and output together. Empty: the model's."
    )
    allowed_models = models.JSONField(
        default=list,
        blank=True,
        validators=[check_models],
        help_text='Models that it may use, such as ["small", "large"]. Empty: the tenant\'s.',
    )
    endpoints = models.JSONField(
        default=list,
        blank=True,
        validators=[check_endpoints],
        help_text='Paths that it may ask, such as ["/v1/embeddings"]. Empty: all.',
    )
    addresses = models.JSONField(
        default=list,
        blank=True,
        validators=[check_addresses],
        help_text='Client networks allowed to use the key, such as ["10.0.0.0/8"]. Empty: any.',
    )
    first = models.ForeignKey(
        "self",
        models.PROTECT,
        null=True,
        blank=True,
        editable=False,
        related_name="successors",
        help_text="First key of this rotation chain; limits and budgets are shared along it.",
    )
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, blank=True, editable=False
    )
    service_account = models.ForeignKey(
        ServiceAccount, models.PROTECT, null=True, blank=True, related_name="api_keys"
    )
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField(null=True, blank=True, help_text="Empty: never.")
    revoked_at = models.DateTimeField(null=True, blank=True, editable=False)
    last_used_at = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="Updated at most once a minute."
    )

    class Meta:
        verbose_name = "API key"
        ordering = ["-created_at", "-pk"]

    def __str__(self) -> str:
        return f"{self.prefix} ({self.name})" if self.name else self.prefix

    @property
    def prefix(self) -> str:
        """The part that may be shown: enough to recognise it, nothing to use it with."""
        return f"{secrets.PREFIX}{self.public_id}..."

    def state(self, now: datetime | None = None) -> str:
        """ "active", "revoked" or "expired"."""
        if self.revoked_at is not None:
            return "revoked"
        if self.expires_at is not None and self.expires_at <= (now or timezone.now()):
            return "expired"
        return "active"
