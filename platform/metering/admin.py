"""The usage ledger, prices and budgets."""

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet, Sum
from django.http import HttpRequest, HttpResponse

from metering import actions
from metering.budgets import BudgetState, states_of
from metering.models import Budget, Price, UsageEntry
from metering.money import amount_text
from tenants.admin import ActionsAdmin, ReadOnlyModelAdmin

#: Where a budget of a page keeps how it stands.
SEEN = "seen_state"


def duration(milliseconds: float) -> str:
    """ "85 ms" or "1.2 s"."""
    if milliseconds < 1000:
        return f"{milliseconds:.0f} ms"
    return f"{milliseconds / 1000:,.1f} s"


@admin.register(UsageEntry)
class UsageEntryAdmin(ReadOnlyModelAdmin):
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

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[UsageEntry], search_term: str
    ) -> tuple[QuerySet[UsageEntry], bool]:
        """A header's `req-...` finds the entry that has its digits."""
        digits = search_term.strip().removeprefix("req-")
        return super().get_search_results(request, queryset, digits)

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


@admin.register(Price)
class PriceAdmin(ActionsAdmin):
    """What tokens cost. A price that has begun stays; a new one follows it."""

    list_display = ("model", "valid_from", *actions.PRICE_NAMES)
    list_filter = ("model",)
    search_fields = ("model",)
    fields = ("model", "valid_from", *actions.PRICE_NAMES)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """History isn't changed."""
        return False

    def save_model(self, request: HttpRequest, obj: Price, form: Any, change: bool) -> None:
        """Through the action."""
        values = {name: form.cleaned_data[name] for name in self.fields}
        made = actions.set_price(actor=request.user, **values)
        obj.pk = made.pk

    def delete_model(self, request: HttpRequest, obj: Price) -> None:
        """Through the action: only what hasn't begun."""
        actions.delete_price(actor=request.user, price=obj)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Price]) -> None:
        """One by one."""
        self.each(request, queryset, lambda row: self.delete_model(request, row), "prices deleted")


@admin.register(Budget)
class BudgetAdmin(ActionsAdmin):
    """What tenants and keys may use."""

    list_display = ("__str__", "tokens", "amount", "spent", "alert_percent")
    list_filter = ("period", "tenant")
    search_fields = ("tenant__slug", "model", "api_key__public_id")
    list_select_related = ("tenant", "api_key")
    autocomplete_fields = ("tenant", "api_key")
    fields = ("tenant", "api_key", "model", "period", "tokens", "amount", "alert_percent")

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        """What a budget is for stays; what it allows may change."""
        return ("tenant", "api_key", "model", "period") if obj else ()

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        """How all of the page's budgets stand is read at once."""
        found = super().get_changelist_instance(request)
        found.result_list = list(found.result_list)
        for state in states_of(found.result_list):
            setattr(state.budget, SEEN, state)
        return found

    @admin.display(description="spent in this period")
    def spent(self, budget: Budget) -> str:
        """Tokens and money."""
        state: BudgetState = getattr(budget, SEEN)
        return f"{state.tokens:,} tokens, {amount_text(state.nanos)}"

    def save_model(self, request: HttpRequest, obj: Budget, form: Any, change: bool) -> None:
        """Through the action."""
        made = actions.set_budget(
            actor=request.user,
            tenant=obj.tenant,
            key=obj.api_key,
            model=obj.model,
            period=obj.period,
            tokens=obj.tokens,
            amount=obj.amount,
            alert_percent=obj.alert_percent,
        )
        obj.pk = made.pk

    def delete_model(self, request: HttpRequest, obj: Budget) -> None:
        """Through the action."""
        actions.delete_budget(actor=request.user, budget=obj)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Budget]) -> None:
        """One by one."""
        self.each(request, queryset, lambda row: self.delete_model(request, row), "budgets lifted")
