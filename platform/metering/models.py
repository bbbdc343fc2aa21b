"""Budgets, prices, the request log, the usage ledger with its sums, and webhooks."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import Any

from django.conf import settings
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.db.models.functions import Coalesce

from metering.money import MAX_AMOUNT, MAX_PRICE, PRICE_DECIMALS, Rates
from tenants.models import ApiKey, Tenant, User

#: Maximum integer that a Lua number holds exactly.
MAX_TOKENS = 2**53


class Period(models.TextChoices):
    """A budget's period in the tenant's time zone."""

    DAY = "day", "Day"
    WEEK = "week", "Week"
    MONTH = "month", "Month"


class Budget(models.Model):
    """A hard limit: requests are refused, and stopped in mid-answer, before it is exceeded."""

    tenant = models.ForeignKey(Tenant, models.CASCADE, related_name="budgets")
    api_key = models.ForeignKey(
        ApiKey,
        models.CASCADE,
        null=True,
        blank=True,
        related_name="budgets",
        verbose_name="API key",
        help_text="Empty: all keys and people of the tenant together.",
    )
    model = models.CharField(max_length=200, blank=True, help_text="Empty: all models together.")
    period = models.CharField(max_length=5, choices=Period)
    tokens = models.PositiveBigIntegerField(
        null=True,
        blank=True,
        validators=[MaxValueValidator(MAX_TOKENS)],
        help_text="Prompt and output together. Empty: no limit.",
    )
    amount = models.DecimalField(
        max_digits=16,
        decimal_places=9,
        null=True,
        blank=True,
        validators=[MinValueValidator(Decimal(0)), MaxValueValidator(MAX_AMOUNT)],
        help_text="Money, at the models' prices. Empty: no limit.",
    )
    alert_percent = models.PositiveSmallIntegerField(
        default=80,
        validators=[MaxValueValidator(100)],
        help_text="Alert the tenant once per period at this percentage of the budget. 0: never.",
    )
    alerted_for = models.DateTimeField(
        null=True,
        blank=True,
        editable=False,
        help_text="Start of the last period with a mail alert.",
    )
    webhook_for = models.DateTimeField(
        null=True,
        blank=True,
        editable=False,
        help_text="Start of the last period with a webhook alert.",
    )
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["tenant", "pk"]
        constraints = [
            models.UniqueConstraint(
                fields=["tenant", "api_key", "model", "period"],
                condition=models.Q(api_key__isnull=False),
                name="one_budget_of_a_key",
            ),
            models.UniqueConstraint(
                fields=["tenant", "model", "period"],
                condition=models.Q(api_key__isnull=True),
                name="one_budget_of_a_tenant",
            ),
        ]

    def __str__(self) -> str:
        of = [str(self.tenant)]
        if self.api_key_id is not None:
            of.append(f"key {self.api_key.prefix if self.api_key else self.api_key_id}")
        if self.model:
            of.append(self.model)
        return f"{', '.join(of)} a {self.period}"


def _price(help_text: str, **options: Any) -> models.DecimalField:
    return models.DecimalField(
        **options,
        max_digits=14,
        decimal_places=PRICE_DECIMALS,
        validators=[MinValueValidator(Decimal(0)), MaxValueValidator(MAX_PRICE)],
        help_text=help_text,
    )


#: In the order of `Rates`.
PRICE_FIELDS = (
    *("input_per_million", "cached_per_million", "output_per_million"),
    *("per_image", "per_audio_minute"),
)


class Price(models.Model):
    """A model's price until the next one begins. Earlier usage keeps its price."""

    model = models.CharField(max_length=200, help_text="Model or adapter name in the API.")
    valid_from = models.DateTimeField()
    input_per_million = _price("A million prompt tokens that were computed.")
    cached_per_million = _price("A million prompt tokens from the prefix cache.")
    output_per_million = _price("A million output tokens.")
    per_image = _price("An image, besides its tokens.", default=0)
    per_audio_minute = _price("A minute of audio in which somebody speaks.", default=0)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["model", "-valid_from"]
        constraints = [
            models.UniqueConstraint(fields=["model", "valid_from"], name="one_price_a_moment")
        ]

    def __str__(self) -> str:
        return f"{self.model} from {self.valid_from:%Y-%m-%d %H:%M}"

    @property
    def rates(self) -> Rates:
        """The prices as integers."""
        return Rates.of_prices(*(getattr(self, name) for name in PRICE_FIELDS))


