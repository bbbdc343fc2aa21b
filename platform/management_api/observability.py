"""Requests, traffic and settings in the management API."""

from __future__ import annotations

from typing import Any

import redis
from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import mixins, serializers, status
from rest_framework.request import Request
from rest_framework.response import Response

from catalog.live_status import overview_of
from catalog.models import ServedModel
from common.effective_settings import in_force
from common.errors import PermissionDenied, ServiceUnavailable
from history.buckets import RANGES
from history.queries import GROUP_BY, get_fairness, get_traffic_history
from management_api.base import row_number
from management_api.people import ManagementViewSet
from metering.models import RequestEntry, SavedSearch
from metering.request_log import (
    access_request_entry,
    access_requests,
    called,
    of_status,
    request_detail_json,
)
from metering.saved_searches import access_searches, delete_search, save_search
from tenants.actors import require_operator
from tenants.models import User

WHOSE = OpenApiParameter("tenant", str, description="Tenant slug. Omit for all.")
STRETCH = OpenApiParameter("range", str, enum=list(RANGES), description="Time range, ending now.")


class TrafficReportViewSet(ManagementViewSet):
    """Figures without pagination."""

    serializer_class = serializers.Serializer
    pagination_class = None
    filter_backends = ()


class OverviewViewSet(TrafficReportViewSet):
    """The current state of models and replicas."""

    @extend_schema(responses={200: OpenApiTypes.OBJECT}, parameters=[WHOSE])
    def list(self, request: Request) -> Response:
        """States of the models that a tenant may use, and the load of their replicas."""
        try:
            return Response(overview_of(self.actor, request.query_params.get("tenant")))
        except redis.RedisError as error:
            raise ServiceUnavailable("Replicas are unknown: no connection to Redis.") from error


class TrafficHistoryViewSet(TrafficReportViewSet):
    """Traffic over time."""

    @extend_schema(
        responses={200: OpenApiTypes.OBJECT},
        parameters=[
            WHOSE,
            STRETCH,
            OpenApiParameter("model", str),
            OpenApiParameter("adapter", str),
            OpenApiParameter("by", str, enum=list(GROUP_BY), description="Group the series by it."),
        ],
    )
    def list(self, request: Request) -> Response:
        """Requests, tokens, latency percentiles and KV pools; one value for each point in `at`."""
        return Response(get_traffic_history(self.actor, _asked(request)))


class FairnessViewSet(TrafficReportViewSet):
    """Tenants' service relative to their weights."""

    @extend_schema(responses={200: OpenApiTypes.OBJECT}, parameters=[WHOSE, STRETCH])
    def list(self, request: Request) -> Response:
        """Computed tokens over time. A tenant sees its own, and the sum of all others."""
        return Response(get_fairness(self.actor, _asked(request)))


def _asked(request: Request) -> dict[str, Any]:
    return dict(request.query_params.items())


class RequestEntrySerializer(serializers.ModelSerializer):
    """A request in a list. `id` is the ledger's id; `request_id` is the `x-request-id`."""

    id = serializers.CharField(source="request_id")
    request_id = serializers.CharField(source="header_id")
    tenant = serializers.CharField(source="tenant.slug")
    user = serializers.CharField(source="user.username", default=None)

    class Meta:
        model = RequestEntry
        fields = (
            *("id", "request_id", "answer_id", "tenant", "api_key_id", "user", "endpoint"),
            *("model", "adapter", "adapter_digest", "status", "code", "times"),
            *("finish_reason", "stream", "started_at", "duration_ms", "ttft_ms", "queue_ms"),
            *("prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos", "replica"),
        )


class RequestFilter(filters.FilterSet):
    """Filters by tenant, key, user, model, status and time; `id`: any id that a client received."""

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
        """Filter by any of the request's ids."""
        return rows.filter(called(value))

    def by_status(
        self, rows: QuerySet[RequestEntry], name: str, value: str
    ) -> QuerySet[RequestEntry]:
        """Filter by a status or a class of statuses. Raises `InvalidRequest`."""
        return of_status(rows, value)


class RequestEntryViewSet(mixins.ListModelMixin, ManagementViewSet):
    """Requests of the user's tenants, newest first; operators see all."""

    queryset = RequestEntry.objects.all()
    serializer_class = RequestEntrySerializer
    filterset_class = RequestFilter
    lookup_field = "id"
    lookup_value_regex = r"[^/]{1,200}"

    def get_visible_queryset(self) -> QuerySet[RequestEntry]:
        return access_requests(self.actor)

    @extend_schema(
        responses={200: OpenApiTypes.OBJECT},
        parameters=[OpenApiParameter("id", str, "path", description="Any id a client has seen.")],
    )
    def retrieve(self, request: Request, id: str) -> Response:
        """Details of a request: limits, queue, chunks, replicas, tokens over time, price.

        The prompt and the answer are included if the tenant stores them; only for admins, owners
        and the user who sent the request.
        """
        entry = access_request_entry(self.actor, id)
        fields: dict[str, Any] = dict(RequestEntrySerializer(entry).data)
        return Response({**fields, **request_detail_json(self.actor, entry)})


class SavedViewSerializer(serializers.ModelSerializer):
    """A saved view of the request list. `query`: filters and order as in the page's URL."""

    class Meta:
        model = SavedSearch
        fields = ("id", "name", "query")
        validators = ()  # a view with the same name is replaced


class SavedViewViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, ManagementViewSet):
    """Saved views of the request list, of the user or of the key's holder."""

    queryset = SavedSearch.objects.all()
    serializer_class = SavedViewSerializer
    filterset_fields = ("name",)

    @property
    def person(self) -> User:
        """Return the user. Raises `PermissionDenied` for a key without a user."""
        if self.actor.user is None:
            raise PermissionDenied("Saved views are a person's, and nobody holds this key.")
        return self.actor.user

    def get_visible_queryset(self) -> QuerySet[SavedSearch]:
        return access_searches(self.person)

    def create(self, request: Request) -> Response:
        """Save a view, replacing one with the same name."""
        row = save_search(actor=self.person, **self.validate_body(SavedViewSerializer))
        return Response(SavedViewSerializer(row).data, status=status.HTTP_201_CREATED)

    @extend_schema(responses={204: None})
    def destroy(self, request: Request, pk: str) -> Response:
        """Delete a view."""
        delete_search(actor=self.person, pk=self.row().pk)
        return Response(status=status.HTTP_204_NO_CONTENT)


class SettingSerializer(serializers.Serializer):
    """A setting; for a secret, `value` only says whether it is set."""

    name = serializers.CharField()
    group = serializers.CharField()
    help = serializers.CharField()
    value = serializers.CharField()
    default = serializers.CharField()
    source = serializers.CharField()  # type: ignore[assignment]  # a JSON field
    secret = serializers.BooleanField()


class SettingViewSet(ManagementViewSet):
    """Settings of the gateway that responds. For operators."""

    queryset = ServedModel.objects.none()  # there are no rows; DRF requires a queryset
    serializer_class = SettingSerializer
    pagination_class = None

    @extend_schema(responses=SettingSerializer(many=True))
    def list(self, request: Request) -> Response:
        """All settings with their values and sources."""
        require_operator(self.actor)
        return Response(SettingSerializer(in_force(), many=True).data)
