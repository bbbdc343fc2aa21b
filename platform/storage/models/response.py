"""A stored answer of the Responses API."""

from django.db import models

from storage.models.json_text import JsonTextField
from storage.models.owned import Leased, Owned


class ResponseStatus(models.TextChoices):
    """OpenAI's names."""

    QUEUED = "queued", "Queued"
    IN_PROGRESS = "in_progress", "In progress"
    COMPLETED = "completed", "Completed"
    INCOMPLETE = "incomplete", "Incomplete"
    FAILED = "failed", "Failed"
    CANCELLED = "cancelled", "Cancelled"


class StoredResponse(Owned, Leased):
    """A response with what led to it.

    `request`: the body as it came in. `input_items`: this turn's input, in OpenAI's items. `body`:
    the response object as last written. `previous_id`: the response that it goes on from.
    `size`: of all that in characters.
    """

    status = models.CharField(max_length=12, choices=ResponseStatus, db_index=True)
    background = models.BooleanField(default=False)
    request = JsonTextField()
    input_items = JsonTextField()
    body = JsonTextField()
    previous_id = models.CharField(max_length=64, blank=True)
    size = models.PositiveBigIntegerField(default=0, editable=False)

    class Meta(Owned.Meta):
        verbose_name = "response"
