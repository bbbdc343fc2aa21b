"""What became of requests, in the management API."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import mixins, serializers
from rest_framework.request import Request
from rest_framework.response import Response

from console.request_story import story_of
from console.rest.filters import row_number
from console.rest.views import ManagementViewSet
from metering.models import RequestEntry
from metering.requests.access import access_request_entry, access_requests, called, of_status


class RequestEntrySerializer(serializers.ModelSerializer):
    """A request in a list. `id` is the ledger's; `request_id` is its `x-request-id`."""

    id = serializers.CharField(source="request_id")
    request_id = serializers.CharField(source="header_id")
    tenant = serializers.CharField(source="tenant.slug")
    user = serializers.CharField(source="user.username", default=None)

    class Meta:
        model = RequestEntry
        fields = ("id", "request_id", "answer_id", "tenant", "api_key_id", "user", "endpoint")
        fields += ("model", "adapter", "adapter_digest", "status", "code", "times")
        fields += ("finish_reason", "stream", "started_at", "duration_ms", "ttft_ms", "queue_ms")
        fields += ("prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos", "replica")


class RequestFilter(filters.FilterSet):
    """By tenant, key, person, model, status and time; `id`: any id that a client has seen."""

    id = filters.CharFilter(method="by_id")
    status = filters.CharFilter(method="by_status", help_text="429, 2xx, 4xx, 5xx or refused.")
    tenant = filters.CharFilter(field_name="tenant__slug")
    user = filters.CharFilter(field_name="user__username")
    key = row_number("api_key_id")
    after = filters.IsoDateTimeFilter(field_name="started_at", lookup_expr="gte")
    before = filters.IsoDateTimeFilter(field_name="started_at", lookup_expr="lt")

    class Meta:
        model = RequestEntry
        fields = ("model", "endpoint", "adapter", "code")

    def by_id(self, rows: QuerySet[RequestEntry], name: str, value: str) -> QuerySet[RequestEntry]:
        """Any of its ids."""
        return rows.filter(called(value))

    def by_status(
        self, rows: QuerySet[RequestEntry], name: str, value: str
    ) -> QuerySet[RequestEntry]:
        """A status, or a class of them. Raises `InvalidRequest`."""
        return of_status(rows, value)


class Requests(mixins.ListModelMixin, ManagementViewSet):
    """Requests of the tenants that one belongs to, newest first; of all for operators."""

    queryset = RequestEntry.objects.all()
    serializer_class = RequestEntrySerializer
    filterset_class = RequestFilter
    lookup_field = "id"
    lookup_value_regex = r"[^/]{1,200}"

    def rows(self) -> QuerySet[RequestEntry]:
        return access_requests(self.actor)

    @extend_schema(
        responses={200: OpenApiTypes.OBJECT},
        parameters=[OpenApiParameter("id", str, "path", description="Any id a client has seen.")],
    )
    def retrieve(self, request: Request, id: str) -> Response:
        """All that is known of one: its limits, queue, chunks, replicas, tokens over time, price.

        What was asked and answered is there where the tenant keeps it, for admins, owners and
        whoever asked.
        """
        found = access_request_entry(self.actor, id)
        shown: dict[str, Any] = dict(RequestEntrySerializer(found).data)
        return Response({**shown, **story_of(self.actor, found)})
