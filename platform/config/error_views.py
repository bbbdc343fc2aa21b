"""Error pages for 400 and 404. For an unknown host, 400 says what the operator can do."""

from __future__ import annotations

from django.core.exceptions import DisallowedHost
from django.http import HttpRequest, HttpResponseBadRequest
from django.http.response import HttpResponseBase
from django.template import loader
from django.views import defaults

from inference.errors import error_response
from inference.web.views import path_not_found


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponseBase:
    """Return the 400 page. People see the one for an unknown host when they first open a new
    installation under its host's name.
    """
    if isinstance(exception, DisallowedHost):
        return HttpResponseBadRequest(loader.get_template("unknown_host.html").render())
    return defaults.bad_request(request, exception)


def not_found(request: HttpRequest, exception: Exception) -> HttpResponseBase:
    """Return an HTML page to browsers and the API's error to other clients."""
    if "text/html" in request.headers.get("Accept", ""):
        return defaults.page_not_found(request, exception)
    return error_response(path_not_found(request.path_info))
