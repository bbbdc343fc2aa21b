"""A conversation of the playground, kept for the person who had it."""

from django.conf import settings
from django.db import models

from storage.models.json_text import JsonTextField
from storage.models.owned import Owned

MAX_TITLE_CHARS = 200


class SavedConversation(Owned):
    """One person's, in one tenant; it goes when they do.

    `document`: its turns as a tree, see `storage.conversations`. `words`: what a search finds, in
    small letters. `version`: counts the changes, so that two tabs don't undo each other's. `size`:
    of document and words in characters. `shared_at`: since when the tenant's people may read it.
    """

    user = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, related_name="+")
    title = models.CharField(max_length=MAX_TITLE_CHARS)
    document = JsonTextField()
    words = models.TextField(editable=False)
    version = models.PositiveIntegerField(default=1, editable=False)
    size = models.PositiveBigIntegerField(default=0, editable=False)
    changed_at = models.DateTimeField(db_index=True)
    shared_at = models.DateTimeField(null=True, blank=True)

    class Meta(Owned.Meta):
        verbose_name = "conversation"
        indexes = [
            models.Index(fields=["user", "tenant", "-changed_at"], name="conversation_newest")
        ]
