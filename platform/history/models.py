"""Time series of traffic and of KV pools, alerts, and benchmarks of models."""

from django.db import models
from django.utils import timezone

from catalog.models import ServedModel
from tenants.models import Tenant


class PoolSample(models.Model):
    """KV pool usage of a model's replicas, sampled once per bucket; wider buckets store the mean.

    Running requests use `active_blocks`, and only the prefix cache holds `cached_blocks`; the rest
    of `blocks` is empty.
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


#: Columns that are summed.
SUMS = (
    *("requests", "errors", "refused"),
    *("prompt_tokens", "cached_tokens", "completion_tokens"),
)


class TrafficSample(models.Model):
    """Traffic of a tenant, model and adapter ("" for none); tenant 0: all tenants, by model.

    Requests, errors, refusals and prompt tokens are counted when a request has finished, output
    tokens as they are generated. `first_token` and `gaps` are histograms (`history.buckets`).
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
    """A problem that operators should know about, from its start to its end.

    At most one alert per rule and subject is open. No one is notified before `silenced_until`.
    """

    rule = models.CharField(max_length=40)
    subject = models.CharField(max_length=255, help_text="What it is about, such as a replica.")
    text = models.TextField()
    started_at = models.DateTimeField(default=timezone.now)
    finished_at = models.DateTimeField(null=True, blank=True)
    mail_claimed_at = models.DateTimeField(null=True, blank=True)
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


class BenchmarkStatus(models.TextChoices):
    """States of a benchmark. Only the first two count as open."""

    QUEUED = "queued", "Queued"
    RUNNING = "running", "Running"
    COMPLETED = "completed", "Completed"
    STOPPED = "stopped", "Stopped"
    FAILED = "failed", "Failed"


OPEN_BENCHMARKS = (BenchmarkStatus.QUEUED, BenchmarkStatus.RUNNING)


class BenchmarkRun(models.Model):
    """A benchmark of a model: throughput and latency at increasing concurrency.

    Attributes:
        levels: numbers of concurrent requests, run one after the other. results: figures of the
            completed levels, in the same order (`benchmarks.http_load.Results.row`).
        input_tokens, output_tokens: per request. num_requests: per level.
    """

    public_id = models.CharField(max_length=64, unique=True)
    served_model = models.ForeignKey(ServedModel, models.CASCADE, related_name="benchmarks")
    status = models.CharField(
        max_length=10, choices=BenchmarkStatus, default=BenchmarkStatus.QUEUED
    )
    levels = models.JSONField()
    input_tokens = models.PositiveIntegerField()
    output_tokens = models.PositiveIntegerField()
    num_requests = models.PositiveIntegerField()
    results = models.JSONField(default=list)
    error = models.TextField(blank=True)
    created_by = models.CharField(max_length=200, help_text="Label of the actor.")
    created_at = models.DateTimeField(default=timezone.now)
    finished_at = models.DateTimeField(null=True, blank=True)
    lease_owner = models.CharField(max_length=64, blank=True, default="")
    lease_until = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-created_at", "-pk"]
        constraints = [
            models.UniqueConstraint(
                fields=["served_model"],
                condition=models.Q(status__in=["queued", "running"]),
                name="one_open_benchmark",
            )
        ]

    def __str__(self) -> str:
        return f"{self.served_model}, {self.created_at:%Y-%m-%d %H:%M}"

    @property
    def progress(self) -> str:
        """A text that changes with each step; open pages compare it."""
        return f"{self.public_id} {self.status} {len(self.results)}"

    @property
    def is_open(self) -> bool:
        """Whether it is waiting or running."""
        return self.status in OPEN_BENCHMARKS
