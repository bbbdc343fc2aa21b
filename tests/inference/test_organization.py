"""`/v1/organization/...`: usage and costs, for keys that may read them."""

from __future__ import annotations

import asyncio
import csv
import io
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

import pytest
from asgiref.sync import sync_to_async

from metering import reports as report_pages
from metering.ledger import insert_records
from metering.usage_record import UsageRecord
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import ApiKey, Tenant, User
from tests.inference.asgi_client import Reply
from tests.inference.conftest import Gateway

DAY = datetime(2026, 3, 1, tzinfo=UTC)
USAGE = "/v1/organization/usage/completions"
COSTS = "/v1/organization/costs"


def use(tenant: Tenant, timestamp: datetime, number: int = 0, **fields: Any) -> None:
    values: dict[str, Any] = {
        "request_id": f"{tenant.slug}-{timestamp.timestamp()}-{number}-{fields}",
        "tenant_id": tenant.pk,
        "endpoint": "chat.completions",
        "model": "fake",
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "completion_tokens": 5,
        "cost_nanos": 1_500,
        "status": 200,
        "started_at": timestamp,
        "duration_ms": 1.0,
    }
    insert_records([UsageRecord(**{**values, **fields})])


async def ask(gateway: Gateway, path: str = USAGE, secret: str = "", **query: Any) -> Reply:
    query = {"start_time": int(DAY.timestamp()), **query}
    headers = {"authorization": f"Bearer {secret}"} if secret else {}
    return await gateway.client.get(f"{path}?{urlencode(query, doseq=True)}", headers=headers)


def key(tenant: Tenant, *scopes: str, maker: User | None = None) -> tuple[ApiKey, str]:
    key = actions.create_key(actor=maker or SYSTEM_ACTOR, tenant=tenant, scopes=scopes)
    return key.key, key.secret


@pytest.mark.parametrize(("width", "hours"), [("1d", 24), ("1h", 1), ("1m", 1)])
async def test_a_page_ends_early_where_there_is_much_to_read_and_the_next_goes_on(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, width: str, hours: int
) -> None:
    monkeypatch.setattr(report_pages, "MAX_ROWS", 3)
    monkeypatch.setattr(report_pages, "MAX_REQUESTS", 3)
    monkeypatch.setattr(report_pages, "MAX_ROWS_AGGREGATED", 4)
    for step in range(3):
        day = DAY + timedelta(hours=hours * step)
        for number in range(2):
            await sync_to_async(use)(gateway.rows.tenant, day, model=f"model-{number}")
    query = {"bucket_width": width, "limit": 180 if width == "1m" else 3, "group_by": "project_id"}
    query["end_time"] = int((DAY + timedelta(hours=3 * hours)).timestamp())
    counted, pages, page = [], 0, {"has_more": True, "next_page": None}
    while page["has_more"]:
        again = {"page": page["next_page"]} if page["next_page"] else {}
        page = (await ask(gateway, **query, **again)).json()
        pages += 1
        counted += [
            (bucket["start_time"], result["num_model_requests"])
            for bucket in page["data"]
            for result in bucket["results"]
        ]
    start = int(DAY.timestamp())
    assert (pages, counted) == (3, [(start + 3600 * hours * step, 2) for step in range(3)])
    few = (await ask(gateway, **{**query, "group_by": "model"})).json()
    started_buckets = [bucket for bucket in few["data"] if bucket["results"]]
    assert len(started_buckets) == (1 if width == "1m" else 2)


async def test_buckets_by_day_hold_what_a_tenant_used(gateway: Gateway) -> None:
    tenant = gateway.rows.tenant
    for hours in (1, 2, 49):
        await sync_to_async(use)(tenant, DAY + timedelta(hours=hours))
    await sync_to_async(use)(tenant, DAY + timedelta(hours=3), endpoint="embeddings")
    page = (await ask(gateway, limit=3)).json()
    assert (page["object"], page["has_more"]) == ("page", True)
    assert [bucket["start_time"] - int(DAY.timestamp()) for bucket in page["data"]] == [
        0,
        86400,
        2 * 86400,
    ]
    first, none, third = (bucket["results"] for bucket in page["data"])
    assert none == []
    assert first == [
        {
            "object": "organization.usage.completions.result",
            "input_tokens": 20,
            "input_cached_tokens": 8,
            "output_tokens": 10,
            "input_audio_tokens": 0,
            "output_audio_tokens": 0,
            "num_model_requests": 2,
            "project_id": None,
            "user_id": None,
            "api_key_id": None,
            "model": None,
            "adapter": None,
            "batch": None,
            "service_tier": None,
        }
    ]
    assert third[0]["num_model_requests"] == 1
    following = (await ask(gateway, limit=3, page=page["next_page"])).json()
    assert following["data"][0]["start_time"] == page["data"][-1]["end_time"]
    other = (await ask(gateway, "/v1/organization/usage/embeddings", limit=1)).json()
    assert other["data"][0]["results"][0]["input_tokens"] == 10


@pytest.mark.parametrize(("width", "step"), [("1m", 60), ("1h", 3600)])
async def test_buckets_by_minute_and_hour(gateway: Gateway, width: str, step: int) -> None:
    tenant = gateway.rows.tenant
    for number in range(3):
        day = DAY + timedelta(seconds=59.5 + number * step * 2)
        await sync_to_async(use)(tenant, day, key_id=gateway.rows.key.pk)
    asked = {"bucket_width": width, "group_by": ["model", "api_key_id"], "limit": 5}
    page = (await ask(gateway, **asked)).json()
    counts = [sum(r["num_model_requests"] for r in b["results"]) for b in page["data"]]
    assert counts == [1, 0, 1, 0, 1]
    result = page["data"][0]["results"][0]
    assert (result["model"], result["api_key_id"]) == ("fake", gateway.rows.key.public_id)


