"""Saved filters of the request list, private to each user."""

from __future__ import annotations

from urllib.parse import parse_qs, urlencode

from django.db import transaction
from django.db.models import QuerySet

from common.db import save_valid
from common.errors import Conflict, NotFound
from engine.contract.errors import InvalidRequest
from metering.models import SavedSearch
from tenants.models import User

#: Filters and order of the list, as query parameters of its page.
FIELDS = (
    *("id", "model", "key", "user", "status", "slower_ms", "first", "last"),
    *("faster_ms", "since", "until", "sort"),
)
#: Maximum number per user. The page shows all of them.
MAX_SEARCHES = 50


def access_searches(user: User) -> QuerySet[SavedSearch]:
    """The user's saved searches, by name."""
    return SavedSearch.objects.filter(user=user)


def search_query(query: str) -> str:
    """Normalize a query: filters and order in a fixed order, without tenant and page."""
    values = parse_qs(query)
    return urlencode({name: values[name][-1] for name in FIELDS if name in values})


@transaction.atomic
def save_search(*, actor: User, name: str, query: str) -> SavedSearch:
    """Create a saved search of the actor's, or replace the one with this name.

    Raises: `InvalidRequest` (`name`, `query`); `Conflict` beyond `MAX_SEARCHES`.
    """
    name = " ".join(name.split())
    if not name.isprintable():
        raise InvalidRequest("name must be printable.", param="name")
    query = search_query(query)
    if not query:
        raise InvalidRequest("query must have a filter or an order.", param="query")
    User.objects.select_for_update().get(pk=actor.pk)  # serialize: names are unique
    rows = access_searches(actor)
    row = rows.filter(name=name).first()
    if row is None:
        if rows.count() >= MAX_SEARCHES:
            raise Conflict(f"{MAX_SEARCHES} views are saved already. Delete some.", param="name")
        row = SavedSearch(user=actor, name=name)
    row.query = query
    save_valid(row, unchecked=("user",))
    return row


def delete_search(*, actor: User, pk: int) -> None:
    """Delete one of the actor's saved searches. Raises `NotFound`."""
    if not access_searches(actor).filter(pk=pk).delete()[0]:
        raise NotFound("Saved view not found.")
