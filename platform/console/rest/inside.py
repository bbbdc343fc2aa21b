"""Replicas' KV blocks, and the proof of isolation, in the management API."""

from __future__ import annotations

import redis
from asgiref.sync import async_to_sync
from django.db.models import QuerySet
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response

from catalog.models import Replica
from console.isolation import check_prover, prove
from console.kv.access import access_sight
from console.kv.snapshot import snapshot
from console.rest.views import ManagementViewSet
from tenants.errors import PermissionDenied, ServiceUnavailable


class Blocks(ManagementViewSet):
    """A replica's KV blocks as they are now."""

    queryset = Replica.objects.none()
    serializer_class = serializers.Serializer
    lookup_field = "replica"
    lookup_value_regex = r"[^/]{1,200}"
    filter_backends = ()

    def rows(self) -> QuerySet[Replica]:
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
        """Each block as [number, references, cached, owner, requests, adapter], the last three as
        places in `words`. A tenant sees its own blocks, and of the rest how many there are.
        """
        tenant = request.query_params.get("tenant", "")
        try:
            sight = access_sight(self.actor, replica, tenant)
            return Response(snapshot(replica, sight))
        except redis.RedisError as error:
            raise ServiceUnavailable("Redis can't be reached.") from error


class ProofSerializer(serializers.Serializer):
    """Who asks first, who asks the same then; without `other` an unused namespace."""

    tenant = serializers.CharField(max_length=63)
    other = serializers.CharField(max_length=63, required=False, allow_blank=True, default="")
    model = serializers.CharField(max_length=200)


class Isolation(ManagementViewSet):
    """Proof, on the running system, that one tenant's cached prompts are no other's."""

    queryset = Replica.objects.none()
    serializer_class = ProofSerializer
    # It changes nothing, and asks for no more than the playground does.
    permission_classes = (IsAuthenticated,)
    filter_backends = ()

    def rows(self) -> QuerySet[Replica]:
        return Replica.objects.none()

    @extend_schema(request=ProofSerializer, responses={200: OpenApiTypes.OBJECT})
    def create(self, request: Request) -> Response:
        """A new text is asked twice by one tenant and twice by another; the answer has what each
        found cached, with timings. For operators, and admins of both tenants, in person.
        """
        values = self.read(ProofSerializer)
        user = self.actor.user
        if user is None or self.actor.key is not None:
            raise PermissionDenied(
                "This check requires a logged-in user; API keys are not accepted."
            )
        check_prover(user, *filter(None, (values["tenant"], values["other"])))
        return Response(async_to_sync(prove)(user, **values))
