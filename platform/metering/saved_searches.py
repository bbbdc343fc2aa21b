"""Filters of the list of requests that a person saved under a name; nobody else sees them."""

from __future__ import annotations

from urllib.parse import parse_qs, urlencode

from django.db import transaction
from django.db.models import QuerySet

from common.db import save_valid
from common.errors import Conflict, NotFound
from engine.contract.errors import InvalidRequest
from metering.models import SavedSearch
from tenants.models import User

#: Filters and order of the list, as its page's address has them.
FIELDS = (
    *("id", "model", "key", "user", "status", "slower_ms", "first", "last"),
    *("faster_ms", "since", "until", "sort"),
)
#: Of a person. The page shows all of them.
MAX_SEARCHES = 50


def access_searches(user: User) -> QuerySet[SavedSearch]:
    """The user's own, by name."""
    return SavedSearch.objects.filter(user=user)


def search_query(query: str) -> str:
    """Filters and order of a query, in one order, without tenant and page."""
    values = parse_qs(query)
    return urlencode({name: values[name][-1] for name in FIELDS if name in values})


@transaction.atomic
def save_search(*, actor: User, name: str, query: str) -> SavedSearch:
    """Create a search of the actor's, or replace the one of this name.

    Raises: `InvalidRequest` (`name`, `query`); `Conflict` beyond `MAX_SEARCHES`.
    """
    name = " ".join(name.split())
    if not name.isprintable():
        raise InvalidRequest("name must be printable.", param="name")
    query = search_query(query)
    if not query:
        raise InvalidRequest("query must have a filter or an order.", param="query")
    User.objects.select_for_update().get(pk=actor.pk)  # one at a time: names are unique
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
    """Delete one of the actor's. Raises `NotFound`."""
    if not access_searches(actor).filter(pk=pk).delete()[0]:
        raise NotFound("Saved view not found.")
