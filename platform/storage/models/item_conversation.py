"""A conversation of the API: items that responses read and add to."""

from django.db import models

from storage.models.json_text import JsonTextField
from storage.models.owned import Owned


class ItemConversation(Owned):
    """A tenant's, whichever of its keys made it; the playground's are `SavedConversation`s.

    `metadata`: the client's. `size`: of all items in characters. `changed_at`: its end comes so
    many days later.
    """

    metadata = JsonTextField(default=dict, blank=True)
    size = models.PositiveBigIntegerField(default=0, editable=False)
    changed_at = models.DateTimeField(db_index=True)

    class Meta(Owned.Meta):
        verbose_name = "conversation of items"
        verbose_name_plural = "conversations of items"


class ConversationItem(models.Model):
    """One item, in OpenAI's form. Its id is known inside its conversation alone."""

    conversation = models.ForeignKey(ItemConversation, models.CASCADE, related_name="items")
    public_id = models.CharField(max_length=64, editable=False)
    item = JsonTextField()
    size = models.PositiveBigIntegerField(editable=False)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["pk"]
        constraints = [
            models.UniqueConstraint(
                fields=["conversation", "public_id"], name="conversation_item_id"
            )
        ]

    def __str__(self) -> str:
        return self.public_id
