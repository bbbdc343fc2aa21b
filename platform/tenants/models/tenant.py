"""A tenant: whose requests, whose cache, whose bill."""

import hashlib
import hmac
import math
import secrets

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models

from tenants.key_limits import check_models, check_zone

SALT_BYTES = 32
#: A month's budgets count single requests where a time zone begins days between whole hours.
MIN_USAGE_DAYS = 35


def new_salt() -> str:
    """256 random bits in hex."""
    return secrets.token_hex(SALT_BYTES)


def check_finite(value: float) -> None:
    """NaN is neither below a minimum nor above a maximum. Raises ValidationError."""
    if not math.isfinite(value):
        raise ValidationError("Must be a finite number.")


class Tenant(models.Model):
    """Whose requests, cache and bill. Never deleted, only deactivated: the ledger names it."""

    slug = models.CharField(
        max_length=63,
        unique=True,
        validators=[
            RegexValidator(
                r"\A[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\Z",
                "Lower-case letters, digits and hyphens; a letter or digit first and last.",
            )
        ],
        help_text="Short name for commands and addresses, such as `acme`.",
    )
    name = models.CharField(max_length=200)
    active = models.BooleanField(
        default=True, help_text="Off: its keys and members are refused within seconds."
    )
    weight = models.FloatField(
        default=1.0,
        validators=[check_finite, MinValueValidator(0.01), MaxValueValidator(1000.0)],
        help_text="Share of the engine when it's busy, relative to other tenants (0.01 to 1000).",
    )
    kv_reserved_fraction = models.FloatField(
        "KV cache reserved",
        default=0.0,
        validators=[check_finite, MinValueValidator(0.0), MaxValueValidator(1.0)],
        help_text="Part of each replica's KV cache that others leave free for this tenant "
        "(0 to 1).",
    )
    kv_max_fraction = models.FloatField(
        "KV cache at most",
        default=1.0,
        validators=[check_finite, MinValueValidator(0.01), MaxValueValidator(1.0)],
        help_text="Part of each replica's KV cache that this tenant may use (0.01 to 1).",
    )
    max_priority = models.PositiveIntegerField(
        default=0,
        validators=[MaxValueValidator(1000)],
        help_text="Highest priority that requests may set: from -N (runs first) to 0.",
    )
    requests_per_minute = models.PositiveBigIntegerField(
        null=True, blank=True, help_text="Empty: the installation's default."
    )
    tokens_per_minute = models.PositiveBigIntegerField(
        null=True, blank=True, help_text="Prompt and output together. Empty: the default."
    )
    max_running_requests = models.PositiveIntegerField(
        null=True, blank=True, help_text="Maximum concurrent requests. Empty: no limit."
    )
    max_context_tokens = models.PositiveIntegerField(
        null=True,
        blank=True,
        help_text="Maximum tokens of prompt plus output. Empty: the model's limit.",
    )
    allowed_models = models.JSONField(
        default=list,
        blank=True,
        validators=[check_models],
        help_text='Restrict the tenant to these models, such as ["small"]. Empty: all it '
        "can access.",
    )
    time_zone = models.CharField(
        max_length=64,
        default="UTC",
        validators=[check_zone],
        help_text="Time zone of the tenant's budget periods, such as `Europe/Berlin`.",
    )
    keep_usage_days = models.PositiveIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(MIN_USAGE_DAYS), MaxValueValidator(36_500)],
        help_text="Days to keep single requests in the usage ledger; hourly and daily sums stay. "
        "Empty: forever.",
    )
    keep_content_days = models.PositiveIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(1), MaxValueValidator(36_500)],
        help_text="Days to keep files, batches and stored responses. Empty: each object's own "
        "expiry.",
    )
    store_prompts = models.BooleanField(
        "store prompts",
        default=False,
        help_text="Store prompts and completions with request logs, for at most 30 days. Owners "
        "and admins of the tenant can read them.",
    )
    keep_conversations = models.BooleanField(
        default=True,
        help_text="Store playground conversations on the server. Off: only in the browser.",
    )
    salt = models.CharField(max_length=64, default=new_salt, editable=False)
    erase_requested_at = models.DateTimeField(null=True, blank=True, editable=False)
    erased_at = models.DateTimeField(null=True, blank=True, editable=False)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["slug"]
        constraints = [
            models.CheckConstraint(condition=models.Q(weight__gt=0), name="tenant_weight_positive")
        ]

    def __str__(self) -> str:
        return self.slug

    @property
    def cache_namespace(self) -> str:
        """Keeps the tenant's prefixes apart in the KV cache: [32] hex, no way back to the salt."""
        key = bytes.fromhex(self.salt)
        return hmac.new(key, b"quire kv cache namespace", hashlib.sha256).hexdigest()[:32]
