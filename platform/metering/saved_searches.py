"""Filters of the list of requests that a person saved under a name; nobody else sees them."""

from __future__ import annotations

from django.db import transaction
from django.db.models import QuerySet

from common.db import save_valid
from common.errors import Conflict, NotFound
from engine.contract.errors import InvalidRequest
from metering.models import SavedSearch
from tenants.models import User

#: Of a person. The page shows all of them.
MAX_SEARCHES = 50


def access_searches(user: User) -> QuerySet[SavedSearch]:
    """The user's own, by name."""
    return SavedSearch.objects.filter(user=user)


@transaction.atomic
def save_search(*, actor: User, name: str, query: str) -> SavedSearch:
    """Create a search of the actor's, or replace the one of this name.

    Raises: `InvalidRequest` (`name`, `query`); `Conflict` beyond `MAX_SEARCHES`.
    """
    name = " ".join(name.split())
    if not name.isprintable():
        raise InvalidRequest("name must be printable.", param="name")
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
