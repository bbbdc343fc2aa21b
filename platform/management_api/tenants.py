"""Tenants in the management API."""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.db.models import QuerySet
from django.http.response import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework import mixins, serializers, status
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from common.errors import NotFound
from common.files import download
from management_api.people import ManagementViewSet, TenantMixin
from metering import actions
from metering.budgets import access_deliveries, access_webhooks
from metering.models import Webhook, WebhookDelivery
from tenants import access
from tenants import actions as tenants_actions
from tenants.models import Tenant, User
from tenants.tenant_data import export_chunks


class WebhookSerializer(serializers.ModelSerializer):
    """The tenant's webhook."""

    class Meta:
        model = Webhook
        fields: tuple[str, ...] = ("id", "url", "created_at")
        read_only_fields = ("created_at",)


class WebhookWithSecretSerializer(WebhookSerializer):
    """A webhook with its signing secret, which only this response contains."""

    secret = serializers.CharField(read_only=True)

    class Meta(WebhookSerializer.Meta):
        fields = (*WebhookSerializer.Meta.fields, "secret")


class WebhookDeliverySerializer(serializers.ModelSerializer):
    """An event with its body and the result of its delivery."""

    state = serializers.CharField(read_only=True)

    class Meta:
        model = WebhookDelivery
        fields = (
            *("id", "event_id", "kind", "url", "body", "state", "attempts", "status", "error"),
            *("created_at", "next_try_at", "delivered_at"),
        )


class WebhookViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, TenantMixin):
    """The tenant's webhook, if any. For admins."""

    queryset = Webhook.objects.all()
    serializer_class = WebhookSerializer

    def get_visible_queryset(self) -> QuerySet[Webhook]:
        return access_webhooks(self.actor, self.tenant)

    @extend_schema(request=WebhookSerializer, responses={201: WebhookWithSecretSerializer})
    def create(self, request: Request, tenant: str) -> Response:
        """Set the webhook, replacing an existing one."""
        where, values = self.tenant, self.validate_body(WebhookSerializer)
        created = actions.set_webhook(actor=self.actor, tenant=where, **values)
        return Response(WebhookWithSecretSerializer(created).data, status.HTTP_201_CREATED)

    @extend_schema(responses={204: None})
    def destroy(self, request: Request, tenant: str, pk: str) -> Response:
        """Delete the webhook."""
        actions.delete_webhook(actor=self.actor, tenant=self.row().tenant)
        return Response(status=status.HTTP_204_NO_CONTENT)

    @extend_schema(request=None, responses={201: WebhookDeliverySerializer})
    @action(detail=True, methods=["post"])
    def test(self, request: Request, tenant: str, pk: str) -> Response:
        """Send the webhook an event of the type `webhook.test`."""
        delivery = actions.send_test_event(actor=self.actor, tenant=self.row().tenant)
        return Response(WebhookDeliverySerializer(delivery).data, status.HTTP_201_CREATED)


class WebhookDeliveryViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, TenantMixin):
    """Deliveries of the last 30 days, newest first. For admins."""

    queryset = WebhookDelivery.objects.all()
    serializer_class = WebhookDeliverySerializer
    filterset_fields = ("kind", "event_id")

    def get_visible_queryset(self) -> QuerySet[WebhookDelivery]:
        return access_deliveries(self.actor, self.tenant)

    @extend_schema(request=None, responses=WebhookDeliverySerializer)
    @action(detail=True, methods=["post"])
    def again(self, request: Request, tenant: str, pk: str) -> Response:
        """Retry an abandoned event."""
        row: Any = actions.redeliver(actor=self.actor, delivery=self.row())
        return Response(WebhookDeliverySerializer(row).data)


CHANGEABLE = ("name", *tenants_actions.LIMITS, *tenants_actions.OWNER_FIELDS)


class TenantSerializer(serializers.ModelSerializer):
    """A tenant with its limits."""

    class Meta:
        model = Tenant
        fields = ("slug", "active", *CHANGEABLE, "created_at", "erase_requested_at")
        read_only_fields = fields