async def test_groups_and_filters(gateway: Gateway) -> None:
    tenant = gateway.rows.tenant

    def prepare() -> tuple[User, ApiKey]:
        ann = User.objects.create(username="ann")
        actions.add_member(actor=SYSTEM_ACTOR, tenant=tenant, user=ann, role="member")
        mine, _ = key(tenant, "inference", maker=ann)
        use(tenant, DAY, key_id=mine.pk)
        use(tenant, DAY, user_id=ann.pk)
        use(tenant, DAY, model="other")
        return ann, mine

    ann, mine = await sync_to_async(prepare)()
    results = (await ask(gateway, limit=1, group_by="user_id")).json()["data"][0]["results"]
    assert {r["user_id"]: r["num_model_requests"] for r in results} == {None: 1, str(ann.pk): 2}
    for query, requests in (
        ({"api_key_ids": mine.public_id}, 1),
        ({"user_ids": [ann.pk]}, 2),
        ({"models[]": ["other"]}, 1),
        ({"project_ids": tenant.slug}, 3),
    ):
        (result,) = (await ask(gateway, limit=1, **query)).json()["data"][0]["results"]
        assert result["num_model_requests"] == requests, query


async def test_costs_are_decimals_with_a_currency_and_csv_is_exact(gateway: Gateway) -> None:
    for number in range(3):
        await sync_to_async(use)(gateway.rows.tenant, DAY, number, cost_nanos=100_000_001)
    page = (await ask(gateway, COSTS, limit=1, group_by="line_item")).json()
    assert page["data"][0]["results"] == [
        {
            "object": "organization.costs.result",
            "amount": {"value": 0.300000003, "currency": "usd"},
            "project_id": None,
            "user_id": None,
            "line_item": "fake",
            "api_key_id": None,
            "adapter": None,
        }
    ]
    text = await ask(gateway, COSTS, limit=1, group_by="project_id", format="csv")
    assert text.headers["content-type"].startswith("text/csv")
    (row,) = csv.DictReader(io.StringIO(text.body.decode()))
    assert (row["amount"], row["currency"]) == ("0.300000003", "usd")
    assert row["project_id"] == gateway.rows.tenant.slug
    assert row["start_time"] == "2026-03-01T00:00:00+00:00"


async def test_a_stranger_sees_nothing_and_an_operator_all(gateway: Gateway) -> None:
    tenant = gateway.rows.tenant

    def prepare() -> tuple[str, str, str]:
        rival = actions.create_tenant(actor=SYSTEM_ACTOR, name="Rival")
        use(tenant, DAY)
        use(rival, DAY, model="secret")
        operator, narrow = key(tenant, "usage:read", "operator"), key(tenant, "inference")
        return key(rival, "usage:read")[1], operator[1], narrow[1]

    rival, operator, narrow = await sync_to_async(prepare)()
    mine = (await ask(gateway, limit=1, group_by="model", secret=rival)).json()
    assert [r["model"] for r in mine["data"][0]["results"]] == ["secret"]
    for path in (USAGE, COSTS, "/v1/organization/usage/embeddings"):
        foreign = await ask(gateway, path, project_ids=tenant.slug, secret=rival)
        assert (foreign.status, foreign.error["param"]) == (404, "project_ids")
        assert (await ask(gateway, path, secret=narrow)).error["code"] == "insufficient_scope"
        assert (await ask(gateway, path, secret="sk-quire-wrong")).status == 401
    every = (await ask(gateway, limit=1, group_by="project_id", secret=operator)).json()
    assert {r["project_id"] for r in every["data"][0]["results"]} == {tenant.slug, "rival"}


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"start_time": "x"}, "start_time"),
        ({"start_time": -1}, "start_time"),
        ({"start_time": 10**30}, "start_time"),
        ({"end_time": "soon"}, "end_time"),
        ({"bucket_width": "1w"}, "bucket_width"),
        ({"limit": 32}, "limit"),
        ({"limit": 0}, "limit"),
        ({"group_by": "tenant"}, "group_by"),
        ({"user_ids": "x"}, "user_ids"),
        ({"api_key_ids": "a\0b"}, "api_key_ids"),
        ({"page": "x"}, "page"),
        ({"format": "xml"}, "format"),
        ({"models": [f"m{n}" for n in range(101)]}, "models"),
    ],
)
async def test_bad_questions_are_refused_by_name(
    gateway: Gateway, query: dict[str, Any], param: str
) -> None:
    refused = await ask(gateway, **query)
    assert (refused.status, refused.error["param"]) == (400, param)


async def test_odd_ranges_are_empty_pages(gateway: Gateway) -> None:
    for query in ({"end_time": 5}, {"start_time": 253_402_214_400}, {"page": "page_999999999999"}):
        page = (await ask(gateway, **query)).json()
        assert (page["data"], page["has_more"], page["next_page"]) == ([], False, None)


async def test_openais_own_client_reads_it(served: Gateway) -> None:
    """The types of its library take the answers as they are."""
    from openai.types.admin.organization import UsageCompletionsResponse, UsageCostsResponse

    await asyncio.gather(*[sync_to_async(use)(served.rows.tenant, DAY, n) for n in range(2)])
    usage = UsageCompletionsResponse.model_validate((await ask(served)).json())
    costs = UsageCostsResponse.model_validate((await ask(served, COSTS)).json())
    assert usage.data[0].results[0].input_tokens == 20  # type: ignore[union-attr]
    amount = costs.data[0].results[0].amount  # type: ignore[union-attr]
    assert amount is not None
    assert amount.value == pytest.approx(3e-6)