class RequestEntry(models.Model):
    """One request, served or refused. Limited in number and age, unlike the ledger.

    As in the ledger, references carry no database constraint.
    """

    request_id = models.CharField(
        max_length=200,
        unique=True,
        help_text="ID in the usage ledger; a generated one for rejected requests.",
    )
    header_id = models.CharField(
        max_length=200, blank=True, default="", help_text="`x-request-id`: the client's, or ours."
    )
    answer_id = models.CharField(
        max_length=200, blank=True, default="", help_text="The answer's own id, such as `resp_...`."
    )
    tenant = models.ForeignKey(
        Tenant, models.DO_NOTHING, db_constraint=False, related_name="+", db_index=False
    )
    api_key = models.ForeignKey(
        ApiKey,
        models.DO_NOTHING,
        db_constraint=False,
        null=True,
        blank=True,
        related_name="+",
        db_index=False,
        verbose_name="API key",
    )
    user = models.ForeignKey(
        User,
        models.DO_NOTHING,
        db_constraint=False,
        null=True,
        blank=True,
        related_name="+",
        db_index=False,
    )
    endpoint = models.CharField(max_length=100)
    model = models.CharField(max_length=200, blank=True, default="")
    adapter = models.CharField(max_length=100, blank=True, default="")
    adapter_digest = models.CharField(max_length=64, blank=True, default="")
    status = models.PositiveSmallIntegerField(help_text="HTTP status, 499 when the client left.")
    code = models.CharField(
        max_length=60, blank=True, default="", help_text="Error code of the rejection."
    )
    times = models.PositiveIntegerField(
        default=1, help_text="Number of identical rejections that this row stands for."
    )
    finish_reason = models.CharField(max_length=40, blank=True, default="")
    stream = models.BooleanField(default=False)
    started_at = models.DateTimeField()
    duration_ms = models.FloatField(verbose_name="duration (ms)")
    ttft_ms = models.FloatField(null=True, blank=True, verbose_name="TTFT (ms)")
    queue_ms = models.FloatField(default=0.0, verbose_name="queued (ms)")
    prompt_tokens = models.PositiveBigIntegerField(default=0)
    cached_tokens = models.PositiveBigIntegerField(default=0)
    completion_tokens = models.PositiveBigIntegerField(default=0)
    cost_nanos = models.PositiveBigIntegerField("cost (1e-9)", default=0)
    replica = models.CharField(max_length=200, blank=True, default="")
    detail = models.TextField(blank=True, default="", help_text="A `RequestTrace` as JSON.")

    class Meta:
        verbose_name = "request"
        ordering = ["-started_at", "-pk"]
        indexes = [
            models.Index(fields=["tenant", "started_at"]),
            models.Index(fields=["started_at"]),
            models.Index(
                fields=["header_id"], condition=~models.Q(header_id=""), name="requests_by_header"
            ),
            models.Index(
                fields=["answer_id"], condition=~models.Q(answer_id=""), name="requests_by_answer"
            ),
        ]

    def __str__(self) -> str:
        return self.request_id


class RequestContent(models.Model):
    """A request's prompt and output, for tenants that store them; both are truncated."""

    request_id = models.CharField(max_length=200, unique=True)
    tenant = models.ForeignKey(Tenant, models.DO_NOTHING, db_constraint=False, related_name="+")
    prompt = models.TextField()
    answer = models.TextField()
    at = models.DateTimeField()

    class Meta:
        verbose_name = "request's content"
        ordering = ["-pk"]

    def __str__(self) -> str:
        return self.request_id


# Hourly and daily sums are updated in the transaction that writes the ledger's rows, so they
# always match; workers verify that daily (`metering.reconciliation`). They outlive the rows: with
# a ledger of 90 days, reports still cover years.

#: Summed columns of both tables.
SUM_FIELDS = (
    *("requests", "prompt_tokens", "cached_tokens", "completion_tokens"),
    *("images", "audio_ms", "cost_nanos"),
)


