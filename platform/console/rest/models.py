"""Served models in the management API."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from drf_spectacular.utils import extend_schema
from rest_framework import mixins, serializers, status
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from catalog import actions
from catalog.access import access_catalog
from catalog.models import ServedModel
from console.rest.views import ManagementViewSet
from tenants.access import access_tenant, require_operator
from tenants.models import Tenant

COLUMNS = ("num_replicas", "num_spares", "node", "managed", "public", "aliases")


class ModelSerializer(serializers.ModelSerializer):
    """A served model; `tenants` are those that may use it where it isn't public."""

    tenants = serializers.SlugRelatedField("slug", many=True, read_only=True)

    class Meta:
        model = ServedModel
        fields = ("id", "name", "source", "settings", "desired_state", *COLUMNS, "tenants")
        fields += ("max_model_len", "created_at", "changed_at")
        read_only_fields = ("desired_state", "max_model_len", "created_at", "changed_at")
        extra_kwargs = {"name": {"validators": []}, "aliases": {"required": False}}


class ModelChangesSerializer(serializers.ModelSerializer):
    """What is named changes; replicas start anew where engine settings did."""

    tenants = serializers.ListField(child=serializers.CharField(max_length=63), required=False)

    class Meta:
        model = ServedModel
        fields = ("source", "settings", *COLUMNS, "tenants")


class Models(mixins.ListModelMixin, mixins.RetrieveModelMixin, ManagementViewSet):
    """The catalogue. For operators; others list models at `/v1/models`."""

    queryset = ServedModel.objects.all()
    serializer_class = ModelSerializer
    filterset_fields = ("name", "desired_state", "public")

    def rows(self) -> QuerySet[ServedModel]:
        return access_catalog(self.actor)

    @extend_schema(request=ModelSerializer, responses={201: ModelSerializer})
    def create(self, request: Request) -> Response:
        """Load a model under a name: a new one, or one that was unloaded."""
        require_operator(self.actor)
        made = actions.load_model(actor=self.actor, **self.read(ModelSerializer))
        return Response(ModelSerializer(made).data, status.HTTP_201_CREATED)

    @extend_schema(request=ModelChangesSerializer(partial=True), responses=ModelSerializer)
    def partial_update(self, request: Request, pk: str) -> Response:
        """Change what is named."""
        row = self.row()
        given = ModelChangesSerializer(row, data=request.data, partial=True)
        given.is_valid(raise_exception=True)
        values: dict[str, Any] = dict(given.validated_data)
        named = values.pop("tenants", None)
        saved = actions.update_model(actor=self.actor, model=row, **values)
        if named is not None:
            tenants: list[Tenant] = [access_tenant(self.actor, slug) for slug in named]
            saved = actions.share_model(
                actor=self.actor, model=saved, tenants=tenants, public=saved.public
            )
        return Response(ModelSerializer(saved).data)

    @extend_schema(responses={204: None})
    def destroy(self, request: Request, pk: str) -> Response:
        """Out of the catalogue, once it's unloaded."""
        actions.delete_model(actor=self.actor, model=self.row())
        return Response(status=status.HTTP_204_NO_CONTENT)

    @extend_schema(request=None, responses=ModelSerializer)
    @action(detail=True, methods=["post"])
    def load(self, request: Request, pk: str) -> Response:
        """Have it served again."""
        saved = actions.load_model(actor=self.actor, name=self.row().name)
        return Response(ModelSerializer(saved).data)

    @extend_schema(request=None, responses=ModelSerializer)
    @action(detail=True, methods=["post"])
    def unload(self, request: Request, pk: str) -> Response:
        """Let its replicas finish, then end."""
        saved = actions.unload_model(actor=self.actor, model=self.row())
        return Response(ModelSerializer(saved).data)
