"""CORS: which pages of other sites a browser lets call the API. django-cors-headers decides.

Off until `QUIRE_CORS_ORIGINS` names the sites. Only requests with an `Origin` pay for it.
"""

from __future__ import annotations

from corsheaders.middleware import CorsMiddleware
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase


def _nothing(request: HttpRequest) -> HttpResponseBase:
    return HttpResponse()


_library = CorsMiddleware(_nothing)


def preflight(request: HttpRequest) -> HttpResponseBase | None:
    """The answer to a browser's question before the request itself; None when it's no such."""
    if "HTTP_ORIGIN" not in request.META or request.method != "OPTIONS":
        return None
    response = _library.check_preflight(request)
    return None if response is None else _library.add_response_headers(request, response)


def allow(request: HttpRequest, response: HttpResponseBase) -> None:
    """Tell the browser whether the page may read this response."""
    if "HTTP_ORIGIN" in request.META:
        _library.add_response_headers(request, response)
