"""`GET /v1/organization/usage/completions`, `.../embeddings` and `/v1/organization/costs`."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, ClassVar, Literal

from django.conf import settings
from django.http import HttpResponse, QueryDict
from django.http.response import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter
from pydantic import Field
from rest_framework.renderers import JSONRenderer

from engine.contract.errors import InvalidRequest
from inference.loop.offload import in_report_thread
from inference.schemas.objects import ApiObject
from inference.web.endpoint_schema import Endpoint, EndpointSchema
from inference.web.responses import EventStreamRenderer
from inference.web.views import LIST_COST, GatewayRequest, GatewayView, json_response
from metering.access import (
    WIDTHS,
    UsageQuery,
    UsageTotals,
    access_report_tenants,
    first_page,
    report,
)
from tenants.authentication import Caller

#: Number of buckets on a page by width: without `limit`, and the maximum.
PAGES = {"1m": (60, 1440), "1h": (24, 168), "1d": (7, 31)}
COST_PAGE = (7, 180)
#: 9999-12-31, the last day that dates can represent.
LAST_SECOND = 253_402_214_400


@dataclass(frozen=True)
class UsageReportRequest:
    """The query, the columns to show, and where the next page begins (None after the last)."""

    question: UsageQuery
    buckets: list[datetime]
    next_page: str | None
    as_csv: bool

    @property
    def width(self) -> timedelta:
        return WIDTHS[self.question.width]


def parse_report_request(
    query: QueryDict,
    caller: Caller,
    *,
    groups: Sequence[str],
    widths: Sequence[str],
    pages: dict[str, tuple[int, int]],
    pooling: bool | None,
) -> UsageReportRequest:
    """Parse and validate the query. May block to look up the tenants that it names.

    Raises: `InvalidRequest` with the parameter's name; `NotFound` for another caller's tenant.
    """
    width = _choice(query, "bucket_width", widths, default="1d")
    step = WIDTHS[width]
    default, max_buckets = pages[width]
    limit = _integer(query, "limit", default, 1, max_buckets)
    if query.get("start_time") is None:
        raise InvalidRequest("start_time is required: seconds since 1970.", param="start_time")
    first = _bucket_start(_integer(query, "start_time", 0, 0, LAST_SECOND), step)
    if query.get("page") is not None:
        first = _bucket_start(_page(str(query["page"])), step)
    now = int(datetime.now(UTC).timestamp())
    end = _integer(query, "end_time", min(LAST_SECOND, now + 1), 0, LAST_SECOND)
    seconds = int(step.total_seconds())
    num_buckets = max(0, -(-(end - first) // seconds))
    count = min(limit, num_buckets)
    last = first + count * seconds
    as_csv = _choice(query, "format", ("json", "csv"), default="json") == "csv"
    named = _list(query, "project_ids")
    question = UsageQuery(
        start=_moment(first),
        end=_moment(min(last, end) if count else first),
        width=width,
        group_by=_groups(query, groups),
        tenants=access_report_tenants(caller, named),
        users=[_user(text) for text in _list(query, "user_ids")],
        keys=_list(query, "api_key_ids"),
        models=_list(query, "models"),
        pooling=pooling,
    )
    page = first_page(question)
    if page.end < question.end:
        last = int(page.end.timestamp())
        count = (last - first) // seconds
    buckets = [_moment(first + number * seconds) for number in range(count)]
    return UsageReportRequest(
        page, buckets, f"page_{last}" if num_buckets > count else None, as_csv
    )


def _list(query: QueryDict, name: str) -> list[str]:
    """`name=a&name=b`, `name[]=a` or `name=a,b`: clients use all of these."""
    texts = [*query.getlist(name), *query.getlist(f"{name}[]")]
    values = [value for text in texts for value in text.split(",") if value]
    if len(values) > 100:
        raise InvalidRequest(f"{name} takes at most 100 values.", param=name)
    if any("\0" in value for value in values):
        raise InvalidRequest(f"{name} must hold no NUL.", param=name)
    return values


def _groups(query: QueryDict, allowed: Sequence[str]) -> list[str]:
    groups = list(dict.fromkeys(_list(query, "group_by")))
    for name in groups:
        if name not in allowed:
            raise InvalidRequest(
                f"group_by must be of {', '.join(allowed)}; got {name[:50]!r}.", param="group_by"
            )
    return groups


def _user(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InvalidRequest(f"user_ids must be numbers, got {text[:50]!r}.", param="user_ids")
    return int(text)


def _choice(query: QueryDict, name: str, allowed: Sequence[str], *, default: str) -> str:
    value = query.get(name, default)
    if value not in allowed:
        raise InvalidRequest(
            f"{name} must be one of {', '.join(allowed)}; got {value[:50]!r}.", param=name
        )
    return value


def _integer(query: QueryDict, name: str, default: int, low: int, high: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 19 and low <= int(text) <= high):
        raise InvalidRequest(
            f"{name} must be a whole number in [{low}, {high}], got {text[:50]!r}.", param=name
        )
    return int(text)


def _page(text: str) -> int:
    number = text.removeprefix("page_")
    if not (number.isascii() and number.isdigit() and len(number) < 13):
        raise InvalidRequest("page must be a next_page of an earlier answer.", param="page")
    return min(int(number), LAST_SECOND)


def _bucket_start(seconds: int, step: timedelta) -> int:
    """The start of the bucket, in UTC."""
    return seconds - seconds % int(step.total_seconds())


def _moment(seconds: int) -> datetime:
    return datetime.fromtimestamp(min(seconds, LAST_SECOND), UTC)


NANOS = 10**9


class CsvRenderer(EventStreamRenderer):
    """Comma-separated values, for spreadsheets."""

    media_type = "text/csv"
    format = "csv"


class Bucket(ApiObject):
    """Usage within a time span, one result per group."""

    object: Literal["bucket"]
    start_time: int
    end_time: int
    results: list[dict[str, Any]] = Field(description="Usage of each group within the bucket.")


class Report(ApiObject):
    """A page of buckets, the oldest first."""

    object: Literal["page"]
    data: list[Bucket] = Field(description="Buckets of this page, oldest first.")
    has_more: bool
    next_page: str | None


def report_schema(summary: str, widths: Sequence[str], groups: Sequence[str]) -> EndpointSchema:
    """A report over buckets of time."""
    repeated: dict[str, Any] = {"many": True, "style": "form", "explode": True}
    filters = ("project_ids", "user_ids", "api_key_ids", "models")
    endpoint = Endpoint(
        summary,
        Report,
        parameters=(
            OpenApiParameter("start_time", int, required=True, description="Unix time."),
            OpenApiParameter("end_time", int, description="Unix seconds, exclusive."),
            OpenApiParameter("bucket_width", str, enum=list(widths), default="1d"),
            OpenApiParameter("group_by", str, enum=list(groups), **repeated),
            *(OpenApiParameter(name, str, **repeated) for name in filters),
            OpenApiParameter("limit", int, description="Buckets on a page."),
            OpenApiParameter("page", str, description="`next_page` of the last answer."),
            OpenApiParameter("format", str, enum=["json", "csv"], default="json"),
        ),
        media_types={"text/csv": OpenApiTypes.STR},
    )
    return EndpointSchema("Organization", get=endpoint)


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
        """A page of buckets, as JSON, or as CSV with `format=csv`."""
        return await in_report_thread(request.caller, self._report, request.GET, request.caller)

    def _report(self, query: QueryDict, caller: Caller) -> HttpResponseBase:
        report_request = parse_report_request(
            query,
            caller,
            groups=self.groups,
            widths=self.widths,
            pages=self.pages,
            pooling=self.pooling,
        )
        rows = report(report_request.question)
        if report_request.as_csv:
            return self._csv(report_request, rows)
        buckets: dict[datetime, list[UsageTotals]] = defaultdict(list)
        for sums in rows:
            buckets[sums.start].append(sums)
        data = [
            {
                "object": "bucket",
                "start_time": int(start.timestamp()),
                "end_time": int((start + report_request.width).timestamp()),
                "results": [self.result(sums) for sums in buckets[start]],
            }
            for start in report_request.buckets
        ]
        page = {
            "object": "page",
            "data": data,
            "has_more": report_request.next_page is not None,
            "next_page": report_request.next_page,
        }
        return json_response(page)

    def result(self, sums: UsageTotals) -> dict[str, Any]:
        """A bucket's group as JSON."""
        raise NotImplementedError

    def columns(self, sums: UsageTotals) -> dict[str, Any]:
        """Values of a CSV row, without the group."""
        raise NotImplementedError

    def _csv(
        self, report_request: UsageReportRequest, rows: Sequence[UsageTotals]
    ) -> HttpResponseBase:
        head = ["start_time", "end_time", *report_request.question.group_by]
        head += list(self.columns(UsageTotals(report_request.question.start)))
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(head)
        for sums in rows:
            times = [sums.start.isoformat(), (sums.start + report_request.width).isoformat()]
            writer.writerow([*times, *sums.group.values(), *self.columns(sums).values()])
        response = HttpResponse(text.getvalue(), content_type="text/csv; charset=utf-8")
        response["Content-Disposition"] = 'attachment; filename="usage.csv"'
        if report_request.next_page is not None:
            response["x-next-page"] = report_request.next_page
        return response


