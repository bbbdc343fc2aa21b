"""Pages, scripts and styles leave compressed: a phone's line is slow, and they are mostly text."""

from __future__ import annotations

import asyncio
import gzip
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeGuard, cast

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.utils.cache import patch_vary_headers
from django.utils.decorators import sync_and_async_middleware
from django.utils.text import compress_string
from servestatic.middleware import ServeStaticMiddleware

TEXTS = ("text/", "application/javascript", "application/json", "image/svg+xml")
#: Less than this isn't worth it.
MIN_COMPRESSED_BYTES = 500
#: Of compressed files that a process keeps; all of the console's take about a third of it.
MAX_CACHE_BYTES = 4 << 20
#: Added to pages, so that their length tells nothing of what they hold (BREACH).
RANDOM_BYTES = 100


@sync_and_async_middleware
def compressed(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """The middleware. Where those around it are synchronous, as in a test's client, pages stay so:
    an event loop and a thread for each would cost more than most pages.
    """
    if iscoroutinefunction(get_response):
        return CompressedFiles(get_response)
    files = CompressedFiles(sync_to_async(get_response))
    by_loop = async_to_sync(files)

    def respond(request: HttpRequest) -> HttpResponseBase:
        if files.autorefresh or request.path_info in files.files:
            return by_loop(request)
        _set_content_etag(request)
        response = get_response(request)
        if _may_pack(request, response) and _is_page(response):
            _pack(response)
        return response

    return respond


class CompressedFiles(ServeStaticMiddleware):
    """Static files, each compressed once a process; whole pages as they are made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cache: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._size = 0

    async def __call__(self, request: HttpRequest) -> HttpResponseBase:
        """The response, compressed where the client reads that and it pays."""
        _set_content_etag(request)
        response = await super().__call__(request)
        if not _may_pack(request, response):
            return response
        if response.streaming:
            return await self._file(request.path_info, response)
        if _is_page(response):
            await asyncio.to_thread(_pack, response)
        return response

    async def _file(self, path: str, response: HttpResponseBase) -> HttpResponseBase:
        key = path, response.get("ETag", "")
        body = self._cache.get(key)
        if body is None:
            chunks = cast("AsyncIterator[bytes]", response.streaming_content)  # type: ignore[attr-defined]
            content = b"".join([chunk async for chunk in chunks])
            body = await asyncio.to_thread(gzip.compress, content, 9, mtime=0)
            self._keep(key, body)
        response.close()
        headers = {name: value for name, value in response.items() if name != "Content-Length"}
        compressed = HttpResponse(body, headers=headers)
        if etag := response.get("ETag"):
            compressed["ETag"] = f"W/{etag}"
        compressed["Content-Encoding"] = "gzip"
        compressed["Content-Length"] = str(len(body))
        return compressed

    def _keep(self, key: tuple[str, str], body: bytes) -> None:
        self._cache[key] = body
        self._size += len(body)
        while self._size > MAX_CACHE_BYTES:
            _, oldest = self._cache.popitem(last=False)
            self._size -= len(oldest)


def _set_content_etag(request: HttpRequest) -> None:
    """Files are told by their own tag, pages have none."""
    client_etag = request.META.get("HTTP_IF_NONE_MATCH", "")
    request.META["HTTP_IF_NONE_MATCH"] = client_etag.removeprefix("W/")


def _may_pack(request: HttpRequest, response: HttpResponseBase) -> bool:
    """Whether it's text that the client wants whole and can unpack; marks what depends on that."""
    if not _is_text(response):
        return False
    patch_vary_headers(response, ("Accept-Encoding",))
    return _reads_gzip(request) and request.method == "GET" and "HTTP_RANGE" not in request.META


def _is_page(response: HttpResponseBase) -> TypeGuard[HttpResponse]:
    return (
        isinstance(response, HttpResponse)
        and len(response.content) >= MIN_COMPRESSED_BYTES
        and response["Content-Type"].startswith("text/html")
    )


def _pack(page: HttpResponse) -> None:
    body = compress_string(page.content, max_random_bytes=RANDOM_BYTES)
    page.content = body
    page["Content-Length"] = str(len(body))
    page["Content-Encoding"] = "gzip"


def _is_text(response: HttpResponseBase) -> bool:
    return (
        response.status_code == 200
        and "Content-Encoding" not in response
        and response.get("Content-Type", "").startswith(TEXTS)
        and not response.get("Content-Type", "").startswith("text/event-stream")
    )


def _reads_gzip(request: HttpRequest) -> bool:
    return "gzip" in request.META.get("HTTP_ACCEPT_ENCODING", "")
