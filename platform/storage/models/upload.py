"""A file that comes in parts."""

from django.db import models

from storage.models.file import StoredFile
from storage.models.owned import Owned


class UploadStatus(models.TextChoices):
    """OpenAI's names; one that nobody ended in time is gone."""

    PENDING = "pending", "Pending"
    COMPLETED = "completed", "Completed"
    CANCELLED = "cancelled", "Cancelled"


class StoredUpload(Owned):
    """What the file shall be. `size`: of the whole, as it was announced. `lifetime_s`: the file's,
    from its end on; None for no end. `expires_at`: the upload's own.
    """

    filename = models.CharField(max_length=255)
    purpose = models.CharField(max_length=40)
    mime_type = models.CharField(max_length=255)
    size = models.PositiveBigIntegerField()
    lifetime_s = models.PositiveBigIntegerField(null=True, blank=True)
    status = models.CharField(
        max_length=10, choices=UploadStatus, default=UploadStatus.PENDING, db_index=True
    )
    file = models.ForeignKey(StoredFile, models.SET_NULL, null=True, blank=True, related_name="+")

    class Meta(Owned.Meta):
        verbose_name = "upload"


class UploadPart(models.Model):
    """One part. Its bytes are in `storage.blobs`, under its public id."""

    upload = models.ForeignKey(StoredUpload, models.CASCADE, related_name="parts")
    public_id = models.CharField(max_length=64, unique=True, editable=False)
    size = models.PositiveBigIntegerField()
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["pk"]

    def __str__(self) -> str:
        return self.public_id
