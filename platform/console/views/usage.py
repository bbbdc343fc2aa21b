"""The page of usage and cost by person, key, model or adapter, with a CSV export."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from django import forms
from django.conf import settings
from django.http import QueryDict
from django.http.response import HttpResponseBase
from django.shortcuts import render

from common.files import download
from console.views.audit import FORMULA
from console.views.base import current_tenant, end_of, page_view, start_of, tenant_context
from console.views.usage_chart import usage_chart
from engine.contract.errors import QuireError
from metering.access import UsageQuery, UsageTotals, first_page, report
from metering.money import MS_A_MINUTE, amount_text
from tenants.access import access_role
from tenants.actors import require_operator, to_actor
from tenants.models import ApiKey, Tenant, User
from tenants.sessions import UserRequest

#: Columns to group by -> label in the form.
GROUPS = {
    "model": "model",
    "adapter": "adapter",
    "user_id": "person",
    "api_key_id": "key",
    "project_id": "tenant",
}
#: Column whose rows link to one group's usage -> the link's condition, and its grouping.
DRILL_DOWN = {
    "model": ("model", "api_key_id"),
    "api_key_id": ("key", "model"),
    "user_id": ("user", "model"),
}
#: Fields set by the table's links.
CONDITIONS = ("model", "key", "user")
DAYS = 30
MAX_RANGE = timedelta(days=366)
#: Maximum number of rows on the page; the export isn't limited.
MAX_ROWS = 500


class UsageForm(forms.Form):
    """Range of days (UTC) and the grouping."""

    first = forms.DateField(
        label="From", widget=forms.DateInput(attrs={"class": "input", "type": "date"})
    )
    last = forms.DateField(
        label="To", widget=forms.DateInput(attrs={"class": "input", "type": "date"})
    )
    by = forms.MultipleChoiceField(label="By", required=False, widget=forms.CheckboxSelectMultiple)
    # Set by the table's links.
    model = forms.CharField(required=False, max_length=200, widget=forms.HiddenInput)
    key = forms.CharField(required=False, max_length=16, widget=forms.HiddenInput)
    user = forms.IntegerField(required=False, min_value=1, widget=forms.HiddenInput)

    def __init__(self, *args: Any, all_tenants: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        field: Any = self.fields["by"]
        field.choices = [pair for pair in GROUPS.items() if all_tenants or pair[0] != "project_id"]

    def clean(self) -> dict[str, Any]:
        """Check that the range is in order and at most a year long."""
        data = super().clean() or {}
        first, last = data.get("first"), data.get("last")
        if first and last and not timedelta(0) <= last - first <= MAX_RANGE:
            raise forms.ValidationError("Choose at most a year, the first day before the last.")
        return data


@dataclass
class Row:
    """Total usage of one group over the range. `query`: of the page about this group, or ""."""

    names: tuple[str, ...]
    sums: UsageTotals
    query: str = ""

    @property
    def cost(self) -> str:
        """The exact cost."""
        return amount_text(self.sums.cost_nanos)

    @property
    def audio_minutes(self) -> float:
        """Minutes of audio that contain speech."""
        return self.sums.audio_ms / MS_A_MINUTE


@page_view
def usage(request: UserRequest) -> HttpResponseBase:
    """Usage of one of the user's tenants, or with `?all=yes` of all; `?format=csv` exports it."""
    user = request.user
    all_tenants = request.GET.get("all") == "yes"
    today = datetime.now(UTC).date()
    initial = {"first": today - timedelta(days=DAYS - 1), "last": today, "by": ["model"]}
    is_filtered = not {"first", "last", "by"}.isdisjoint(request.GET)
    form = UsageForm(request.GET if is_filtered else initial, all_tenants=all_tenants)
    tenant: Tenant | None = None
    context: dict[str, Any] = {"form": form, "whole": all_tenants}
    try:
        if all_tenants:
            require_operator(user)
        else:
            tenant = current_tenant(request)
            if tenant is not None:
                access_role(user, tenant)
    except QuireError as error:
        context |= {**tenant_context(user, None), "error": error}
        return render(request, "console/usage.html", context, status=error.status)
    table: dict[str, Any] = {}
    scope: list[tuple[str, Any]] = [("all", "yes") if all_tenants else ("tenant", tenant or "")]
    if form.is_valid() and (all_tenants or tenant):
        groups, query = form.cleaned_data["by"], _usage_query(form, tenant)
        if request.GET.get("format") == "csv":
            name = f"usage-{'installation' if all_tenants else tenant}.csv"
            return download(request, _csv_lines(query, groups), name, "text/csv; charset=utf-8")
        link_query = request.GET.copy()
        for name in ("first", "last"):
            link_query.setdefault(name, form.cleaned_data[name].isoformat())
        table = _table_context(query, groups, link_query) | _chart_context(query, groups)
        table["chips"] = _chips(form, link_query, has_usage=bool(table["rows"]))
        scope += [(name, value) for name in CONDITIONS if (value := form.cleaned_data[name])]
    parameters = [
        (name, value)
        for name, values in request.GET.lists()
        for value in values
        if name != "format"
    ]
    context |= {
        **tenant_context(user, tenant),
        **table,
        "most": MAX_ROWS,
        "currency": settings.QUIRE.currency.upper(),
        "operator": to_actor(user).is_operator,
        "query": urlencode(parameters),
        "groups": request.GET.getlist("by") if is_filtered else initial["by"],
        "scope": urlencode(scope),
        "rest": urlencode(_next_page_query(form, scope, table["until"]))
        if table.get("until")
        else "",
    }
    return render(request, "console/usage.html", context)


