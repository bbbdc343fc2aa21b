"""The one way to read kept conversations: one's own, and those shared in one's tenants.

Everything else is 404: a stranger's, one that isn't shared, one whose end has come.
"""

from __future__ import annotations

from django.db.models import Q, QuerySet
from django.utils import timezone

from storage.errors import NotFound
from storage.ids import is_id
from storage.models import SavedConversation
from tenants.access import access_tenants
from tenants.models import Tenant, User

#: Of a list.
MAX_LISTED = 50
MAX_SEARCH_CHARS = 200


def access_conversations(
    user: User, tenant: Tenant, search: str = "", before: str = ""
) -> list[SavedConversation]:
    """The user's own in a tenant, the last changed first, one more than `MAX_LISTED`; no documents.

    Args:
        search: words that each must have somewhere. before: the last one of the page before.
    """
    rows = _live().filter(tenant__in=access_tenants(user), tenant=tenant, user=user)
    for word in search[:MAX_SEARCH_CHARS].replace("\0", "").lower().split():
        rows = rows.filter(words__contains=word)
    if before:
        last = access_own_conversation(user, before)
        earlier = Q(changed_at=last.changed_at, pk__lt=last.pk)
        rows = rows.filter(Q(changed_at__lt=last.changed_at) | earlier)
    ordered = rows.defer("document", "words").order_by("-changed_at", "-pk")
    return list(ordered[: MAX_LISTED + 1])


def access_own_conversation(user: User, public_id: str) -> SavedConversation:
    """One that the user may change. Raises `NotFound`."""
    return _one(_of(user).filter(user=user), public_id)


def access_conversation(user: User, public_id: str) -> SavedConversation:
    """One that the user may read: their own, or shared in a tenant of theirs. Raises `NotFound`."""
    return _one(_of(user).filter(Q(user=user) | Q(shared_at__isnull=False)), public_id)


def _live() -> QuerySet[SavedConversation]:
    rows = SavedConversation.objects.select_related("tenant", "user")
    return rows.filter(Q(expires_at=None) | Q(expires_at__gt=timezone.now()), tenant__active=True)


def _of(user: User) -> QuerySet[SavedConversation]:
    return _live().filter(tenant__in=access_tenants(user))


def _one(rows: QuerySet[SavedConversation], public_id: str) -> SavedConversation:
    row = rows.filter(public_id=public_id).first() if is_id(public_id) else None
    if row is None:
        raise NotFound("Conversation not found.", param="conversation")
    return row
