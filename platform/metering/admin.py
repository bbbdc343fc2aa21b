"""The usage ledger, prices and budgets in Django's admin."""

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from metering.models import PRICE_FIELDS, Budget, Price, UsageEntry
from tenants.admin import ReadOnlyModelAdmin


@admin.register(UsageEntry)
class UsageEntryAdmin(ReadOnlyModelAdmin):
    console_page = "usage"
    list_display = (
        *("started_at", "tenant", "model", "endpoint", "status"),
        *("prompt_tokens", "cached_tokens", "completion_tokens", "ttft_ms", "duration_ms"),
    )
    list_filter = ("stream", "tenant")
    search_fields = ("request_id", "tenant__slug", "model")
    list_select_related = ("tenant",)
    date_hierarchy = "started_at"
    # Plain numbers: a key or a user may be deleted while its usage is still billed.
    exclude = ("api_key", "user")
    readonly_fields = ("api_key_id", "user_id")

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[UsageEntry], search_term: str
    ) -> tuple[QuerySet[UsageEntry], bool]:
        """Find the entry by the digits of a response header's `req-...`."""
        digits = search_term.strip().removeprefix("req-")
        return super().get_search_results(request, queryset, digits)


@admin.register(Price)
class PriceAdmin(ReadOnlyModelAdmin):
    console_page = "prices"
    list_display = ("model", "valid_from", *PRICE_FIELDS)
    search_fields = ("model",)


@admin.register(Budget)
class BudgetAdmin(ReadOnlyModelAdmin):
    """Budgets of tenants and keys. The console shows how much of them is spent."""

    console_page = "budgets"
    list_display = ("__str__", "tokens", "amount", "alert_percent")
    list_filter = ("period", "tenant")
    search_fields = ("tenant__slug", "model", "api_key__public_id")
    list_select_related = ("tenant", "api_key")
