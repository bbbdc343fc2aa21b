"""The usage ledger."""

from django.contrib import admin
from django.db.models import Sum
from django.http import HttpRequest, HttpResponse

from metering.models import UsageEntry
from tenants.admin.base import ReadOnlyAdmin


def duration(milliseconds: float) -> str:
    """ "85 ms" or "1.2 s"."""
    if milliseconds < 1000:
        return f"{milliseconds:.0f} ms"
    return f"{milliseconds / 1000:,.1f} s"


@admin.register(UsageEntry)
class UsageEntryAdmin(ReadOnlyAdmin):
    """What each request used, with the sums of what is selected."""

    change_list_template = "admin/metering/usageentry/change_list.html"
    # What a page is wide enough for; the rest is on the entry's own page and can be searched for.
    list_display = (
        "started_at",
        "tenant",
        "model",
        "endpoint",
        "status",
        "prompt",
        "cached",
        "output",
        "first_token",
        "duration",
    )
    list_filter = ("model", "endpoint", "status", "finish_reason", "stream", "tenant")
    search_fields = ("request_id", "tenant__slug", "model")
    list_select_related = ("tenant",)
    date_hierarchy = "started_at"
    # By their numbers: a key or a user may be gone while what they used is still on the bill.
    exclude = ("api_key", "user")
    readonly_fields = ("api_key_id", "user_id")

    @admin.display(ordering="prompt_tokens")
    def prompt(self, entry: UsageEntry) -> str:
        """Prompt tokens."""
        return f"{entry.prompt_tokens:,}"

    @admin.display(ordering="cached_tokens")
    def cached(self, entry: UsageEntry) -> str:
        """Those of them that the prefix cache had."""
        return f"{entry.cached_tokens:,}"

    @admin.display(ordering="completion_tokens")
    def output(self, entry: UsageEntry) -> str:
        """Output tokens."""
        return f"{entry.completion_tokens:,}"

    @admin.display(ordering="ttft_ms", description="first token")
    def first_token(self, entry: UsageEntry) -> str | None:
        """Time to the first token."""
        return None if entry.ttft_ms is None else duration(entry.ttft_ms)

    @admin.display(ordering="duration_ms")
    def duration(self, entry: UsageEntry) -> str:
        """Of the whole request."""
        return duration(entry.duration_ms)

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
