"""Compression of static files. (Pages are compressed by Django's `GZipMiddleware`.)

servestatic compresses files only when `collectstatic` runs. Quire has no such step, so each process
compresses a file when it's first requested.
"""

from __future__ import annotations

import asyncio
import gzip
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.utils.cache import patch_vary_headers
from django.utils.decorators import sync_and_async_middleware
from servestatic.middleware import AsyncServeStaticFileResponse, ServeStaticMiddleware

TEXTS = ("text/", "application/javascript", "application/json", "image/svg+xml")
#: Maximum bytes of compressed files cached by a process; the console's files take about a third.
MAX_CACHE_BYTES = 4 << 20


@sync_and_async_middleware
def static_files(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """Middleware that serves static files. In a synchronous stack, such as a test client's, page
    requests bypass it: an event loop and a thread would cost more than most pages.
    """
    if iscoroutinefunction(get_response):
        return CompressedStaticFiles(get_response)
    files = CompressedStaticFiles(sync_to_async(get_response))
    call_in_loop = async_to_sync(files)

    def respond(request: HttpRequest) -> HttpResponseBase:
        is_file = files.autorefresh or request.path_info in files.files
        return call_in_loop(request) if is_file else get_response(request)

    return respond


class CompressedStaticFiles(ServeStaticMiddleware):
    """Serves static files; compresses each text file once if the client accepts gzip."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cache: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._size = 0

    async def __call__(self, request: HttpRequest) -> HttpResponseBase:
        client_etag = request.META.get("HTTP_IF_NONE_MATCH", "")
        request.META["HTTP_IF_NONE_MATCH"] = client_etag.removeprefix("W/")
        response = await super().__call__(request)
        if not isinstance(response, AsyncServeStaticFileResponse) or not _is_text(response):
            return response
        patch_vary_headers(response, ("Accept-Encoding",))
        accepts_gzip = "gzip" in request.META.get("HTTP_ACCEPT_ENCODING", "")
        if not accepts_gzip or request.method != "GET" or "HTTP_RANGE" in request.META:
            return response
        return await self._compressed(request.path_info, response)

    async def _compressed(
        self, path: str, response: AsyncServeStaticFileResponse
    ) -> HttpResponseBase:
        key = path, response.get("ETag", "")
        body = self._cache.get(key)
        if body is None:
            chunks = cast("AsyncIterator[bytes]", response.streaming_content)
            content = b"".join([chunk async for chunk in chunks])
            body = await asyncio.to_thread(gzip.compress, content, 9, mtime=0)
            self._store(key, body)
        response.close()
        headers = {name: value for name, value in response.items() if name != "Content-Length"}
        compressed = HttpResponse(body, headers=headers)
        if etag := response.get("ETag"):
            compressed["ETag"] = f"W/{etag}"
        compressed["Content-Encoding"] = "gzip"
        compressed["Content-Length"] = str(len(body))
        return compressed

    def _store(self, key: tuple[str, str], body: bytes) -> None:
        self._cache[key] = body
        self._size += len(body)
        while self._size > MAX_CACHE_BYTES:
            _, oldest = self._cache.popitem(last=False)
            self._size -= len(oldest)


def _is_text(response: HttpResponseBase) -> bool:
    return (
        response.status_code == 200
        and "Content-Encoding" not in response
        and response.get("Content-Type", "").startswith(TEXTS)
    )
