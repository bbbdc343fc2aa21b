"""DRF's content negotiation, cached by header: clients send the same few headers repeatedly."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest, StreamingHttpResponse
from django.http.response import HttpResponseBase
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.renderers import BaseRenderer, JSONRenderer

from common.errors import NotFound
from engine.contract.errors import InvalidRequest

#: Reads only the attributes of a request that are set below.
_negotiator: Any = DefaultContentNegotiation()


class EventStreamRenderer(BaseRenderer):
    """Declares the media type of streams for the negotiation; the stream renders itself."""

    media_type = "text/event-stream"
    format = "event-stream"

    def render(self, data: Any, *_: Any, **__: Any) -> bytes:
        """Bytes are passed through."""
        return bytes(data)


class PlainTextRenderer(EventStreamRenderer):
    """Prometheus text."""

    media_type = "text/plain"
    format = "txt"


JSON_ONLY = (JSONRenderer,)
JSON_OR_EVENTS = (JSONRenderer, EventStreamRenderer)


@dataclass(frozen=True)
class PageQuery:
    """The page that a client requests. `after`: the id of the last object that it has."""

    limit: int
    after: str | None
    newest_first: bool


def parse_page_query(
    request: HttpRequest, *, default: int, max_limit: int, orders: Sequence[str] = ("desc", "asc")
) -> PageQuery:
    """Parse the query. The first of `orders` is the default. Raises `InvalidRequest`."""
    query = request.GET
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= max_limit):
        raise InvalidRequest(
            f"limit must be in [1, {max_limit}], got {text[:50]!r}.", param="limit"
        )
    order = query.get("order", orders[0])
    if order not in orders:
        raise InvalidRequest(f"order must be 'asc' or 'desc', got {order[:50]!r}.", param="order")
    return PageQuery(int(text), query.get("after") or None, order == "desc")


def paginate_items(items: Sequence[dict[str, Any]], asked: PageQuery) -> dict[str, Any]:
    """A page of stored items, sorted oldest first. Raises `NotFound` for an unknown `after`."""
    ordered = list(reversed(items)) if asked.newest_first else list(items)
    if asked.after:
        ids = [item["id"] for item in ordered]
        if asked.after not in ids:
            raise NotFound(f"No such item: {asked.after[:80]!r}.", param="after")
        ordered = ordered[ids.index(asked.after) + 1 :]
    return list_response(ordered[: asked.limit], len(ordered) > asked.limit, lambda item: item)


def list_response(
    rows: Sequence[Any], has_more: bool, serialize: Callable[[Any], dict[str, Any]]
) -> dict[str, Any]:
    """OpenAI's list object."""
    data = [serialize(row) for row in rows]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


class BinaryRenderer(EventStreamRenderer):
    """Raw bytes, which clients request under several media types."""

    media_type = "application/octet-stream"
    format = "bin"


class ApplicationBinaryRenderer(BinaryRenderer):
    """Media type that OpenAI's SDKs ask for."""

    media_type = "application/binary"


EVENT_STREAM = "text/event-stream; charset=utf-8"


class LastChunk(bytes):
    """A stream's last chunk: the end of the response can be sent in the same write."""


def resource_closers(response: HttpResponseBase) -> list[Callable[[], object]]:
    """Functions that Django calls when it closes the response."""
    closers: list[Callable[[], object]] = response._resource_closers  # type: ignore[attr-defined]
    return closers


class EventStreamResponse(StreamingHttpResponse):
    """Server-sent events from an asynchronous generator of whole chunks.

    An asynchronous generator that was never started runs no `finally`. So `release` is called when
    the response is closed, whichever handler serves it and however far it came, and when it is
    garbage-collected: Django's own handler drops it unclosed if the client leaves while middleware
    holds it. `release` must be idempotent, must not block, and is called in any thread.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        release: Callable[[], None],
        content_type: str = EVENT_STREAM,
    ) -> None:
        self._forgotten = release
        super().__init__(events, content_type=content_type)
        self.events = events
        resource_closers(self).append(release)
        self["Cache-Control"] = "no-cache"
        # Otherwise nginx would buffer the stream.
        self["X-Accel-Buffering"] = "no"

    def __del__(self) -> None:
        self._forgotten()
