"""Tenants in the management API."""

from __future__ import annotations

from django.db import transaction
from django.db.models import QuerySet
from django.http.response import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework import mixins, serializers, status
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from console.rest.views import ManagementViewSet
from console.streams import download
from tenants import access, actions
from tenants.errors import NotFound
from tenants.export import export_chunks
from tenants.models import Tenant, User

CHANGEABLE = ("name", *actions.LIMITS, *actions.OWN)


class TenantSerializer(serializers.ModelSerializer):
    """A tenant with its limits."""

    class Meta:
        model = Tenant
        fields = ("slug", "active", *CHANGEABLE, "created_at", "erase_requested_at")
        read_only_fields = fields


class TenantChangesSerializer(serializers.ModelSerializer):
    """What is named changes: `name` admins', `keep_...` of content owners', the rest operators'."""

    active = serializers.BooleanField(required=False)

    class Meta:
        model = Tenant
        fields = ("active", *CHANGEABLE)


class NewTenantSerializer(serializers.ModelSerializer):
    """`slug` comes from the name when it's left out; `owner` is somebody's user name."""

    slug = serializers.CharField(required=False, allow_blank=True, default="", max_length=63)
    owner = serializers.CharField(required=False, allow_null=True, default=None, max_length=150)

    class Meta:
        model = Tenant
        fields = ("slug", "owner", *CHANGEABLE)


class ErasureSerializer(serializers.Serializer):
    """The tenant's short name once more, so that nobody does it by mistake."""

    confirm = serializers.CharField(max_length=63)


class Tenants(mixins.ListModelMixin, mixins.RetrieveModelMixin, ManagementViewSet):
    """The tenants that one belongs to; all of them for operators."""

    queryset = Tenant.objects.all()
    serializer_class = TenantSerializer
    filterset_fields = ("active",)
    lookup_field = "slug"
    lookup_value_regex = r"[a-z0-9-]{1,63}"

    def rows(self) -> QuerySet[Tenant]:
        return access.access_tenants(self.actor)

    @extend_schema(request=NewTenantSerializer, responses={201: TenantSerializer})
    def create(self, request: Request) -> Response:
        """Add one. For operators."""
        access.require_operator(self.actor)
        values = self.read(NewTenantSerializer)
        named, owner = values.pop("owner"), None
        if named is not None:
            owner = User.objects.filter(username=named).first()
            if owner is None:
                raise NotFound(f"User {named!r} not found.", param="owner")
        made = actions.create_tenant(actor=self.actor, owner=owner, **values)
        return Response(TenantSerializer(made).data, status.HTTP_201_CREATED)

    @extend_schema(request=TenantChangesSerializer(partial=True), responses=TenantSerializer)
    def partial_update(self, request: Request, slug: str) -> Response:
        """Change what is named; `active` switches it off and on."""
        row = self.row()
        given = TenantChangesSerializer(row, data=request.data, partial=True)
        values = self.checked(given)
        active = values.pop("active", None)
        with transaction.atomic():
            saved = actions.update_tenant(actor=self.actor, tenant=row, **values)
            if active is not None:
                saved = actions.set_tenant_active(actor=self.actor, tenant=saved, active=active)
        return Response(TenantSerializer(saved).data)

    @extend_schema(request=None, responses={204: None})
    @action(detail=True, methods=["post"], url_path="new-cache-namespace")
    def new_cache_namespace(self, request: Request, slug: str) -> Response:
        """What it cached is never hit again. For owners."""
        actions.rotate_cache_salt(actor=self.actor, tenant=self.row())
        return Response(status=status.HTTP_204_NO_CONTENT)

    @extend_schema(request=None, responses={(200, "application/zip"): OpenApiTypes.BINARY})
    @action(detail=True, methods=["post"])
    def export(self, request: Request, slug: str) -> HttpResponseBase:
        """All that is kept of it, as a ZIP archive. For owners in person, and operators."""
        row = self.row()
        actions.begin_export(actor=self.actor, tenant=row)
        return download(request._request, export_chunks(row), f"{row.slug}.zip", "application/zip")

    @extend_schema(request=ErasureSerializer, responses={202: TenantSerializer})
    @action(detail=True, methods=["post"])
    def erase(self, request: Request, slug: str) -> Response:
        """Switch it off and remove all that is kept of it. For owners in person, and operators."""
        values = self.read(ErasureSerializer)
        gone = actions.erase_tenant(actor=self.actor, tenant=self.row(), **values)
        return Response(TenantSerializer(gone).data, status.HTTP_202_ACCEPTED)
