"""What the overview and the page of fairness show, in the management API."""

from __future__ import annotations

from typing import Any

import redis
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from console.api import overview_of
from console.fairness import figures_of
from console.overview.history import BY, history_of
from console.rest.views import ManagementViewSet
from history.widths import RANGES
from tenants.errors import ServiceUnavailable

WHOSE = OpenApiParameter("tenant", str, description="Tenant slug. Omit for all.")
STRETCH = OpenApiParameter("range", str, enum=list(RANGES), description="Time range, ending now.")


class _Figures(ManagementViewSet):
    """Figures, of which there is one page."""

    serializer_class = serializers.Serializer
    pagination_class = None
    filter_backends = ()


class Overview(_Figures):
    """What models and replicas do right now."""

    @extend_schema(responses={200: OpenApiTypes.OBJECT}, parameters=[WHOSE])
    def list(self, request: Request) -> Response:
        """The models that a tenant may use with their states, and the load of their replicas."""
        try:
            return Response(overview_of(self.actor, request.query_params.get("tenant")))
        except redis.RedisError as error:
            raise ServiceUnavailable("Replicas are unknown: no connection to Redis.") from error


class History(_Figures):
    """What was asked and answered, over time."""

    @extend_schema(
        responses={200: OpenApiTypes.OBJECT},
        parameters=[
            WHOSE,
            STRETCH,
            OpenApiParameter("model", str),
            OpenApiParameter("adapter", str),
            OpenApiParameter("by", str, enum=list(BY), description="Group the series by it."),
        ],
    )
    def list(self, request: Request) -> Response:
        """Requests, tokens, percentiles of times, pools: each as one value a point of `at`."""
        return Response(history_of(self.actor, _asked(request)))


class Fairness(_Figures):
    """Service by tenant against its weight."""

    @extend_schema(responses={200: OpenApiTypes.OBJECT}, parameters=[WHOSE, STRETCH])
    def list(self, request: Request) -> Response:
        """Computed tokens over time. A tenant sees its own, and all others as one."""
        return Response(figures_of(self.actor, _asked(request)))


def _asked(request: Request) -> dict[str, Any]:
    return dict(request.query_params.items())
