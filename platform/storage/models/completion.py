"""A chat completion that was made with `store`."""

from django.db import models

from storage.models.json_text import JsonTextField
from storage.models.owned import Owned


class StoredCompletion(Owned):
    """A chat completion and what led to it.

    `messages`: the chat as it came in, each with an id. `body`: the answer. `metadata`: the
    client's, which it may change. `size`: of messages and body in characters.
    """

    model = models.CharField(max_length=256)
    messages = JsonTextField()
    metadata = JsonTextField(default=dict, blank=True)
    body = JsonTextField()
    size = models.PositiveBigIntegerField(default=0, editable=False)

    class Meta(Owned.Meta):
        verbose_name = "chat completion"
        indexes = [models.Index(fields=["tenant", "model"], name="completion_model")]
