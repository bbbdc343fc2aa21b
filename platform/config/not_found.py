"""404: a page for browsers, the API's error for everybody else."""

from __future__ import annotations

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.views import defaults

from inference.errors import error_response
from inference.web.unknown_path import unknown_path


def not_found(request: HttpRequest, exception: Exception) -> HttpResponseBase:
    """Browsers say that they read HTML; clients of an API that is looked for elsewhere don't."""
    if "text/html" in request.headers.get("Accept", ""):
        return defaults.page_not_found(request, exception)
    return error_response(unknown_path(request.path_info))
