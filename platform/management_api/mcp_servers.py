"""MCP servers in the management API."""

from __future__ import annotations

from django.db.models import QuerySet
from drf_spectacular.utils import extend_schema
from rest_framework import mixins, serializers, status
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from catalog.mcp_servers import (
    FIELDS,
    access_mcp_servers,
    check_mcp_server,
    delete_mcp_server,
    set_mcp_server,
)
from catalog.models import McpServer
from management_api.people import ManagementViewSet
from tenants.access import access_tenant
from tenants.models import Tenant


class McpServerSerializer(serializers.ModelSerializer):
    """An MCP server. `tools`: the approved ones, as of the last successful test."""

    tenants: serializers.SlugRelatedField[Tenant] = serializers.SlugRelatedField(
        "slug", many=True, read_only=True
    )
    tools = serializers.JSONField()

    class Meta:
        model = McpServer
        fields = ("name", "url", "public", "tenants", "tools", "tested_at", "error")


class McpServerSetSerializer(serializers.Serializer):
    """Fields to set; omitted ones stay unchanged. A new server needs a URL."""

    url = serializers.CharField(max_length=2000, required=False, help_text=FIELDS["url"])
    authorization = serializers.CharField(
        max_length=4000, required=False, allow_blank=True, help_text=FIELDS["authorization"]
    )
    public = serializers.BooleanField(required=False, help_text=FIELDS["public"])
    tenants = serializers.ListField(
        child=serializers.CharField(max_length=63), required=False, help_text=FIELDS["tenants"]
    )


class McpServerViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, ManagementViewSet):
    """MCP servers, whose tools models may call in the playground. For operators."""

    queryset = McpServer.objects.all()
    serializer_class = McpServerSerializer
    lookup_field = "name"
    lookup_value_regex = r"[a-z0-9-]{1,32}"
    filterset_fields = ("public",)

    def get_visible_queryset(self) -> QuerySet[McpServer]:
        return access_mcp_servers(self.actor)

    @extend_schema(request=McpServerSetSerializer, responses=McpServerSerializer)
    def update(self, request: Request, name: str) -> Response:
        """Add a server or change the given fields. Its tools may run once it has been tested."""
        values = self.validate_body(McpServerSetSerializer)
        access_mcp_servers(self.actor)  # check permissions before looking up tenants by name
        if (slugs := values.pop("tenants", None)) is not None:
            values["tenants"] = [access_tenant(self.actor, slug) for slug in slugs]
        server = set_mcp_server(actor=self.actor, name=name, **values)
        return Response(McpServerSerializer(server).data)

    @extend_schema(responses={204: None})
    def destroy(self, request: Request, name: str) -> Response:
        """Remove a server."""
        delete_mcp_server(actor=self.actor, server=self.row())
        return Response(status=status.HTTP_204_NO_CONTENT)

    @extend_schema(request=None, responses=McpServerSerializer)
    @action(detail=True, methods=["post"])
    def test(self, request: Request, name: str) -> Response:
        """List the server's tools and approve them in their current form."""
        server = check_mcp_server(actor=self.actor, server=self.row())
        return Response(McpServerSerializer(server).data)
