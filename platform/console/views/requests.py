"""The pages of recent requests and of a single request."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import wraps
from typing import Any
from urllib.parse import urlencode

from django import forms
from django.conf import settings
from django.contrib.auth.decorators import login_required
from django.core.paginator import Page, Paginator
from django.db.models import F, QuerySet
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST

from accounts.reauthentication import reauthentication_required
from common.messaging import ALL_TENANTS
from common.one_time import pop_one_time
from console.views.base import (
    current_tenant,
    end_of,
    page_view,
    post_action,
    start_of,
    tenant_context,
)
from console.views.request_summary import summarize, summarize_last_hour
from console.views.timeline import is_pooled, timeline_chart, timeline_events
from engine.contract.errors import QuireError
from metering.feedback import feedback_of
from metering.models import RequestEntry
from metering.request_log import (
    access_request_entry,
    access_requests,
    called,
    of_status,
    request_detail_json,
)
from metering.saved_searches import access_searches, delete_search, save_search, search_query
from tenants import actions
from tenants.access import access_role
from tenants.actors import to_actor
from tenants.models import Role, Tenant, User
from tenants.sessions import UserRequest

PAGE = 50
#: The last second of the year 9999.
MAX_TIMESTAMP = 253_402_300_799
#: Days covered by the list without a search.
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


#: Title of a column, field to sort by ("" if it can't be sorted), and CSS class.
COLUMNS = (
    ("When", "started_at", ""),
    ("Request", "", ""),
    ("Tenant", "tenant__name", ""),
    ("Model", "model", ""),
    ("Key or person", "", ""),
    ("Status", "status", ""),
    ("First token", "ttft_ms", "end"),
    ("Duration", "duration_ms", "end"),
    ("In", "prompt_tokens", "end"),
    ("Cached", "cached_tokens", "end"),
    ("Out", "completion_tokens", "end"),
    ("Cost", "cost_nanos", "end"),
)
SORTS = {field for _, field, _ in COLUMNS if field}
DEFAULT_SORT = "-started_at"
#: Built-in views: name -> query.
VIEWS = {
    "Failed": urlencode({"status": "5xx"}),
    "Slower than 2 s": urlencode({"slower_ms": 2000, "sort": "-duration_ms"}),
    "Most expensive": urlencode({"sort": "-cost_nanos"}),
}


#: Filters behind a button, so that the table's first row stays visible.
RARE_FILTERS = ("key", "user", "first", "last")


def _text(label: str, length: int, placeholder: str = "") -> forms.CharField:
    attrs = {"class": "input", "autocomplete": "off", "placeholder": placeholder}
    widget = forms.TextInput(attrs=attrs)
    return forms.CharField(required=False, max_length=length, label=label, widget=widget)


def _day(label: str) -> forms.DateField:
    widget = forms.DateInput(attrs={"class": "input", "type": "date"})
    return forms.DateField(required=False, label=label, widget=widget)


def _milliseconds(label: str) -> forms.FloatField:
    widget = forms.TextInput(attrs={"class": "input", "inputmode": "numeric"})
    return forms.FloatField(required=False, min_value=0, label=label, widget=widget)


def _hidden_number() -> forms.FloatField:
    return forms.FloatField(
        required=False, min_value=0, max_value=MAX_TIMESTAMP, widget=forms.HiddenInput
    )


class SearchForm(forms.Form):
    """Filters for the list."""

    id = _text("Any id", 200, placeholder="req-, chatcmpl-, resp_ ...")
    model = _text("Model", 200)
    key = _text("API key", 80)
    user = _text("Person", 150)
    status = forms.ChoiceField(
        choices=STATUSES,
        required=False,
        label="Status",
        widget=forms.Select(attrs={"class": "input"}),
    )
    slower_ms = _milliseconds("Slower than (ms)")
    first = _day("From")
    last = _day("To")
    # Set by links of charts and of the histogram.
    faster_ms = _hidden_number()
    since = _hidden_number()
    until = _hidden_number()

    @property
    def usual_fields(self) -> list[forms.BoundField]:
        """Fields shown above the list."""
        return [field for field in self.visible_fields() if field.name not in RARE_FILTERS]

    @property
    def rare_fields(self) -> list[forms.BoundField]:
        """Fields behind the button "Filters"."""
        return [self[name] for name in RARE_FILTERS]

    def filter_queryset(self, rows: QuerySet[RequestEntry]) -> QuerySet[RequestEntry]:
        """Return the matching rows; none if the form is invalid."""
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
        if data["slower_ms"] is not None:
            rows = rows.filter(duration_ms__gte=data["slower_ms"])
        if data["faster_ms"] is not None:
            rows = rows.filter(duration_ms__lt=data["faster_ms"])
        if data["since"] is not None:
            rows = rows.filter(started_at__gte=datetime.fromtimestamp(data["since"], UTC))
        if data["until"] is not None:
            rows = rows.filter(started_at__lt=datetime.fromtimestamp(data["until"], UTC))
        return of_status(rows, data["status"]) if data["status"] else rows


@page_view
def requests(request: UserRequest) -> HttpResponse:
    """List requests of one of the user's tenants, or with `?all=yes` all that the user may see."""
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
                role = access_role(user, tenant)
                context |= {"owns": role == Role.OWNER, "manages": role.rank >= Role.ADMIN.rank}
                outcome = pop_one_time(request) if request.method == "GET" else {}
                context["outcome"] = outcome if outcome.get("tenant") == tenant.slug else {}
    except QuireError as refusal:
        tenant, error = None, refusal
    matches = form.filter_queryset(rows)
    sort = request.GET.get("sort", "")
    sort = sort if sort.removeprefix("-") in SORTS else DEFAULT_SORT
    page = Paginator(_sorted(matches, sort), PAGE).get_page(request.GET.get("page"))
    entries = list(page)
    if form.data.get("id") and len(entries) == 1 and request.method == "GET":
        return redirect("request", name=entries[0].request_id)
    query = {k: str(v) for k, v in request.GET.items() if k != "page" and v}
    searched = not query.keys() <= {"tenant", "all", "follow"}
    saved_query = search_query(request.GET.urlencode())
    context |= {
        **tenant_context(user, tenant),
        "page": page,
        "operator": to_actor(user).is_operator,
        "searched": searched,
        "query": urlencode(query),
        "columns": [
            _column(*column, sort=sort, query=query)
            for column in COLUMNS
            if all_tenants or column[0] != "Tenant"
        ],
        "chips": _chips(form, query),
        "views": _views(user, saved_query, query),
        "saved_query": saved_query,
        "summary": summarize(matches, request.GET),
        "last_hour": summarize_last_hour(rows),
        "failed_query": urlencode(
            {name: value for name, value in query.items() if name in ("tenant", "all")}
            | {"status": "5xx"}
        ),
        "follows": request.GET.get("follow") == "yes",
        "follow_query": urlencode(
            {k: v for k, v in query.items() if k != "follow"}
            | ({} if request.GET.get("follow") == "yes" else {"follow": "yes"})
        ),
        # The topic reports any new request, even if it doesn't match a search.
        "newest": None
        if searched
        else _newest_start(
            page, entries, all_tenants=all_tenants, operator=to_actor(user).is_operator
        ),
        "error": error,
    }
    return render(request, "console/requests.html", context, status=error.status if error else 200)


