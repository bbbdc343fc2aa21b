"""The usage ledger."""

from django.contrib import admin
from django.db.models import Sum
from django.http import HttpRequest, HttpResponse

from metering.models import UsageEntry
from tenants.admin.base import ReadOnlyAdmin


@admin.register(UsageEntry)
class UsageEntryAdmin(ReadOnlyAdmin):
    """What each request used, with the sums of what is selected."""

    change_list_template = "admin/metering/usageentry/change_list.html"
    list_display = (
        "started_at",
        "request_id",
        "tenant",
        "api_key_id",
        "endpoint",
        "model",
        "prompt_tokens",
        "cached_tokens",
        "completion_tokens",
        "status",
        "finish_reason",
        "ttft_ms",
        "duration_ms",
        "stream",
    )
    list_filter = ("model", "endpoint", "status", "finish_reason", "stream", "tenant")
    search_fields = ("request_id", "tenant__slug", "model")
    list_select_related = ("tenant",)
    date_hierarchy = "started_at"
    # By their numbers: a key or a user may be gone while what they used is still on the bill.
    exclude = ("api_key", "user")
    readonly_fields = ("api_key_id", "user_id")

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, object] | None = None
    ) -> HttpResponse:
        """The list and, below it, its sums."""
        response = super().changelist_view(request, extra_context)
        context = getattr(response, "context_data", None) or {}
        if changelist := context.get("cl"):
            context["sums"] = changelist.queryset.order_by().aggregate(
                prompt=Sum("prompt_tokens", default=0),
                cached=Sum("cached_tokens", default=0),
                completion=Sum("completion_tokens", default=0),
            )
        return response
