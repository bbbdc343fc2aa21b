"""The audit log page and its CSV and JSON exports, for a tenant's admins and operators."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

from django import forms
from django.core.paginator import Paginator
from django.db.models import Q, QuerySet
from django.http.response import HttpResponseBase
from django.shortcuts import render

from common.db import iterate_by_key
from common.files import download
from console.views.base import current_tenant, page_view, tenant_context
from engine.contract.errors import QuireError
from tenants.access import access_all_audit, access_audit
from tenants.actors import to_actor
from tenants.audit import COLUMNS, as_record
from tenants.models import AuditEntry
from tenants.sessions import UserRequest

PAGE = 50
#: Prefixes that a spreadsheet would evaluate as a formula.
FORMULA = ("=", "+", "-", "@", "\t", "\r")


class FilterForm(forms.Form):
    """Filters of the log."""

    q = forms.CharField(
        required=False,
        max_length=100,
        label="Who or what",
        widget=forms.TextInput(attrs={"class": "input", "autocomplete": "off"}),
    )
    first = forms.DateField(
        required=False,
        label="From",
        widget=forms.DateInput(attrs={"class": "input", "type": "date"}),
    )
    last = forms.DateField(
        required=False,
        label="To",
        widget=forms.DateInput(attrs={"class": "input", "type": "date"}),
    )

    def filter_queryset(self, rows: QuerySet[AuditEntry]) -> QuerySet[AuditEntry]:
        """Return the matching rows, or all rows if the form is invalid."""
        if not self.is_valid():
            return rows
        data = self.cleaned_data
        if text := data["q"]:
            fields = ("actor_label", "action", "target_label", "address")
            rows = rows.filter(Q(*((f"{f}__icontains", text) for f in fields), _connector=Q.OR))
        if data["first"]:
            rows = rows.filter(at__date__gte=data["first"])
        if data["last"]:
            rows = rows.filter(at__date__lte=data["last"])
        return rows


@page_view
def audit(request: UserRequest) -> HttpResponseBase:
    """Show the log of one of the user's tenants, or of all with `?all=yes`; `?format=csv|json`."""
    user = request.user
    form = FilterForm(request.GET)
    operator = to_actor(user).is_operator
    all_tenants = request.GET.get("all") == "yes"
    tenant = None
    try:
        if all_tenants:
            rows = access_all_audit(user)
        else:
            tenant = current_tenant(request)
            rows = AuditEntry.objects.none() if tenant is None else access_audit(user, tenant)
    except QuireError as error:
        context = {**tenant_context(user, None), "form": form, "error": error}
        return render(request, "console/audit.html", context, status=error.status)
    rows = form.filter_queryset(rows)
    export_format = request.GET.get("format")
    if export_format in WRITERS:
        name = "installation" if tenant is None else tenant.slug
        media = {"csv": "text/csv; charset=utf-8", "json": "application/json"}[export_format]
        return download(
            request, WRITERS[export_format](rows), f"audit-{name}.{export_format}", media
        )
    page = Paginator(rows, PAGE).get_page(request.GET.get("page"))
    query = {k: v for k, v in request.GET.items() if k not in ("page", "format") and v}
    context = {
        **tenant_context(user, tenant),
        "form": form,
        "page": page,
        "operator": operator,
        "whole": all_tenants,
        "query": urlencode(query),
    }
    return render(request, "console/audit.html", context)


def _csv(rows: QuerySet[AuditEntry]) -> Iterator[str]:
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(COLUMNS)
    for entry in iterate_by_key(rows, newest_first=True):
        record = as_record(entry)
        writer.writerow([_cell(record[column]) for column in COLUMNS])
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()
    yield buffer.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    return f"'{text}" if text.startswith(FORMULA) else text


def _json(rows: QuerySet[AuditEntry]) -> Iterator[str]:
    yield "["
    for number, entry in enumerate(iterate_by_key(rows, newest_first=True)):
        yield ("" if number == 0 else ",") + "\n" + json.dumps(as_record(entry))
    yield "\n]\n"


WRITERS = {"csv": _csv, "json": _json}