def _usage_query(form: UsageForm, tenant: Tenant | None) -> UsageQuery:
    data = form.cleaned_data
    return UsageQuery(
        start=start_of(data["first"]),
        end=end_of(data["last"]),
        width="1d",
        group_by=data["by"],
        tenants=None if tenant is None else [tenant.pk],
        models=[data["model"]] if data["model"] else (),
        keys=[data["key"]] if data["key"] else (),
        users=[data["user"]] if data["user"] else (),
    )


def _table_context(
    query: UsageQuery, groups: Sequence[str], parameters: QueryDict
) -> dict[str, Any]:
    """Template context of the table: one page of days, the most expensive groups first."""
    page = first_page(query, total=True)
    totals = report(page, total=True)
    largest = sorted(totals, key=_sort_key)[:MAX_ROWS]
    names = _group_names(largest, groups)
    return {
        "rows": [
            Row(_names(sums, groups, names), sums, _drill_down(sums, groups, parameters))
            for sums in largest
        ],
        "more": len(totals) > MAX_ROWS,
        "total": _total(totals),
        "columns": [GROUPS[name] for name in groups],
        # The first day that isn't in the table.
        "until": page.end.date() if page.end < query.end else None,
    }


def _next_page_query(
    form: UsageForm, scope: Sequence[tuple[str, Any]], first: date
) -> list[tuple[str, Any]]:
    """Query string of the page for the remaining days."""
    data = form.cleaned_data
    return [
        *scope,
        ("first", first),
        ("last", data["last"]),
        *(("by", name) for name in data["by"]),
    ]


def _chart_context(query: UsageQuery, groups: Sequence[str]) -> dict[str, Any]:
    """Template context of the chart: one column per day, stacked by the first grouping."""
    page = first_page(replace(query, group_by=groups[:1]))
    totals = report(page)
    names = _group_names(totals, groups[:1])
    labels = [", ".join(_names(sums, groups[:1], names)) or "all" for sums in totals]
    last = (page.end - timedelta(microseconds=1)).date()
    return {"chart": usage_chart(totals, labels, page.start.date(), last)}


