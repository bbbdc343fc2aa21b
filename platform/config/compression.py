"""Pages, scripts and styles leave compressed: a phone's line is slow, and they are mostly text."""

from __future__ import annotations

import asyncio
import gzip
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any, cast

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.utils.cache import patch_vary_headers
from django.utils.text import compress_string
from servestatic.middleware import AsyncServeStaticFileResponse, ServeStaticMiddleware

TEXTS = ("text/", "application/javascript", "application/json", "image/svg+xml")
#: Less than this isn't worth it.
LEAST_BYTES = 500
#: Of compressed files that a process keeps; all of the console's take about a third of it.
MOST_KEPT = 4 << 20
#: Added to pages, so that their length tells nothing of what they hold (BREACH).
RANDOM_BYTES = 100


class CompressedFiles(ServeStaticMiddleware):
    """Static files, each compressed once a process; whole pages as they are made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._size = 0

    async def __call__(self, request: HttpRequest) -> HttpResponseBase:
        """The response, compressed where the client reads that and it pays."""
        # Files are told by their own tag, pages have none.
        known = request.META.get("HTTP_IF_NONE_MATCH", "")
        request.META["HTTP_IF_NONE_MATCH"] = known.removeprefix("W/")
        response = await super().__call__(request)
        if not _is_text(response):
            return response
        patch_vary_headers(response, ("Accept-Encoding",))
        if not _reads_gzip(request) or request.method != "GET" or "HTTP_RANGE" in request.META:
            return response
        # A download that a view streams is its reader's alone: it's neither kept nor held up.
        if isinstance(response, AsyncServeStaticFileResponse):
            return await self._file(request.path_info, response)
        return await _page(response)

    async def _file(self, path: str, response: HttpResponseBase) -> HttpResponseBase:
        key = path, response.get("ETag", "")
        body = self._kept.get(key)
        if body is None:
            chunks = cast("AsyncIterator[bytes]", response.streaming_content)  # type: ignore[attr-defined]
            whole = b"".join([chunk async for chunk in chunks])
            body = await asyncio.to_thread(gzip.compress, whole, 9, mtime=0)
            self._keep(key, body)
        response.close()
        headers = {name: value for name, value in response.items() if name != "Content-Length"}
        made = HttpResponse(body, headers=headers)
        if etag := response.get("ETag"):
            made["ETag"] = f"W/{etag}"
        made["Content-Encoding"] = "gzip"
        made["Content-Length"] = str(len(body))
        return made

    def _keep(self, key: tuple[str, str], body: bytes) -> None:
        self._kept[key] = body
        self._size += len(body)
        while self._size > MOST_KEPT:
            _, oldest = self._kept.popitem(last=False)
            self._size -= len(oldest)


async def _page(response: HttpResponseBase) -> HttpResponseBase:
    if not isinstance(response, HttpResponse) or len(response.content) < LEAST_BYTES:
        return response
    if not response["Content-Type"].startswith("text/html"):
        return response
    body = await asyncio.to_thread(compress_string, response.content, max_random_bytes=RANDOM_BYTES)
    response.content = body
    response["Content-Length"] = str(len(body))
    response["Content-Encoding"] = "gzip"
    return response


def _is_text(response: HttpResponseBase) -> bool:
    return (
        response.status_code == 200
        and "Content-Encoding" not in response
        and response.get("Content-Type", "").startswith(TEXTS)
        and not response.get("Content-Type", "").startswith("text/event-stream")
    )


def _reads_gzip(request: HttpRequest) -> bool:
    return "gzip" in request.META.get("HTTP_ACCEPT_ENCODING", "")
