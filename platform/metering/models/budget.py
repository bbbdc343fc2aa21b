"""What a tenant, a key or a model may use in a day, week or month."""

from decimal import Decimal

from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models

from metering.money import MAX_AMOUNT
from tenants.models import ApiKey, Tenant

#: What a Lua number holds exactly.
MAX_TOKENS = 2**53


class Period(models.TextChoices):
    """Of the tenant's calendar."""

    DAY = "day", "Day"
    WEEK = "week", "Week"
    MONTH = "month", "Month"


class Budget(models.Model):
    """A hard limit: requests are refused, and cut short in mid-answer, before it's exceeded."""

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
