"""A batch: the requests of one file, run at low priority."""

from django.db import models

from storage.models.file import StoredFile
from storage.models.json_text import JsonTextField
from storage.models.owned import Leased, Owned


class BatchStatus(models.TextChoices):
    """OpenAI's names."""

    VALIDATING = "validating", "Validating"
    FAILED = "failed", "Failed"
    IN_PROGRESS = "in_progress", "In progress"
    FINALIZING = "finalizing", "Finalizing"
    COMPLETED = "completed", "Completed"
    EXPIRED = "expired", "Expired"
    CANCELLING = "cancelling", "Cancelling"
    CANCELLED = "cancelled", "Cancelled"


#: A worker has something to do for these.
OPEN = (
    BatchStatus.VALIDATING,
    BatchStatus.IN_PROGRESS,
    BatchStatus.FINALIZING,
    BatchStatus.CANCELLING,
)


class Batch(Owned, Leased):
    """The requests of one file. `expires_at` is the end of its completion window."""

    endpoint = models.CharField(max_length=100)
    completion_window = models.CharField(max_length=10)
    status = models.CharField(
        max_length=12, choices=BatchStatus, default=BatchStatus.VALIDATING, db_index=True
    )
    metadata = JsonTextField(default=dict, blank=True)
    errors = JsonTextField(default=list, blank=True)
    usage = JsonTextField(default=dict, blank=True)
    input_file_id = models.CharField(max_length=64)
    output_file = models.ForeignKey(
        StoredFile, models.SET_NULL, null=True, blank=True, related_name="+"
    )
    error_file = models.ForeignKey(
        StoredFile, models.SET_NULL, null=True, blank=True, related_name="+"
    )
    output_lifetime_s = models.PositiveBigIntegerField(null=True, blank=True)
    total = models.PositiveIntegerField(default=0)
    completed = models.PositiveIntegerField(default=0)
    failed = models.PositiveIntegerField(default=0)
    #: Of those that failed: whose turn didn't come in time.
    expired = models.PositiveIntegerField(default=0)
    in_progress_at = models.DateTimeField(null=True, blank=True)
    finalizing_at = models.DateTimeField(null=True, blank=True)
    completed_at = models.DateTimeField(null=True, blank=True)
    failed_at = models.DateTimeField(null=True, blank=True)
    expired_at = models.DateTimeField(null=True, blank=True)
    cancelling_at = models.DateTimeField(null=True, blank=True)
    cancelled_at = models.DateTimeField(null=True, blank=True)

    class Meta(Owned.Meta):
        verbose_name_plural = "batches"
        indexes = [models.Index(fields=["tenant", "-created_at", "-id"], name="batch_newest")]