class CompletionsUsageView(ReportView):
    schema = report_schema(
        "Sum up the usage of generating endpoints", ReportView.widths, ReportView.groups
    )
    pooling = False

    def result(self, sums: UsageTotals) -> dict[str, Any]:
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

    def columns(self, sums: UsageTotals) -> dict[str, Any]:
        """Tokens, requests and their cost."""
        return {
            "input_tokens": sums.prompt_tokens,
            "input_cached_tokens": sums.cached_tokens,
            "output_tokens": sums.completion_tokens,
            "num_model_requests": sums.requests,
            "cost": decimal_text(sums.cost_nanos),
        }


class EmbeddingsUsageView(ReportView):
    schema = report_schema(
        "Sum up the usage of pooling endpoints", ReportView.widths, ReportView.groups
    )
    pooling = True

    def result(self, sums: UsageTotals) -> dict[str, Any]:
        """OpenAI's `organization.usage.embeddings.result`."""
        return {
            "object": "organization.usage.embeddings.result",
            "input_tokens": sums.prompt_tokens,
            "num_model_requests": sums.requests,
            **{name: sums.group.get(name) for name in self.groups},
        }

    def columns(self, sums: UsageTotals) -> dict[str, Any]:
        """Tokens, requests and their cost."""
        return {
            "input_tokens": sums.prompt_tokens,
            "num_model_requests": sums.requests,
            "cost": decimal_text(sums.cost_nanos),
        }


class CostsView(ReportView):
    groups = ("project_id", "user_id", "line_item", "api_key_id", "adapter")
    widths = ("1d",)
    schema = report_schema("Sum up costs", widths, groups)
    pages: ClassVar[dict[str, tuple[int, int]]] = {"1d": COST_PAGE}

    def result(self, sums: UsageTotals) -> dict[str, Any]:
        """OpenAI's `organization.costs.result`."""
        return {
            "object": "organization.costs.result",
            "amount": {"value": sums.cost_nanos / NANOS, "currency": settings.QUIRE.currency},
            **{name: sums.group.get(name) for name in self.groups},
        }

    def columns(self, sums: UsageTotals) -> dict[str, Any]:
        """The exact amount."""
        return {"amount": decimal_text(sums.cost_nanos), "currency": settings.QUIRE.currency}


def decimal_text(nanos: int) -> str:
    """1e-9 of the currency as a decimal with all its digits: "0.000150000"."""
    return f"{Decimal(nanos) / NANOS:.9f}"