def _views(user: User, saved_query: str, query: dict[str, str]) -> list[dict[str, Any]]:
    """Built-in views, then the user's saved ones, each with the query of its list.

    `pk`: of a saved view; `current`: whether it is shown.
    """
    scope = {name: value for name, value in query.items() if name in ("tenant", "all")}
    views = [
        *((None, name, view) for name, view in VIEWS.items()),
        *access_searches(user).values_list("pk", "name", "query"),
    ]
    return [
        {
            "pk": pk,
            "name": name,
            "query": "&".join(filter(None, (urlencode(scope), view))),
            "current": view == saved_query,
        }
        for pk, name, view in views
    ]


def _sorted(rows: QuerySet[RequestEntry], sort: str) -> QuerySet[RequestEntry]:
    """Sort the rows; those without a value come last."""
    field = F(sort.removeprefix("-"))
    order = field.desc(nulls_last=True) if sort.startswith("-") else field.asc(nulls_last=True)
    return rows.order_by(order, "-pk")


def _chips(form: SearchForm, query: dict[str, str]) -> list[dict[str, str]]:
    """Active conditions, each with the query that removes it."""
    labels = {name: str(field.label or name) for name, field in form.fields.items()}
    labels |= {"since": "Since", "until": "Until", "faster_ms": "Faster than (ms)"}
    chips = []
    for name in form.fields:
        if value := query.get(name):
            if name in ("since", "until") and form.cleaned_data.get(name) is not None:
                value = f"{datetime.fromtimestamp(form.cleaned_data[name], UTC):%m-%d %H:%M:%S} UTC"
            rest = {key: text for key, text in query.items() if key != name}
            chips.append({"label": f"{labels[name]}: {value}", "query": urlencode(rest)})
    return chips