class _RollUp(models.Model):
    """Sums of one key's (or person's) requests to one model, by adapter ("" for none).

    `key_id` and `user_id` are 0 for none: a unique constraint treats NULLs as distinct.
    """

    tenant = models.ForeignKey(
        Tenant, models.DO_NOTHING, db_constraint=False, related_name="+", db_index=False
    )
    key_id = models.BigIntegerField(default=0)
    user_id = models.BigIntegerField(default=0)
    model = models.CharField(max_length=200)
    adapter = models.CharField(max_length=100, default="")
    endpoint = models.CharField(max_length=100)
    requests = models.PositiveBigIntegerField()
    prompt_tokens = models.PositiveBigIntegerField()
    cached_tokens = models.PositiveBigIntegerField()
    completion_tokens = models.PositiveBigIntegerField()
    images = models.PositiveBigIntegerField(default=0)
    audio_ms = models.PositiveBigIntegerField("audio (ms)", default=0)
    cost_nanos = models.PositiveBigIntegerField(help_text="Cost in 1e-9 of the currency.")

    class Meta:
        abstract = True


class UsageHour(_RollUp):
    """Sums of an hour, UTC."""

    start = models.DateTimeField()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["tenant", "start", "model", "adapter", "key_id", "user_id", "endpoint"],
                name="one_sum_an_hour",
            )
        ]
        indexes = [models.Index(fields=["start"])]


class UsageDay(_RollUp):
    """Sums of a day, UTC."""

    start = models.DateTimeField()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["tenant", "start", "model", "adapter", "key_id", "user_id", "endpoint"],
                name="one_sum_a_day",
            )
        ]
        indexes = [models.Index(fields=["start"])]


class UsageEntry(models.Model):
    """One request's usage. Written once, keyed by its request id, and never changed.

    References carry no database constraint: usage stays billable after its key or user is deleted,
    and one invalid row can't block the spool behind it.
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
    image_tokens = models.PositiveBigIntegerField(
        default=0, help_text="Prompt tokens that stand for images; part of the prompt tokens."
    )
    completion_tokens = models.PositiveBigIntegerField()
    images = models.PositiveBigIntegerField(default=0)
    audio_ms = models.PositiveBigIntegerField(
        "audio (ms)", default=0, help_text="Milliseconds in which somebody speaks."
    )
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
        """Prompt and output tokens together."""
        return self.prompt_tokens + self.completion_tokens


class Webhook(models.Model):
    """An address for a tenant's events, or without a tenant for the operators' alerts.

    The secret signs events; it is shown once, to the user who set the webhook.
    """

    tenant = models.OneToOneField(Tenant, models.CASCADE, null=True, related_name="webhook")
    url = models.CharField(max_length=2000)
    secret = models.CharField(max_length=64, editable=False)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(Coalesce("tenant", 0), name="one_webhook_of_operators")
        ]

    def __str__(self) -> str:
        return f"{self.tenant or 'operators'}: {self.url}"


#: Delays before the second attempt, the third and so on; after the last one it is given up.
RETRY_DELAYS = tuple(timedelta(minutes=m) for m in (1, 5, 30, 120, 360))


class WebhookDelivery(models.Model):
    """An event's delivery to a tenant's webhook (or without one the operators'), and its result.

    `body` is sent unchanged at every attempt. `next_try_at` is empty once delivered or given up.
    """

    tenant = models.ForeignKey(Tenant, models.CASCADE, null=True, related_name="+")
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


class SavedSearch(models.Model):
    """A user's saved filters of the request list. `query`: as in the page's address."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, related_name="+")
    name = models.CharField(max_length=80)
    query = models.CharField(max_length=2000)

    class Meta:
        ordering = ["name"]
        constraints = [
            models.UniqueConstraint(fields=["user", "name"], name="one_saved_search_a_name")
        ]

    def __str__(self) -> str:
        return self.name


class RequestFeedback(models.Model):
    """A reader's feedback on a request's answer, at most one per reader and request."""

    tenant = models.ForeignKey(Tenant, models.CASCADE, related_name="+")
    request_id = models.CharField(max_length=200)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, related_name="+")
    is_good = models.BooleanField()
    comment = models.CharField(max_length=2000, blank=True)
    changed_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ["-changed_at", "-pk"]
        constraints = [
            models.UniqueConstraint(
                fields=["tenant", "request_id", "user"], name="one_feedback_a_reader"
            )
        ]

    def __str__(self) -> str:
        return f"{self.request_id}: {'good' if self.is_good else 'bad'}"
