"""DRF's content negotiation, remembered by header: clients send the same few again and again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from rest_framework import exceptions
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.parsers import JSONParser
from rest_framework.renderers import BaseRenderer, JSONRenderer

from inference.errors import UnsupportedMediaType

_negotiator = DefaultContentNegotiation()


class EventStreamRenderer(BaseRenderer):
    """Names the media type of streams for the negotiation; the stream writes itself."""

    media_type = "text/event-stream"
    format = "event-stream"

    def render(self, data: Any, *_: Any, **__: Any) -> bytes:
        """Bytes are passed through."""
        return bytes(data)


class PlainTextRenderer(EventStreamRenderer):
    """Prometheus's text."""

    media_type = "text/plain"
    format = "txt"


@lru_cache(maxsize=256)
def _accepts(header: str, renderer_classes: tuple[type[BaseRenderer], ...]) -> bool:
    request = SimpleNamespace(headers={"accept": header}, query_params={})
    try:
        _negotiator.select_renderer(request, [kind() for kind in renderer_classes])
    except exceptions.NotAcceptable:
        return False
    return True


def check_accept(header: str | None, renderer_classes: Sequence[type[BaseRenderer]]) -> None:
    """Raise DRF's `NotAcceptable` when `Accept` excludes all media types of the endpoint."""
    if header is None or header in ("*/*", "application/json"):
        return
    if not _accepts(header[:8192], tuple(renderer_classes)):
        raise exceptions.NotAcceptable


@lru_cache(maxsize=256)
def _parses(content_type: str) -> bool:
    request = SimpleNamespace(content_type=content_type)
    return _negotiator.select_parser(request, [JSONParser()]) is not None


def check_content_type(content_type: str) -> None:
    """Raise DRF's `UnsupportedMediaType` unless the body is `application/json`."""
    if content_type != "application/json" and not (
        "*" not in content_type and content_type and _parses(content_type[:512])
    ):
        raise exceptions.UnsupportedMediaType(content_type[:100])


def check_content_encoding(coding: str | None) -> None:
    """Raise `UnsupportedMediaType` for a compressed body: nothing that grows is unpacked here."""
    if coding and coding.strip().lower() != "identity":
        raise UnsupportedMediaType(
            f"Content-Encoding {coding[:100]!r} is not supported. Send the body as it is."
        )


JSON_ONLY = (JSONRenderer,)
JSON_OR_EVENTS = (JSONRenderer, EventStreamRenderer)
