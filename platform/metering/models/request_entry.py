"""What became of single requests, kept for some weeks."""

from django.db import models

from tenants.models import ApiKey, Tenant, User


class RequestEntry(models.Model):
    """One request, whether it was served or refused. Bounded in number and age, unlike the ledger.

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
    detail = models.TextField(blank=True, default="", help_text="A `RequestNote` as JSON.")

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
    """What was asked and answered, of tenants that want it kept. Both are cut to a few pages."""

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
