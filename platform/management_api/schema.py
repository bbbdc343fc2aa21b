"""The management API's OpenAPI document, and its extensions for drf-spectacular."""

from __future__ import annotations

from functools import cache
from typing import Any

from django.conf import settings
from django.urls import get_resolver
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.renderers import OpenApiJsonRenderer
from drf_spectacular.utils import extend_schema
from rest_framework.authentication import SessionAuthentication
from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from management_api.base import ManagementKeyAuthentication

#: Path below which the root URLconf includes the apps' routes of the management API.
PREFIX = "api/"


class ManagementKeyScheme(OpenApiAuthenticationExtension):
    """A key with the scope `tenant:admin` or `operator`."""

    target_class = "management_api.base.ManagementKeyAuthentication"
    name = "key"

    def get_security_definition(self, auto_schema: Any) -> dict[str, Any]:
        """Describe a bearer token."""
        return {"type": "http", "scheme": "bearer"}


@cache
def document() -> dict[str, Any]:
    """The OpenAPI document of every app's routes below `PREFIX`; the same for all users."""
    routes = [route for route in get_resolver().url_patterns if str(route.pattern) == PREFIX]
    generator = SchemaGenerator(patterns=routes)
    schema: dict[str, Any] = generator.get_schema(request=None, public=True)
    schema["info"]["title"] = "Quire: management"
    if root := settings.FORCE_SCRIPT_NAME:
        schema["servers"] = [{"url": root}]
    return schema


class OpenApiDocumentView(APIView):
    """The OpenAPI document of the management API."""

    authentication_classes = (ManagementKeyAuthentication, SessionAuthentication)
    permission_classes = (IsAuthenticated,)
    renderer_classes = (OpenApiJsonRenderer,)

    @extend_schema(exclude=True)
    def get(self, request: Request) -> Response:
        """Return the OpenAPI document."""
        return Response(document())
