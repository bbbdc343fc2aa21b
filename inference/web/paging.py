"""OpenAI's lists: `after`, `limit`, `order` in the query; `data`, `has_more` in the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest

from engine.contract.errors import InvalidRequest
from tenants.errors import NotFound


@dataclass(frozen=True)
class Paging:
    """Which page a client asks for. `after`: the id of the last object it has."""

    limit: int
    after: str | None
    newest_first: bool


def paging(
    request: HttpRequest, *, default: int, most: int, orders: Sequence[str] = ("desc", "asc")
) -> Paging:
    """From the query. The first of `orders` is the default. Raises `InvalidRequest`."""
    query = request.GET
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= most):
        raise InvalidRequest(f"limit must be in [1, {most}], got {text[:50]!r}.", param="limit")
    order = query.get("order", orders[0])
    if order not in orders:
        raise InvalidRequest(f"order must be 'asc' or 'desc', got {order[:50]!r}.", param="order")
    return Paging(int(text), query.get("after") or None, order == "desc")


def item_page(items: Sequence[dict[str, Any]], asked: Paging) -> dict[str, Any]:
    """A page of items that are stored together, the oldest first. Raises `NotFound` for `after`."""
    ordered = list(reversed(items)) if asked.newest_first else list(items)
    if asked.after:
        ids = [item["id"] for item in ordered]
        if asked.after not in ids:
            raise NotFound(f"No such item: {asked.after[:80]!r}.", param="after")
        ordered = ordered[ids.index(asked.after) + 1 :]
    return as_list(ordered[: asked.limit], len(ordered) > asked.limit, lambda item: item)


def as_list(
    rows: Sequence[Any], has_more: bool, shown: Callable[[Any], dict[str, Any]]
) -> dict[str, Any]:
    """OpenAI's list object."""
    data = [shown(row) for row in rows]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }
