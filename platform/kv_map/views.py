"""Replicas' KV blocks and the isolation check in the management API, and the page of the KV map."""

from __future__ import annotations

from typing import Any

import redis
from asgiref.sync import async_to_sync
from django.db.models import QuerySet
from django.http import HttpResponse
from django.shortcuts import render
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response

from catalog.models import Replica
from common.errors import PermissionDenied, ServiceUnavailable
from console.mounting import mounted
from console.views.base import current_tenant, page_view, tenant_context
from engine.contract.errors import QuireError
from kv_map.access import access_block_view, access_watchable_replicas, snapshot
from kv_map.isolation import can_run_isolation_check, check_prover, generates, run_isolation_check
from management_api.people import ManagementViewSet
from tenants.actors import to_actor
from tenants.sessions import UserRequest


class BlockMapViewSet(ManagementViewSet):
    """The current KV blocks of a replica."""

    queryset = Replica.objects.none()
    serializer_class = serializers.Serializer
    lookup_field = "replica"
    lookup_value_regex = r"[^/]{1,200}"
    filter_backends = ()

    def get_visible_queryset(self) -> QuerySet[Replica]:
        return Replica.objects.none()

    @extend_schema(
        responses={200: OpenApiTypes.OBJECT},
        parameters=[
            OpenApiParameter("replica", str, "path", description="The replica's id."),
            OpenApiParameter(
                "tenant", str, description="Whose blocks; operators may leave it out."
            ),
        ],
    )
    def retrieve(self, request: Request, replica: str) -> Response:
        """Each block as [number, references, cached, owner, requests, adapter, tier, media]; the
        last five are indices into `words`. A tenant sees its own blocks and the total number of
        others.
        """
        tenant = request.query_params.get("tenant", "")
        try:
            sight = access_block_view(self.actor, replica, tenant)
            return Response(snapshot(replica, sight))
        except redis.RedisError as error:
            raise ServiceUnavailable("Redis can't be reached.") from error


class IsolationCheckSerializer(serializers.Serializer):
    """The first and the second tenant; without `other`, an unused namespace."""

    tenant = serializers.CharField(max_length=63)
    other = serializers.CharField(max_length=63, required=False, allow_blank=True, default="")
    model = serializers.CharField(max_length=200)


class IsolationCheckViewSet(ManagementViewSet):
    """A check on the running system that tenants don't share cached prompts."""

    queryset = Replica.objects.none()
    serializer_class = IsolationCheckSerializer
    # It changes nothing and needs no more rights than the playground.
    permission_classes = (IsAuthenticated,)
    filter_backends = ()

    def get_visible_queryset(self) -> QuerySet[Replica]:
        return Replica.objects.none()

    @extend_schema(request=IsolationCheckSerializer, responses={200: OpenApiTypes.OBJECT})
    def create(self, request: Request) -> Response:
        """Send a new text twice as one tenant and twice as another; the response has the cached
        tokens and timings of each request. For operators, and for admins of both tenants, logged
        in.
        """
        values = self.validate_body(IsolationCheckSerializer)
        user = self.actor.user
        if user is None or self.actor.key is not None:
            raise PermissionDenied(
                "This check requires a logged-in user; API keys are not accepted."
            )
        check_prover(user, *filter(None, (values["tenant"], values["other"])))
        return Response(async_to_sync(run_isolation_check)(user, **values))


@page_view
def kv_map(request: UserRequest) -> HttpResponse:
    """The page of a replica's blocks; frames arrive over a WebSocket."""
    user = request.user
    operator = to_actor(user).is_operator
    context: dict[str, Any] = {"operator": operator, "socket_path": mounted("/ws/kv/")}
    error: QuireError | None = None
    tenant = None
    try:
        tenant = current_tenant(request)
    except QuireError as refusal:
        error = refusal
    try:
        watched = access_watchable_replicas(user)
    except redis.RedisError:
        watched, context["away"] = [], True
    named = request.GET.get("replica")
    ids = [beat.replica_id for beat in watched]
    context |= {
        **tenant_context(user, tenant),
        "replicas": [{"id": beat.replica_id, "model": beat.model.name} for beat in watched],
        "replica": named if named in ids else (ids[0] if ids else ""),
        "seen_as": "" if operator and request.GET.get("own") != "yes" else tenant and tenant.slug,
        "models": sorted({beat.model.name for beat in watched if generates(beat)}),
        "proves": can_run_isolation_check(user, tenant),
        "error": error,
    }
    return render(request, "console/kv_map.html", context, status=error.status if error else 200)
