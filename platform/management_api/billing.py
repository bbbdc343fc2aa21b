"""Budgets and prices in the management API."""

from __future__ import annotations

from typing import Any, cast

from django.db.models import QuerySet
from drf_spectacular.utils import extend_schema
from rest_framework import mixins, serializers, status
from rest_framework.request import Request
from rest_framework.response import Response

from adapters.access import access_prices_of, names_for, priceable_names, unknown_name_warning
from management_api.base import BudgetFilter
from management_api.people import ManagementViewSet, TenantMixin
from metering import actions
from metering.budgets import access_budgets, states_of
from metering.models import PRICE_FIELDS, Budget, Price
from metering.money import amount_text
from metering.serializers import BudgetCreateSerializer, PriceCreateSerializer
from tenants.access import access_key


class PriceSerializer(serializers.ModelSerializer):
    """Prices of a model from a point in time on, as decimals: per million tokens, per image and per
    minute of audio.

    `warning`: after setting a price, that no model or adapter has this name today; otherwise "".
    """

    warning = serializers.SerializerMethodField()

    class Meta:
        model = Price
        fields = ("id", "model", "valid_from", *PRICE_FIELDS, "warning")

    def get_warning(self, price: Price) -> str:
        """Warn only the operator who sets it: adapter names must stay hidden from others."""
        return unknown_name_warning(price.model, self.context.get("known_names", (price.model,)))


class _BudgetList(serializers.ListSerializer):
    """A tenant's budgets, whose counters are read together."""

    def to_representation(self, data: Any) -> list[Any]:
        """Read the counters of all rows at once, then serialize them."""
        rows = list(data)
        cast(dict[str, Any], self.context)["states"] = {
            state.budget.pk: state for state in states_of(rows)
        }
        return super().to_representation(rows)


class BudgetSerializer(serializers.ModelSerializer):
    """A budget with its spending in the current period.

    `warning`: that no model or adapter of the tenant has this name today; otherwise "".
    """

    key = serializers.IntegerField(source="api_key_id", read_only=True)
    spent_tokens = serializers.IntegerField(read_only=True)
    spent_amount = serializers.CharField(read_only=True)
    starts_at = serializers.DateTimeField(read_only=True)
    ends_at = serializers.DateTimeField(read_only=True)
    warning = serializers.CharField(read_only=True)

    class Meta:
        model = Budget
        list_serializer_class = _BudgetList
        fields = (
            *("id", "key", "model", "period", "tokens", "amount", "alert_percent"),
            *("spent_tokens", "spent_amount", "starts_at", "ends_at", "warning"),
        )

    def to_representation(self, instance: Budget) -> dict[str, Any]:
        """Return the row and its counters."""
        states = self.context.get("states", {})
        state = states.get(instance.pk) or states_of([instance])[0]
        if "known_names" not in self.context:  # once per response, whose rows are one tenant's
            cast(dict[str, Any], self.context)["known_names"] = names_for(instance.tenant)
        return {
            **{name: getattr(instance, name) for name in ("id", "model", "period", "tokens")},
            "key": instance.api_key_id,
            "amount": None if instance.amount is None else f"{instance.amount:f}",
            "alert_percent": instance.alert_percent,
            "spent_tokens": state.tokens,
            "spent_amount": amount_text(state.nanos),
            "starts_at": state.start.isoformat(),
            "ends_at": state.end.isoformat(),
            "warning": unknown_name_warning(instance.model, self.context["known_names"]),
        }


class PriceViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, ManagementViewSet):
    """Prices of the available models, newest first for each. Operators see and set all prices."""

    queryset = Price.objects.all()
    serializer_class = PriceSerializer
    filterset_fields = ("model",)

    def get_visible_queryset(self) -> QuerySet[Price]:
        return access_prices_of(self.actor)

    @extend_schema(request=PriceCreateSerializer, responses={201: PriceSerializer})
    def create(self, request: Request) -> Response:
        """Set a price that replaces the current one."""
        price = actions.set_price(actor=self.actor, **self.validate_body(PriceCreateSerializer))
        context = {"known_names": priceable_names()}
        return Response(PriceSerializer(price, context=context).data, status.HTTP_201_CREATED)

    @extend_schema(responses={204: None})
    def destroy(self, request: Request, pk: str) -> Response:
        """Delete a price that nothing was billed at."""
        actions.delete_price(actor=self.actor, price=self.row())
        return Response(status=status.HTTP_204_NO_CONTENT)


class BudgetViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, TenantMixin):
    """A tenant's budgets. Operators set the tenant's, and its admins those of its keys."""

    queryset = Budget.objects.all()
    serializer_class = BudgetSerializer
    filterset_class = BudgetFilter

    def get_visible_queryset(self) -> QuerySet[Budget]:
        return access_budgets(self.actor, self.tenant)

    @extend_schema(request=BudgetCreateSerializer, responses={201: BudgetSerializer})
    def create(self, request: Request, tenant: str) -> Response:
        """Create or change a budget."""
        where, values = self.tenant, self.validate_body(BudgetCreateSerializer)
        named = values.pop("key")
        key = None if named is None else access_key(self.actor, where, named)
        budget = actions.set_budget(actor=self.actor, tenant=where, key=key, **values)
        return Response(BudgetSerializer(budget).data, status.HTTP_201_CREATED)

    @extend_schema(responses={204: None})
    def destroy(self, request: Request, tenant: str, pk: str) -> Response:
        """Delete a budget."""
        actions.delete_budget(actor=self.actor, budget=self.row())
        return Response(status=status.HTTP_204_NO_CONTENT)
