"""Settings in force, in the management API."""

from __future__ import annotations

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from catalog.models import ServedModel
from config.in_force import in_force
from console.rest.views import ManagementViewSet
from tenants.actors import require_operator


class SettingSerializer(serializers.Serializer):
    """One setting; of a secret `value` says whether it's set."""

    name = serializers.CharField()
    group = serializers.CharField()
    help = serializers.CharField()
    value = serializers.CharField()
    default = serializers.CharField()
    source = serializers.CharField()
    secret = serializers.BooleanField()


class Settings(ManagementViewSet):
    """Every setting of the gateway that answers. For operators."""

    queryset = ServedModel.objects.none()  # it has no rows
    serializer_class = SettingSerializer
    pagination_class = None

    @extend_schema(responses=SettingSerializer(many=True))
    def list(self, request: Request) -> Response:
        """All of them, with their values and where these came from."""
        require_operator(self.actor)
        return Response(SettingSerializer(in_force(), many=True).data)
