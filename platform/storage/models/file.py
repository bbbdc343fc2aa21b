"""A file: what it is. Its bytes are in `storage.blobs`, under the same public id."""

from django.db import models

from storage.models.owned import Owned


class StoredFile(Owned):
    """A tenant's file. `filename` is what the client calls it, shown and never opened."""

    filename = models.CharField(max_length=255)
    purpose = models.CharField(max_length=40)
    size = models.PositiveBigIntegerField()

    class Meta(Owned.Meta):
        verbose_name = "file"
        indexes = [models.Index(fields=["tenant", "-created_at", "-id"], name="file_newest")]
