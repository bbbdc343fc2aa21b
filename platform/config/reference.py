"""`/reference/`: the API's document as a page to read and try, from this server's files alone."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from drf_spectacular.views import SpectacularSwaggerSplitView
from rest_framework.authentication import SessionAuthentication
from rest_framework.permissions import AllowAny
from rest_framework.request import Request
from rest_framework.response import Response

from console.csp import HEADER

#: Swagger UI builds its page from strings and styles of its own: looser than our pages' policy, but
#: nothing from elsewhere runs, and nothing is sent elsewhere.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)


class ReferenceView(SpectacularSwaggerSplitView):
    """Swagger UI on the gateway's own document."""

    permission_classes = (AllowAny,)
    authentication_classes = (SessionAuthentication,)  # for the bar above: the page is public
    url = "/openapi.json"
    title = "Quire API"
    template_name = "console/reference.html"

    def get(self, request: Request, *args: Any, **kwargs: Any) -> HttpResponse:
        """The page, or with `?script` what it runs."""
        response: Response = super().get(request, *args, **kwargs)
        response[HEADER] = POLICY
        return response
