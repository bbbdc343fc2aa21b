"""Sums of the ledger by hour and day, so that reports needn't read millions of rows.

They are added to in the transaction that writes the ledger's rows, so they are always its sums;
workers look every day whether they are (`metering.roll_up_check`).
They outlive its rows: a ledger that keeps 90 days can tell of years.
"""

from django.db import models

from tenants.models import Tenant

#: What is summed, in both tables.
SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos")


class _RollUp(models.Model):
    """Sums of one key's (or person's) requests to one model, by adapter ("" for none).

    `key_id` and `user_id` are 0 where there's none: NULLs are all different to a unique constraint.
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
