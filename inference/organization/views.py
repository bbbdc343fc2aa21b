"""`GET /v1/organization/usage/completions`, `.../embeddings` and `/v1/organization/costs`."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, ClassVar

import msgspec
from django.conf import settings
from django.http import HttpResponse, QueryDict
from django.http.response import HttpResponseBase
from rest_framework.renderers import JSONRenderer

from inference.organization.query import COST_PAGE, PAGES, Asked, read_query
from inference.web.negotiation import EventStreamRenderer
from inference.web.report_threads import in_report_thread
from inference.web.views import LIST_COST, GatewayRequest, GatewayView, json_response
from metering.access import Sums, report
from tenants.authentication import Caller

_encode = msgspec.json.Encoder().encode
NANOS = 10**9


class CsvRenderer(EventStreamRenderer):
    """Comma-separated values, for spreadsheets."""

    media_type = "text/csv"
    format = "csv"


class ReportView(GatewayView):
    """A report over buckets of time. A key sees its tenant; one with operator scope sees all."""

    call_cost = LIST_COST
    required_scope = "usage:read"
    renderer_classes = (JSONRenderer, CsvRenderer)
    groups: ClassVar[Sequence[str]] = ("project_id", "user_id", "api_key_id", "model", "adapter")
    widths: ClassVar[Sequence[str]] = ("1m", "1h", "1d")
    pages: ClassVar[dict[str, tuple[int, int]]] = PAGES
    pooling: ClassVar[bool | None] = None

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """A page of buckets, as JSON or by `format=csv` as text."""
        return await in_report_thread(request.caller, self._report, request.GET, request.caller)

    def _report(self, query: QueryDict, caller: Caller) -> HttpResponseBase:
        asked = read_query(
            query,
            caller,
            groups=self.groups,
            widths=self.widths,
            pages=self.pages,
            pooling=self.pooling,
        )
        found = report(asked.question)
        if asked.as_csv:
            return self._csv(asked, found)
        buckets: dict[datetime, list[Sums]] = defaultdict(list)
        for sums in found:
            buckets[sums.start].append(sums)
        data = [
            {
                "object": "bucket",
                "start_time": int(start.timestamp()),
                "end_time": int((start + asked.width).timestamp()),
                "results": [self.result(sums) for sums in buckets[start]],
            }
            for start in asked.buckets
        ]
        page = {
            "object": "page",
            "data": data,
            "has_more": asked.next_page is not None,
            "next_page": asked.next_page,
        }
        return json_response(_encode(page))

    def result(self, sums: Sums) -> dict[str, Any]:
        """A group of a bucket as JSON."""
        raise NotImplementedError

    def columns(self, sums: Sums) -> dict[str, Any]:
        """The same as a row of CSV, without the group."""
        raise NotImplementedError

    def _csv(self, asked: Asked, found: Sequence[Sums]) -> HttpResponseBase:
        head = ["start_time", "end_time", *asked.question.group_by]
        head += list(self.columns(Sums(asked.question.start)))
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(head)
        for sums in found:
            times = [sums.start.isoformat(), (sums.start + asked.width).isoformat()]
            writer.writerow([*times, *sums.group.values(), *self.columns(sums).values()])
        response = HttpResponse(text.getvalue(), content_type="text/csv; charset=utf-8")
        response["Content-Disposition"] = 'attachment; filename="usage.csv"'
        if asked.next_page is not None:
            response["x-next-page"] = asked.next_page
        return response


class CompletionsUsageView(ReportView):
    """Tokens of all endpoints that generate."""

    pooling = False

    def result(self, sums: Sums) -> dict[str, Any]:
        """OpenAI's `organization.usage.completions.result`."""
        return {
            "object": "organization.usage.completions.result",
            "input_tokens": sums.prompt_tokens,
            "input_cached_tokens": sums.cached_tokens,
            "output_tokens": sums.completion_tokens,
            "input_audio_tokens": 0,
            "output_audio_tokens": 0,
            "num_model_requests": sums.requests,
            **{name: sums.group.get(name) for name in self.groups},
            "batch": None,
            "service_tier": None,
        }

    def columns(self, sums: Sums) -> dict[str, Any]:
        """Tokens, requests and their cost."""
        return {
            "input_tokens": sums.prompt_tokens,
            "input_cached_tokens": sums.cached_tokens,
            "output_tokens": sums.completion_tokens,
            "num_model_requests": sums.requests,
            "cost": decimal_text(sums.cost_nanos),
        }


class EmbeddingsUsageView(ReportView):
    """Tokens of all endpoints that embed, score or classify."""

    pooling = True

    def result(self, sums: Sums) -> dict[str, Any]:
        """OpenAI's `organization.usage.embeddings.result`."""
        return {
            "object": "organization.usage.embeddings.result",
            "input_tokens": sums.prompt_tokens,
            "num_model_requests": sums.requests,
            **{name: sums.group.get(name) for name in self.groups},
        }

    def columns(self, sums: Sums) -> dict[str, Any]:
        """Tokens, requests and their cost."""
        return {
            "input_tokens": sums.prompt_tokens,
            "num_model_requests": sums.requests,
            "cost": decimal_text(sums.cost_nanos),
        }


class CostsView(ReportView):
    """What it cost, by day. A line item is a model."""

    groups = ("project_id", "user_id", "line_item", "api_key_id", "adapter")
    widths = ("1d",)
    pages: ClassVar[dict[str, tuple[int, int]]] = {"1d": COST_PAGE}

    def result(self, sums: Sums) -> dict[str, Any]:
        """OpenAI's `organization.costs.result`."""
        return {
            "object": "organization.costs.result",
            "amount": {"value": sums.cost_nanos / NANOS, "currency": settings.QUIRE["CURRENCY"]},
            **{name: sums.group.get(name) for name in self.groups},
        }

    def columns(self, sums: Sums) -> dict[str, Any]:
        """The amount, exact."""
        return {"amount": decimal_text(sums.cost_nanos), "currency": settings.QUIRE["CURRENCY"]}


def decimal_text(nanos: int) -> str:
    """1e-9 of the currency as a decimal with all its digits: "0.000150000"."""
    return f"{Decimal(nanos) / NANOS:.9f}"
