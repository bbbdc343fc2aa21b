"""The document itself, and `GET /openapi.json`."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from django.conf import settings
from django.http.response import HttpResponseBase
from django.urls import get_resolver

from inference.openapi.summaries import summarise
from inference.ops import version
from inference.web.views import GatewayRequest, GatewayView, NotFoundView, json_response

#: By name: they lead here.
_URLS = "inference.urls"
#: What `generate` made when the tests last passed.
SNAPSHOT = Path(__file__).resolve().parents[2] / "docs" / "openapi.json"


def is_described(pattern: Any) -> bool:
    """Whether a URL belongs into the document."""
    return not issubclass(pattern.callback.cls, (NotFoundView, OpenApiView))


@lru_cache(maxsize=1)
def document() -> dict[str, Any]:
    """The OpenAPI document of this gateway, as plain JSON.

    Read from the repository, where it's kept: generating it would keep the first reader of a fresh
    gateway waiting for half a second of CPU time. Where there is no such file, it's generated.
    """
    try:
        kept: dict[str, Any] = msgspec.json.decode(SNAPSHOT.read_bytes())
    except FileNotFoundError:
        return generate()
    kept["info"]["version"] = version()
    if root := settings.FORCE_SCRIPT_NAME:
        kept["servers"] = [{"url": root}]
    return kept


def generate() -> dict[str, Any]:
    """The document, made of the views and their schemas."""
    from drf_spectacular.generators import SchemaGenerator

    from inference.openapi import extensions  # noqa: F401 - registers by being imported
    from inference.openapi.describe import describe

    describe()
    patterns = [pattern for pattern in get_resolver(_URLS).url_patterns if is_described(pattern)]
    made: dict[str, Any] = SchemaGenerator(patterns=patterns).get_schema(request=None, public=True)
    made["info"]["version"] = version()
    summarise(made)
    # Lazy strings and the like become what they look like.
    return msgspec.json.decode(msgspec.json.encode(made, enc_hook=str))


@lru_cache(maxsize=1)
def encoded() -> bytes:
    """The document as it's served."""
    return msgspec.json.encode(document())


class OpenApiView(GatewayView):
    """What this gateway can be asked, for machines."""

    public = True

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """The OpenAPI document."""
        return json_response(await asyncio.to_thread(encoded))
