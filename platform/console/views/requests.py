"""The pages of recent requests and of a single request."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django import forms
from django.contrib.auth.decorators import login_required
from django.core.paginator import Page, Paginator
from django.db.models import QuerySet
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from accounts.reauthentication import reauthentication_required
from common.messaging import ALL_TENANTS
from common.one_time import pop_one_time
from console.views.base import current_tenant, end_of, post_action, start_of, tenant_context
from console.views.timeline import is_pooled, timeline_chart, timeline_events
from engine.contract.errors import QuireError
from metering.models import RequestEntry
from metering.money import amount_text
from metering.request_log import (
    access_request_entry,
    access_requests,
    called,
    of_status,
    request_detail_json,
)
from tenants import actions
from tenants.access import access_role
from tenants.actors import to_actor
from tenants.models import Role, Tenant
from tenants.sessions import UserRequest

PAGE = 50
#: Days that the list covers without a search.
DAYS = 30
STATUSES = (
    ("", "any"),
    ("2xx", "answered"),
    ("refused", "refused"),
    ("4xx", "4xx"),
    ("5xx", "5xx"),
    ("429", "429"),
    ("499", "client disconnected"),
)


def _text(label: str, length: int) -> forms.CharField:
    widget = forms.TextInput(attrs={"class": "input", "autocomplete": "off"})
    return forms.CharField(required=False, max_length=length, label=label, widget=widget)


def _day(label: str) -> forms.DateField:
    widget = forms.DateInput(attrs={"class": "input", "type": "date"})
    return forms.DateField(required=False, label=label, widget=widget)


class SearchForm(forms.Form):
    """Filters of the list."""

    id = _text("Any id", 200)
    model = _text("Model", 200)
    key = _text("API key", 80)
    user = _text("Person", 150)
    status = forms.ChoiceField(
        choices=STATUSES,
        required=False,
        label="Status",
        widget=forms.Select(attrs={"class": "input"}),
    )
    first = _day("From")
    last = _day("To")

    def filter_queryset(self, rows: QuerySet[RequestEntry]) -> QuerySet[RequestEntry]:
        """The matching rows; none if the form is invalid."""
        if not self.is_valid():
            return rows.none()
        data = self.cleaned_data
        if data["id"]:
            rows = rows.filter(called(data["id"]))
        if data["model"]:
            rows = rows.filter(model=data["model"])
        if data["key"]:
            rows = rows.filter(api_key__name__icontains=data["key"])
        if data["user"]:
            rows = rows.filter(user__username=data["user"])
        if data["first"]:
            rows = rows.filter(started_at__gte=start_of(data["first"]))
        if data["last"]:
            rows = rows.filter(started_at__lt=end_of(data["last"]))
        return of_status(rows, data["status"]) if data["status"] else rows


@require_safe
@never_cache
@login_required
def requests(request: UserRequest) -> HttpResponse:
    """Requests of one of the user's tenants, or with `?all=yes` all that the user may see."""
    return show(request, None)


def show(
    request: UserRequest,
    tenant: Tenant | None,
    *,
    error: QuireError | None = None,
) -> HttpResponse:
    """Render the list with the last outcome or error."""
    user = request.user
    form, rows = SearchForm(request.GET), RequestEntry.objects.none()
    all_tenants = request.GET.get("all") == "yes"
    context: dict[str, Any] = {"form": form, "whole": all_tenants}
    try:
        if all_tenants:
            rows = access_requests(user)
        else:
            tenant = tenant or current_tenant(request)
            if tenant is not None:
                rows = access_requests(user, tenant)
                context["owns"] = access_role(user, tenant) == Role.OWNER
                outcome = pop_one_time(request) if request.method == "GET" else {}
                context["told"] = outcome if outcome.get("tenant") == tenant.slug else {}
    except QuireError as refusal:
        tenant, error = None, refusal
    page = Paginator(form.filter_queryset(rows), PAGE).get_page(request.GET.get("page"))
    entries = list(page)
    if form.data.get("id") and len(entries) == 1 and request.method == "GET":
        return redirect("request", name=entries[0].request_id)
    query = {k: v for k, v in request.GET.items() if k != "page" and v}
    searched = not query.keys() <= {"tenant", "all"}
    context |= {
        **tenant_context(user, tenant),
        "page": page,
        "operator": to_actor(user).is_operator,
        "searched": searched,
        "query": urlencode(query),
        # The topic knows of any new request, not whether it matches a search.
        "newest": None
        if searched
        else _newest_start(
            page, entries, all_tenants=all_tenants, operator=to_actor(user).is_operator
        ),
        "error": error,
    }
    return render(request, "console/requests.html", context, status=error.status if error else 200)


def _newest_start(
    page: Page, entries: list[RequestEntry], *, all_tenants: bool, operator: bool
) -> float | None:
    """Start of the newest listed request; None if the list doesn't update live."""
    if page.number > 1 or (all_tenants and not operator):
        return None
    return entries[0].started_at.timestamp() if entries else 0.0


def latest_request_at(tenant_id: int) -> dict[str, float]:
    """Unix time of a tenant's newest request: the topic `requests`."""
    rows = RequestEntry.objects.order_by("-started_at")
    if tenant_id != ALL_TENANTS:
        rows = rows.filter(tenant_id=tenant_id)
    newest = rows.values_list("started_at", flat=True).first()
    return {"newest": newest.timestamp() if newest else 0.0}


@reauthentication_required
@post_action("requests", show)
def toggle_content_logging(request: UserRequest, tenant: Tenant) -> dict[str, Any]:
    """Turn storing prompts and answers on or off."""
    store_prompts = request.POST.get("store") == "yes"
    actions.update_tenant(actor=request.user, tenant=tenant, store_prompts=store_prompts)
    text = (
        "From now on prompts and answers are kept."
        if store_prompts
        else "Prompts and answers aren't kept any more."
    )
    return {"text": text}


@require_safe
@never_cache
@login_required
def request_detail(request: UserRequest, name: str) -> HttpResponse:
    """Details of a request by any of its ids; 404 if the user may not see it."""
    user = request.user
    try:
        entry = access_request_entry(user, name)
    except QuireError as error:
        context = {**tenant_context(user, None), "error": error, "name": name[:200]}
        return render(request, "console/request.html", context, status=error.status)
    story = request_detail_json(user, entry)
    context = {
        "entry": entry,
        "story": story,
        "cost": amount_text(entry.cost_nanos).rstrip("0").rstrip("."),
        "events": timeline_events(entry, story),
        "picture": timeline_chart(entry, story),
        "pooled": is_pooled(story),
        "refused": entry.request_id.startswith("refused-"),
    }
    return render(request, "console/request.html", context)
