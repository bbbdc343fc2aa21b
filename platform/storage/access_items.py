"""The one way to read the API's conversations and their items. A stranger's is 404."""

from __future__ import annotations

from django.db.models import Q, QuerySet
from django.utils import timezone

from engine.contract.errors import InvalidRequest
from storage.access import MAX_CONVERSATION_CHARS
from storage.errors import NotFound
from storage.ids import is_id
from storage.models import ConversationItem, ItemConversation
from tenants.authentication import Caller

#: Of a conversation.
MAX_ITEMS = 10_000

__all__ = [
    "MAX_ITEMS",
    "ConversationItem",
    "ItemConversation",
    "access_all_items",
    "access_item",
    "access_item_conversation",
    "access_item_page",
]


def access_item_conversation(
    caller: Caller, public_id: str, param: str = "conversation_id"
) -> ItemConversation:
    """Raises `NotFound`."""
    live = Q(expires_at=None) | Q(expires_at__gt=timezone.now())
    rows = ItemConversation.objects.filter(live, tenant_id=caller.tenant_id)
    row = rows.filter(public_id=public_id).first() if is_id(public_id) else None
    if row is None:
        raise NotFound(f"No such conversation: {public_id[:80]!r}.", param=param)
    return row


def access_item(caller: Caller, conversation_id: str, item_id: str) -> ConversationItem:
    """One item. Raises `NotFound`."""
    row = access_item_conversation(caller, conversation_id)
    return _item(row, item_id, "item_id")


def _item(row: ItemConversation, item_id: str, param: str) -> ConversationItem:
    found = row.items.filter(public_id=item_id[:64]).first() if "\0" not in item_id else None
    if found is None or found.public_id != item_id:
        raise NotFound(f"No such item: {item_id[:80]!r}.", param=param)
    return found


def access_item_page(
    caller: Caller, conversation_id: str, *, limit: int, after: str | None, newest_first: bool
) -> tuple[list[ConversationItem], bool]:
    """Items behind the one called `after`, and whether more follow. Raises `NotFound`."""
    row = access_item_conversation(caller, conversation_id)
    rows: QuerySet[ConversationItem] = row.items.order_by("-pk" if newest_first else "pk")
    if after:
        cursor = _item(row, after, "after")
        rows = rows.filter(pk__lt=cursor.pk) if newest_first else rows.filter(pk__gt=cursor.pk)
    found = list(rows[: limit + 1])
    return found[:limit], len(found) > limit


def access_all_items(
    caller: Caller, conversation_id: str, until: int | None = None
) -> list[ConversationItem]:
    """All items, the oldest first; up to the one whose key is `until`.

    Raises: `NotFound`; `InvalidRequest` for more than is read.
    """
    row = access_item_conversation(caller, conversation_id, "conversation")
    if row.size > MAX_CONVERSATION_CHARS:
        raise InvalidRequest(
            f"A conversation may hold at most {MAX_CONVERSATION_CHARS} characters.",
            param="conversation",
        )
    rows = row.items.order_by("pk")
    if until is not None:
        rows = rows.filter(pk__lte=until)
    return list(rows[: MAX_ITEMS + 1])
