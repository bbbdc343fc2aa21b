"""The page of usage and costs: by person, key, model or adapter, with a file for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from django import forms
from django.conf import settings
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from common.files import download
from console.views.audit import FORMULA
from console.views.base import current_tenant, end_of, start_of, tenant_context
from engine.contract.errors import QuireError
from metering.access import UsageQuery, UsageTotals, first_page, report
from metering.money import amount_text
from tenants.access import access_role
from tenants.actors import require_operator, to_actor
from tenants.models import Tenant, User

#: What may be grouped by, as the form calls it.
GROUPS = {
    "model": "model",
    "adapter": "adapter",
    "user_id": "person",
    "api_key_id": "key",
    "project_id": "tenant",
}
DAYS = 30
MAX_RANGE = timedelta(days=366)
#: Rows that the page shows; the file has all.
MAX_ROWS = 500


class UsageForm(forms.Form):
    """Which days (UTC), and in which groups."""

    first = forms.DateField(
        label="From", widget=forms.DateInput(attrs={"class": "input", "type": "date"})
    )
    last = forms.DateField(
        label="To", widget=forms.DateInput(attrs={"class": "input", "type": "date"})
    )
    by = forms.MultipleChoiceField(label="By", required=False, widget=forms.CheckboxSelectMultiple)

    def __init__(self, *args: Any, all_tenants: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        field: Any = self.fields["by"]
        field.choices = [pair for pair in GROUPS.items() if all_tenants or pair[0] != "project_id"]

    def clean(self) -> dict[str, Any]:
        """At most a year, the first day before the last."""
        data = super().clean() or {}
        first, last = data.get("first"), data.get("last")
        if first and last and not timedelta(0) <= last - first <= MAX_RANGE:
            raise forms.ValidationError("Choose at most a year, the first day before the last.")
        return data


@dataclass
class Row:
    """What one group used in all of the days that are shown."""

    names: tuple[str, ...]
    sums: UsageTotals

    @property
    def cost(self) -> str:
        """With all its digits."""
        return amount_text(self.sums.cost_nanos)


@require_safe
@never_cache
@login_required
def usage(request: HttpRequest) -> HttpResponseBase:
    """Of one of the user's tenants, or with `?all=yes` the installation's; `?format=csv`."""
    user: Any = request.user
    whole = request.GET.get("all") == "yes"
    today = datetime.now(UTC).date()
    start = {"first": today - timedelta(days=DAYS - 1), "last": today, "by": ["model"]}
    given = "first" in request.GET or "last" in request.GET or "by" in request.GET
    form = UsageForm(request.GET if given else start, all_tenants=whole)
    tenant: Tenant | None = None
    context: dict[str, Any] = {"form": form, "whole": whole}
    try:
        if whole:
            require_operator(to_actor(user))
        else:
            tenant = current_tenant(request)
            if tenant is not None:
                access_role(user, tenant)
    except QuireError as error:
        context |= {**tenant_context(user, None), "error": error}
        return render(request, "console/usage.html", context, status=error.status)
    shown: dict[str, Any] = {}
    if form.is_valid() and (whole or tenant):
        groups, question = form.cleaned_data["by"], _usage_query(form, tenant)
        if request.GET.get("format") == "csv":
            name = f"usage-{'installation' if whole else tenant}.csv"
            return download(request, _lines(question, groups), name, "text/csv; charset=utf-8")
        shown = _table_context(question, groups)
    kept = [
        (name, value)
        for name, values in request.GET.lists()
        for value in values
        if name != "format"
    ]
    context |= {
        **tenant_context(user, tenant),
        **shown,
        "most": MAX_ROWS,
        "currency": settings.QUIRE["CURRENCY"].upper(),
        "operator": to_actor(user).is_operator,
        "query": urlencode(kept),
        "rest": urlencode(_next_page_url(form, whole, tenant, shown["until"]))
        if shown.get("until")
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
    )


def _table_context(question: UsageQuery, groups: Sequence[str]) -> dict[str, Any]:
    """The table: as many days as are read at once, the groups that cost most first."""
    page = first_page(question, whole=True)
    found = report(page, whole=True)
    largest = sorted(found, key=_sort_key)[:MAX_ROWS]
    people = _people(largest) if "user_id" in groups else {}
    return {
        "rows": [Row(_names(sums, groups, people), sums) for sums in largest],
        "more": len(found) > MAX_ROWS,
        "total": _total(found),
        "columns": [GROUPS[name] for name in groups],
        # The first day that isn't in it.
        "until": page.end.date() if page.end < question.end else None,
    }


def _next_page_url(
    form: UsageForm, all_tenants: bool, tenant: Tenant | None, first: date
) -> list[tuple[str, Any]]:
    """The address of the same page for the days that this one leaves out."""
    of = ("all", "yes") if all_tenants else ("tenant", tenant)
    data = form.cleaned_data
    return [of, ("first", first), ("last", data["last"]), *(("by", name) for name in data["by"])]


def _people(found: Sequence[UsageTotals]) -> dict[str, str]:
    ids = {sums.group["user_id"] for sums in found}
    rows = User.objects.filter(pk__in=[int(pk) for pk in ids if pk])
    return {str(pk): name for pk, name in rows.values_list("pk", "username")}


def _names(sums: UsageTotals, groups: Sequence[str], people: dict[str, str]) -> tuple[str, ...]:
    return tuple(
        people.get(sums.group[name] or "", sums.group[name] or "") or "–"
        if name == "user_id"
        else sums.group[name] or "–"
        for name in groups
    )


def _sort_key(sums: UsageTotals) -> tuple[Any, ...]:
    """Most money first, then most tokens."""
    tokens = sums.prompt_tokens + sums.completion_tokens
    return -sums.cost_nanos, -tokens, [value or "" for value in sums.group.values()]


def _total(found: Sequence[UsageTotals]) -> Row | None:
    if not found:
        return None
    total = Row((), UsageTotals(found[0].start))
    for sums in found:
        total.sums.add(_amounts(sums))
    return total


def _amounts(sums: UsageTotals) -> tuple[int, ...]:
    tokens = (sums.prompt_tokens, sums.cached_tokens, sums.completion_tokens)
    return sums.requests, *tokens, sums.cost_nanos


def _lines(question: UsageQuery, groups: Sequence[str]) -> Iterator[str]:
    """A line a day and group, read a few days at a time."""
    amounts = ("requests", "input_tokens", "cached_tokens", "output_tokens", "cost", "currency")
    yield _csv_line(["day", *(GROUPS[name] for name in groups), *amounts])
    while question.start < question.end:
        page = first_page(question)
        found = report(page)
        people = _people(found) if "user_id" in groups else {}
        yield "".join(_csv_line(_cells(sums, groups, people)) for sums in found)
        question = replace(question, start=page.end)


def _cells(sums: UsageTotals, groups: Sequence[str], people: dict[str, str]) -> list[object]:
    *counts, nanos = _amounts(sums)
    names = [
        f"'{name}" if name.startswith(FORMULA) else name for name in _names(sums, groups, people)
    ]
    money = (amount_text(nanos), settings.QUIRE["CURRENCY"])
    return [sums.start.date().isoformat(), *names, *counts, *money]


def _csv_line(cells: Sequence[object]) -> str:
    text = io.StringIO()
    csv.writer(text).writerow(cells)
    return text.getvalue()