class TenantUpdateSerializer(serializers.ModelSerializer):
    """Changes of a tenant: `name` by admins, retention by owners, the rest by operators."""

    active = serializers.BooleanField(required=False)

    class Meta:
        model = Tenant
        fields = ("active", *CHANGEABLE)


class TenantCreateSerializer(serializers.ModelSerializer):
    """`slug` is derived from the name if omitted; `owner` is a username."""

    slug = serializers.CharField(required=False, allow_blank=True, default="", max_length=63)
    owner = serializers.CharField(required=False, allow_null=True, default=None, max_length=150)

    class Meta:
        model = Tenant
        fields = ("slug", "owner", *CHANGEABLE)


class ErasureSerializer(serializers.Serializer):
    """The tenant's slug, to prevent accidental erasure."""

    confirm = serializers.CharField(max_length=63)


class TenantViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, ManagementViewSet):
    """The user's tenants; operators see all."""

    queryset = Tenant.objects.all()
    serializer_class = TenantSerializer
    filterset_fields = ("active",)
    lookup_field = "slug"
    lookup_value_regex = r"[a-z0-9-]{1,63}"

    def get_visible_queryset(self) -> QuerySet[Tenant]:
        return access.access_tenants(self.actor)

    @extend_schema(request=TenantCreateSerializer, responses={201: TenantSerializer})
    def create(self, request: Request) -> Response:
        """Create a tenant. For operators."""
        access.require_operator(self.actor)
        values = self.validate_body(TenantCreateSerializer)
        named, owner = values.pop("owner"), None
        if named is not None:
            owner = User.objects.filter(username=named).first()
            if owner is None:
                raise NotFound(f"User {named!r} not found.", param="owner")
        tenant = tenants_actions.create_tenant(actor=self.actor, owner=owner, **values)
        return Response(TenantSerializer(tenant).data, status.HTTP_201_CREATED)

    @extend_schema(request=TenantUpdateSerializer(partial=True), responses=TenantSerializer)
    def partial_update(self, request: Request, slug: str) -> Response:
        """Change the given fields; `active` enables or disables the tenant."""
        row = self.row()
        serializer = TenantUpdateSerializer(row, data=request.data, partial=True)
        values = self.validated(serializer)
        active = values.pop("active", None)
        with transaction.atomic():
            saved = tenants_actions.update_tenant(actor=self.actor, tenant=row, **values)
            if active is not None:
                saved = tenants_actions.set_tenant_active(
                    actor=self.actor, tenant=saved, active=active
                )
        return Response(TenantSerializer(saved).data)

    @extend_schema(request=None, responses={204: None})
    @action(detail=True, methods=["post"], url_path="new-cache-namespace")
    def new_cache_namespace(self, request: Request, slug: str) -> Response:
        """Rotate the cache namespace, so that cached prompts are no longer hit. For owners."""
        tenants_actions.rotate_cache_salt(actor=self.actor, tenant=self.row())
        return Response(status=status.HTTP_204_NO_CONTENT)

    @extend_schema(request=None, responses={(200, "application/zip"): OpenApiTypes.BINARY})
    @action(detail=True, methods=["post"])
    def export(self, request: Request, slug: str) -> HttpResponseBase:
        """All of the tenant's data as a ZIP archive. For logged-in owners, and operators."""
        row = self.row()
        tenants_actions.log_export(actor=self.actor, tenant=row)
        return download(request._request, export_chunks(row), f"{row.slug}.zip", "application/zip")

    @extend_schema(request=ErasureSerializer, responses={202: TenantSerializer})
    @action(detail=True, methods=["post"])
    def erase(self, request: Request, slug: str) -> Response:
        """Disable the tenant and erase its data. For logged-in owners, and operators."""
        values = self.validate_body(ErasureSerializer)
        erased = tenants_actions.erase_tenant(actor=self.actor, tenant=self.row(), **values)
        return Response(TenantSerializer(erased).data, status.HTTP_202_ACCEPTED)
