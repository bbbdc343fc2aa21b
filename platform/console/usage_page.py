"""The page of usage and costs: by person, key, model or adapter, with a file for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Any
from urllib.parse import urlencode

from django import forms
from django.conf import settings
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from console.audit import FORMULA
from console.tenancy import named_tenant, tenant_context
from engine.contract.errors import QuireError
from metering.access import Question, Sums, report
from metering.money import amount_text
from tenants.access import access_role
from tenants.actors import as_actor, require_operator
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
LONGEST = timedelta(days=366)
#: Rows that the page shows; the file has all.
MOST = 500


class UsageForm(forms.Form):
    """Which days (UTC), and in which groups."""

    first = forms.DateField(
        label="From", widget=forms.DateInput(attrs={"class": "input", "type": "date"})
    )
    last = forms.DateField(
        label="To", widget=forms.DateInput(attrs={"class": "input", "type": "date"})
    )
    by = forms.MultipleChoiceField(label="By", required=False, widget=forms.CheckboxSelectMultiple)

    def __init__(self, *args: Any, whole: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        field: Any = self.fields["by"]
        field.choices = [pair for pair in GROUPS.items() if whole or pair[0] != "project_id"]

    def clean(self) -> dict[str, Any]:
        """At most a year, the first day before the last."""
        data = super().clean() or {}
        first, last = data.get("first"), data.get("last")
        if first and last and not timedelta(0) <= last - first <= LONGEST:
            raise forms.ValidationError("Choose a year at most, the first day before the last.")
        return data


@dataclass
class Row:
    """What one group used in all of the days."""

    names: tuple[str, ...]
    sums: Sums

    @property
    def cost(self) -> str:
        """With all its digits."""
        return amount_text(self.sums.cost_nanos)


@require_safe
@never_cache
@login_required
def usage(request: HttpRequest) -> HttpResponse:
    """Of one of the user's tenants, or with `?all=yes` the installation's; `?format=csv`."""
    user: Any = request.user
    whole = request.GET.get("all") == "yes"
    today = datetime.now(UTC).date()
    start = {"first": today - timedelta(days=DAYS - 1), "last": today, "by": ["model"]}
    given = "first" in request.GET or "last" in request.GET or "by" in request.GET
    form = UsageForm(request.GET if given else start, whole=whole)
    tenant: Tenant | None = None
    context: dict[str, Any] = {"form": form, "whole": whole}
    try:
        if whole:
            require_operator(as_actor(user))
        else:
            tenant = named_tenant(request)
            if tenant is not None:
                access_role(user, tenant)
    except QuireError as error:
        context |= {**tenant_context(user, None), "error": error}
        return render(request, "console/usage.html", context, status=error.status)
    found = _ask(form, tenant) if form.is_valid() and (whole or tenant) else []
    groups = form.cleaned_data.get("by", []) if form.is_valid() else []
    people = _people(found) if "user_id" in groups else {}
    if request.GET.get("format") == "csv" and form.is_valid():
        return _csv(found, groups, people, "installation" if whole else tenant)
    rows = _rows(found, groups, people)
    kept = [(name, value) for name, values in request.GET.lists() for value in values]
    context |= {
        **tenant_context(user, tenant),
        "rows": rows[:MOST],
        "more": len(rows) > MOST,
        "most": MOST,
        "total": _total(found),
        "columns": [GROUPS[name] for name in groups],
        "currency": settings.QUIRE["CURRENCY"].upper(),
        "operator": as_actor(user).is_operator,
        "query": urlencode([pair for pair in kept if pair[0] != "format"]),
    }
    return render(request, "console/usage.html", context)


def _ask(form: UsageForm, tenant: Tenant | None) -> list[Sums]:
    """Day by day."""
    data = form.cleaned_data
    return report(
        Question(
            start=_midnight(data["first"]),
            end=_midnight(data["last"] + timedelta(days=1)),
            width="1d",
            group_by=data["by"],
            tenants=None if tenant is None else [tenant.pk],
        )
    )


def _midnight(day: date) -> datetime:
    return datetime.combine(day, time.min, UTC)


def _people(found: Sequence[Sums]) -> dict[str, str]:
    ids = {sums.group["user_id"] for sums in found}
    rows = User.objects.filter(pk__in=[int(pk) for pk in ids if pk])
    return {str(pk): name for pk, name in rows.values_list("pk", "username")}


def _names(sums: Sums, groups: Sequence[str], people: dict[str, str]) -> tuple[str, ...]:
    return tuple(
        people.get(sums.group[name] or "", sums.group[name] or "") or "–"
        if name == "user_id"
        else sums.group[name] or "–"
        for name in groups
    )


def _rows(found: Sequence[Sums], groups: Sequence[str], people: dict[str, str]) -> list[Row]:
    """Most money first, then most tokens."""
    rows: dict[tuple[str, ...], Row] = {}
    for sums in found:
        names = _names(sums, groups, people)
        row = rows.setdefault(names, Row(names, Sums(sums.start)))
        row.sums.add(_amounts(sums))
    return sorted(
        rows.values(),
        key=lambda row: (
            -row.sums.cost_nanos,
            -row.sums.prompt_tokens - row.sums.completion_tokens,
            row.names,
        ),
    )


def _total(found: Sequence[Sums]) -> Row | None:
    if not found:
        return None
    total = Row((), Sums(found[0].start))
    for sums in found:
        total.sums.add(_amounts(sums))
    return total


def _amounts(sums: Sums) -> tuple[int, ...]:
    tokens = (sums.prompt_tokens, sums.cached_tokens, sums.completion_tokens)
    return sums.requests, *tokens, sums.cost_nanos


def _csv(
    found: Sequence[Sums], groups: Sequence[str], people: dict[str, str], of: object
) -> HttpResponse:
    """A line a day and group."""
    text = io.StringIO()
    writer = csv.writer(text)
    amounts = ("requests", "input_tokens", "cached_tokens", "output_tokens", "cost", "currency")
    writer.writerow(["day", *(GROUPS[name] for name in groups), *amounts])
    for sums in found:
        *counts, nanos = _amounts(sums)
        names = [
            f"'{name}" if name.startswith(FORMULA) else name
            for name in _names(sums, groups, people)
        ]
        money = (amount_text(nanos), settings.QUIRE["CURRENCY"])
        writer.writerow([sums.start.date().isoformat(), *names, *counts, *money])
    response = HttpResponse(text.getvalue(), content_type="text/csv; charset=utf-8")
    response["Content-Disposition"] = f'attachment; filename="usage-{of}.csv"'
    return response
