"""Long downloads, piece by piece, whatever server they go through."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from asgiref.sync import sync_to_async
from django.http import HttpRequest, StreamingHttpResponse
from django.http.response import HttpResponseBase


def download(
    request: HttpRequest, chunks: Iterable[bytes | str], name: str, media: str
) -> HttpResponseBase:
    """A file to keep. Django reads a plain iterator whole before an ASGI server gets any of it."""
    # Under WSGI, and in tests, it's the other way round.
    asgi = hasattr(request, "scope")
    response = StreamingHttpResponse(_pieces(chunks) if asgi else chunks, content_type=media)
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    return response


async def _pieces(chunks: Iterable[bytes | str]) -> AsyncIterator[bytes | str]:
    iterator = iter(chunks)
    following = sync_to_async(lambda: next(iterator, None))
    while (chunk := await following()) is not None:
        yield chunk