def _drill_down(sums: UsageTotals, groups: Sequence[str], parameters: QueryDict) -> str:
    """Query string of the page about a row's first group only, or ""."""
    first = groups[0] if groups else ""
    if first not in DRILL_DOWN or not sums.group[first]:
        return ""
    condition, following = DRILL_DOWN[first]
    query = parameters.copy()
    query[condition] = sums.group[first] or ""
    query["by"] = following
    return query.urlencode()


def _chips(form: UsageForm, parameters: QueryDict, *, has_usage: bool) -> list[dict[str, str]]:
    """Active conditions, each with the query that removes it."""
    data, chips = form.cleaned_data, []
    names = {name: data[name] for name in CONDITIONS}
    if has_usage:  # otherwise the id may be another tenant's, whose names must stay hidden
        names["key"] = _key_names([data["key"]]).get(data["key"], data["key"])
        names["user"] = _user_names([data["user"]]).get(str(data["user"]), data["user"])
    for condition, name in names.items():
        if data[condition]:
            query = parameters.copy()
            del query[condition]
            chips.append({"label": f"{condition.capitalize()}: {name}", "query": query.urlencode()})
    return chips


def _group_names(totals: Sequence[UsageTotals], groups: Sequence[str]) -> dict[str, dict[str, str]]:
    """Names of people and keys by id, for groupings that contain ids."""
    names: dict[str, dict[str, str]] = {}
    for group, look_up in (("user_id", _user_names), ("api_key_id", _key_names)):
        if group in groups:
            names[group] = look_up({sums.group[group] for sums in totals})
    return names


def _user_names(ids: Collection[Any]) -> dict[str, str]:
    rows = User.objects.filter(pk__in=[int(pk) for pk in ids if pk])
    return {str(pk): name for pk, name in rows.values_list("pk", "username")}


def _key_names(ids: Collection[str | None]) -> dict[str, str]:
    rows = ApiKey.objects.filter(public_id__in=[key for key in ids if key]).exclude(name="")
    return {key: f"{name} ({key})" for key, name in rows.values_list("public_id", "name")}


def _names(
    sums: UsageTotals, groups: Sequence[str], names: dict[str, dict[str, str]]
) -> tuple[str, ...]:
    values = ((group, sums.group[group] or "") for group in groups)
    return tuple(names.get(group, {}).get(value, value) or "–" for group, value in values)


def _sort_key(sums: UsageTotals) -> tuple[Any, ...]:
    """Sort key: highest cost first, then most tokens."""
    tokens = sums.prompt_tokens + sums.completion_tokens
    return -sums.cost_nanos, -tokens, [value or "" for value in sums.group.values()]


def _total(totals: Sequence[UsageTotals]) -> Row | None:
    if not totals:
        return None
    total = Row((), UsageTotals(totals[0].start))
    for sums in totals:
        total.sums.add(sums.amounts)
    return total


def _csv_lines(query: UsageQuery, groups: Sequence[str]) -> Iterator[str]:
    """Yield CSV lines, one per day and group, reading a few days at a time."""
    tokens = ("input_tokens", "cached_tokens", "output_tokens")
    amounts = ("requests", *tokens, "images", "audio_seconds", "cost", "currency")
    yield _csv_line(["day", *(GROUPS[name] for name in groups), *amounts])
    while query.start < query.end:
        page = first_page(query)
        totals = report(page)
        names = _group_names(totals, groups)
        yield "".join(_csv_line(_cells(sums, groups, names)) for sums in totals)
        query = replace(query, start=page.end)


def _cells(
    sums: UsageTotals, groups: Sequence[str], group_names: dict[str, dict[str, str]]
) -> list[object]:
    *counts, audio_ms, nanos = sums.amounts
    names = [
        f"'{name}" if name.startswith(FORMULA) else name
        for name in _names(sums, groups, group_names)
    ]
    money = (amount_text(nanos), settings.QUIRE.currency)
    return [sums.start.date().isoformat(), *names, *counts, audio_ms / 1000, *money]


def _csv_line(cells: Sequence[object]) -> str:
    text = io.StringIO()
    csv.writer(text).writerow(cells)
    return text.getvalue()