def _column(
    title: str, field: str, css_class: str, *, sort: str, query: dict[str, str]
) -> dict[str, str]:
    """A column's header: the first click sorts in descending order, the next in ascending."""
    order = {f"-{field}": "descending", field: "ascending"}.get(sort, "")
    following = field if order == "descending" else f"-{field}"
    return {
        "title": title,
        "class": css_class,
        "order": order if field else "",
        "query": urlencode({**query, "sort": following}) if field else "",
    }


def _newest_start(
    page: Page, entries: list[RequestEntry], *, all_tenants: bool, operator: bool
) -> float | None:
    """Start time of the newest listed request; None if the list doesn't update live."""
    if page.number > 1 or (all_tenants and not operator):
        return None
    return entries[0].started_at.timestamp() if entries else 0.0


def latest_request_at(tenant_id: int) -> dict[str, float]:
    """Data of the topic `requests`: Unix time of a tenant's newest request."""
    rows = RequestEntry.objects.order_by("-started_at")
    if tenant_id != ALL_TENANTS:
        rows = rows.filter(tenant_id=tenant_id)
    newest = rows.values_list("started_at", flat=True).first()
    return {"newest": newest.timestamp() if newest else 0.0}


@reauthentication_required
@post_action("requests", show)
def toggle_content_logging(request: UserRequest, tenant: Tenant) -> dict[str, Any]:
    """Turn the storage of prompts and answers on or off."""
    store_prompts = request.POST.get("store") == "yes"
    actions.update_tenant(actor=request.user, tenant=tenant, store_prompts=store_prompts)
    text = (
        "Prompts and answers of new requests are kept."
        if store_prompts
        else "Prompts and answers of new requests aren't kept."
    )
    return {"text": text}


def _view_action(function: Callable[..., str]) -> Callable[..., HttpResponse]:
    """Turn a function from a request to a list's query into a POST view that redirects to it."""

    @require_POST
    @never_cache
    @login_required
    @wraps(function)
    def view(request: UserRequest, **kwargs: Any) -> HttpResponse:
        try:
            if request.POST.get("all") == "yes":
                scope = {"all": "yes"}
            else:
                tenant = current_tenant(request)
                scope = {"tenant": tenant.slug} if tenant is not None else {}
            query = "&".join(filter(None, (urlencode(scope), function(request, **kwargs))))
            return redirect(f"{reverse('requests')}?{query}")
        except QuireError as error:
            return show(request, None, error=error)

    return view


@_view_action
def save_view(request: UserRequest) -> str:
    """Save the list's filters and order under a name, for this user only."""
    name, query = (request.POST.get(field, "") for field in ("name", "query"))
    return save_search(actor=request.user, name=name, query=query).query


@_view_action
def delete_view(request: UserRequest, pk: int) -> str:
    """Delete one of the user's saved views."""
    delete_search(actor=request.user, pk=pk)
    return ""


@page_view
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
        "feedback": feedback_of(user, entry),
        "currency": settings.QUIRE.currency.upper(),
        "events": timeline_events(entry, story),
        "picture": timeline_chart(entry, story),
        "pooled": is_pooled(story),
        "refused": entry.request_id.startswith("refused-"),
    }
    return render(request, "console/request.html", context)
