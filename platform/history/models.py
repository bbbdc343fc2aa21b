"""Time series of traffic and of KV pools, for the charts of the overview."""

from django.db import models
from django.utils import timezone

from tenants.models import Tenant


class PoolSample(models.Model):
    """KV pool use of a model's replicas, sampled once a bucket; wider buckets have the mean.

    `active_blocks` are held by running requests, `cached_blocks` by nobody but the prefix cache;
    what is left of `blocks` is empty.
    """

    width = models.PositiveIntegerField(help_text="Seconds.")
    start = models.BigIntegerField(help_text="Seconds since 1970, a multiple of the width.")
    model = models.CharField(max_length=200)
    replicas = models.FloatField(default=0)
    running = models.FloatField(default=0)
    waiting = models.FloatField(default=0)
    blocks = models.FloatField(default=0)
    active_blocks = models.FloatField(default=0)
    cached_blocks = models.FloatField(default=0)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["width", "start", "model"], name="one_pool_sample")
        ]


#: What is summed.
SUMS = (
    *("requests", "errors", "refused"),
    *("prompt_tokens", "cached_tokens", "completion_tokens"),
)


class TrafficSample(models.Model):
    """Traffic of a tenant, model and adapter ("" for none); tenant 0: all tenants, by model.

    Requests, errors, refusals and prompts count when a request has ended, tokens of answers as they
    come. `first_token` and `gaps` are spreads (`history.buckets`) as JSON.
    """

    width = models.PositiveIntegerField(help_text="Seconds.")
    start = models.BigIntegerField(help_text="Seconds since 1970, a multiple of the width.")
    tenant = models.ForeignKey(
        Tenant, models.DO_NOTHING, db_constraint=False, related_name="+", db_index=False
    )
    model = models.CharField(max_length=200)
    adapter = models.CharField(max_length=100, default="")
    requests = models.PositiveBigIntegerField(default=0)
    errors = models.PositiveBigIntegerField(default=0)
    refused = models.PositiveBigIntegerField(default=0)
    prompt_tokens = models.PositiveBigIntegerField(default=0)
    cached_tokens = models.PositiveBigIntegerField(default=0)
    completion_tokens = models.PositiveBigIntegerField(default=0)
    first_token = models.JSONField(default=dict)
    gaps = models.JSONField(default=dict)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["width", "start", "tenant", "model", "adapter"], name="one_traffic_sample"
            )
        ]
        indexes = [models.Index(fields=["width", "tenant", "start"], name="traffic_of_tenant")]


class Alert(models.Model):
    """Something that operators should know of, from when it began until it was over.

    At most one of a rule and subject is open. While `silenced_until` lies ahead nobody is notified.
    """

    rule = models.CharField(max_length=40)
    subject = models.CharField(max_length=255, help_text="What it is about, such as a replica.")
    text = models.TextField()
    started_at = models.DateTimeField(default=timezone.now)
    finished_at = models.DateTimeField(null=True, blank=True)
    mailed_at = models.DateTimeField(null=True, blank=True)
    webhook_at = models.DateTimeField(null=True, blank=True)
    webhook_finished_at = models.DateTimeField(null=True, blank=True)
    silenced_until = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-started_at", "-pk"]
        constraints = [
            models.UniqueConstraint(
                fields=["rule", "subject"],
                condition=models.Q(finished_at=None),
                name="one_open_alert",
            )
        ]

    def __str__(self) -> str:
        return f"{self.rule}: {self.subject}"
