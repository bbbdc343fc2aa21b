"""A tenant's webhook and its deliveries in the management API."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from drf_spectacular.utils import extend_schema
from rest_framework import mixins, serializers, status
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from console.rest.views import TenantMixin
from metering import actions
from metering.models import Webhook, WebhookDelivery
from metering.spending import access_deliveries, access_webhooks


class WebhookSerializer(serializers.ModelSerializer):
    """Where the tenant is told."""

    class Meta:
        model = Webhook
        fields = ("id", "url", "created_at")
        read_only_fields = ("created_at",)


class MadeWebhookSerializer(WebhookSerializer):
    """With the secret that signs; it's in this answer alone."""

    secret = serializers.CharField(read_only=True)

    class Meta(WebhookSerializer.Meta):
        fields = (*WebhookSerializer.Meta.fields, "secret")


class DeliverySerializer(serializers.ModelSerializer):
    """One event: what was sent, and how that went."""

    state = serializers.CharField(read_only=True)

    class Meta:
        model = WebhookDelivery
        fields = ("id", "event_id", "kind", "url", "body", "state", "attempts", "status", "error")
        fields += ("created_at", "next_try_at", "delivered_at")


class Webhooks(mixins.ListModelMixin, mixins.RetrieveModelMixin, TenantMixin):
    """None or one. For admins."""

    queryset = Webhook.objects.all()
    serializer_class = WebhookSerializer

    def rows(self) -> QuerySet[Webhook]:
        return access_webhooks(self.actor, self.tenant)

    @extend_schema(request=WebhookSerializer, responses={201: MadeWebhookSerializer})
    def create(self, request: Request, tenant: str) -> Response:
        """Set it; the one there was gives way."""
        where, values = self.tenant, self.read(WebhookSerializer)
        made = actions.set_webhook(actor=self.actor, tenant=where, **values)
        return Response(MadeWebhookSerializer(made).data, status.HTTP_201_CREATED)

    @extend_schema(responses={204: None})
    def destroy(self, request: Request, tenant: str, pk: str) -> Response:
        """Tell nobody any more."""
        actions.delete_webhook(actor=self.actor, tenant=self.row().tenant)
        return Response(status=status.HTTP_204_NO_CONTENT)

    @extend_schema(request=None, responses={201: DeliverySerializer})
    @action(detail=True, methods=["post"])
    def test(self, request: Request, tenant: str, pk: str) -> Response:
        """Send it an event of the kind `webhook.test`."""
        made = actions.try_webhook(actor=self.actor, tenant=self.row().tenant)
        return Response(DeliverySerializer(made).data, status.HTTP_201_CREATED)


class Deliveries(mixins.ListModelMixin, mixins.RetrieveModelMixin, TenantMixin):
    """What was sent in the last 30 days, newest first. For admins."""

    queryset = WebhookDelivery.objects.all()
    serializer_class = DeliverySerializer
    filterset_fields = ("kind", "event_id")

    def rows(self) -> QuerySet[WebhookDelivery]:
        return access_deliveries(self.actor, self.tenant)

    @extend_schema(request=None, responses=DeliverySerializer)
    @action(detail=True, methods=["post"])
    def again(self, request: Request, tenant: str, pk: str) -> Response:
        """Try an event that was given up once more."""
        row: Any = actions.send_again(actor=self.actor, delivery=self.row())
        return Response(DeliverySerializer(row).data)
