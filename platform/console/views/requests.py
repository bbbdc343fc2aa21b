"""The pages of requests: what came in lately, and the story of one."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django import forms
from django.contrib.auth.decorators import login_required
from django.core.paginator import Page, Paginator
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from accounts.reauthentication import reauthentication_required
from common.messaging import ALL_TENANTS
from common.one_time import pop_one_time
from console.views.base import current_tenant, deed, end_of, start_of, tenant_context
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

PAGE = 50
#: Without a search the page looks back so far.
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
    """Which requests."""

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
        """Those that fit; none while the form is wrong."""
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
def requests(request: HttpRequest) -> HttpResponse:
    """Those of one of the user's tenants, or with `?all=yes` of all that they may see."""
    return show(request, None)


def show(
    request: HttpRequest,
    tenant: Tenant | None,
    *,
    error: QuireError | None = None,
) -> HttpResponse:
    """The page, with what was just refused."""
    user: Any = request.user
    form, rows = SearchForm(request.GET), RequestEntry.objects.none()
    whole = request.GET.get("all") == "yes"
    context: dict[str, Any] = {"form": form, "whole": whole}
    try:
        if whole:
            rows = access_requests(user)
        else:
            tenant = tenant or current_tenant(request)
            if tenant is not None:
                rows = access_requests(user, tenant)
                context["owns"] = access_role(user, tenant) == Role.OWNER
                kept = pop_one_time(request) if request.method == "GET" else {}
                context["told"] = kept if kept.get("tenant") == tenant.slug else {}
    except QuireError as refusal:
        tenant, error = None, refusal
    page = Paginator(form.filter_queryset(rows), PAGE).get_page(request.GET.get("page"))
    found = list(page)
    if form.data.get("id") and len(found) == 1 and request.method == "GET":
        return redirect("request", name=found[0].request_id)
    kept = {k: v for k, v in request.GET.items() if k != "page" and v}
    context |= {
        **tenant_context(user, tenant),
        "page": page,
        "operator": to_actor(user).is_operator,
        "searched": any(v for k, v in kept.items() if k not in ("tenant", "all")),
        "query": urlencode(kept),
        "newest": _followed(page, found, whole=whole, operator=to_actor(user).is_operator),
        "error": error,
    }
    return render(request, "console/requests.html", context, status=error.status if error else 200)


def _followed(
    page: Page, found: list[RequestEntry], *, whole: bool, operator: bool
) -> float | None:
    """From when on requests are news to a list; None for one that isn't at its newest end."""
    if page.number > 1 or (whole and not operator):
        return None
    return found[0].started_at.timestamp() if found else 0.0


def latest_request_at(tenant_id: int) -> dict[str, float]:
    """When a tenant's newest request came, in seconds since 1970: the topic `requests`."""
    rows = RequestEntry.objects.order_by("-started_at")
    if tenant_id != ALL_TENANTS:
        rows = rows.filter(tenant_id=tenant_id)
    found = rows.values_list("started_at", flat=True).first()
    return {"newest": found.timestamp() if found else 0.0}


@reauthentication_required
@deed("requests", show)
def toggle_content_logging(request: HttpRequest, tenant: Tenant) -> dict[str, Any]:
    """Whether what was asked and answered is kept."""
    wanted = request.POST.get("store") == "yes"
    actions.update_tenant(actor=request.user, tenant=tenant, store_prompts=wanted)
    kept = (
        "From now on prompts and answers are kept."
        if wanted
        else "Prompts and answers aren't kept any more."
    )
    return {"text": kept}


@require_safe
@never_cache
@login_required
def request_detail(request: HttpRequest, name: str) -> HttpResponse:
    """The story of the request that goes by this id. A stranger's is 404."""
    user: Any = request.user
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
