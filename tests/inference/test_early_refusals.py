"""From the first refusal on, the next ones cost next to nothing, and are just as right."""

from __future__ import annotations

from typing import Any

import pytest

from common.db import run_in_db_thread
from inference.edge import load_shedding as early
from inference.edge.handler import http_application
from inference.engine_client.queue_limit import Load
from inference.metrics.recorder import recorder
from inference.web.views import GatewayView
from metering import request_log_writer as writer
from metering.models import RequestEntry
from metering.request_log_writer import MAX_LOGGED_PER_WINDOW
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tests.inference.asgi_client import AsgiClient, Reply, chat_body
from tests.inference.conftest import Gateway

PATHS = {
    "/v1/chat/completions": chat_body(),
    "/v1/completions": {"model": "fake", "prompt": "hello"},
    "/v1/messages": {**chat_body(), "max_tokens": 5},
}


@pytest.fixture
def seen_by_views(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of requests that a view was given."""
    seen: list[str] = []
    dispatch = GatewayView.dispatch

    async def noting(view: GatewayView, request: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(request.path_info)
        return await dispatch(view, request, *args, **kwargs)

    monkeypatch.setattr(GatewayView, "dispatch", noting)
    return seen


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says how many wait, at a hundred a second."""

    def waiting(count: int) -> None:
        of = classmethod(lambda cls, replicas: Load(1, count, 100.0))
        monkeypatch.setattr(Load, "of", of)

    waiting(5000)
    return waiting


def without_times(reply: Reply) -> dict[str, str]:
    """Headers that are the same of each refusal."""
    times = {"openai-processing-ms", "retry-after-ms"}
    return {name: value for name, value in reply.headers.items() if name not in times}


@pytest.mark.parametrize("path", PATHS)
async def test_the_second_refusal_meets_no_view_and_says_what_the_first_said(
    served: Gateway, full: Any, seen_by_views: list[str], path: str
) -> None:
    headers = {"x-request-id": "mine"}
    first = await served.client.post(path, PATHS[path], headers=headers)
    second = await served.client.post(path, PATHS[path], headers=headers)
    assert seen_by_views == [path]
    assert first.status == second.status == 503
    assert first.body == second.body
    assert without_times(first) == without_times(second)
    assert second.headers.keys() == first.headers.keys()
    # One after the other, at half of the replicas' rate.
    assert (
        0 < float(second.headers["retry-after-ms"]) - float(first.headers["retry-after-ms"]) <= 21
    )


async def test_once_there_is_room_again_the_next_one_is_answered(
    served: Gateway, full: Any, seen_by_views: list[str]
) -> None:
    assert (await served.client.chat()).status == 503
    full(0)
    assert (await served.client.chat()).status == 200
    assert len(seen_by_views) == 2


async def test_nothing_is_looked_at_early_while_nothing_was_refused(
    served: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early, "_decode", None)
    assert (await served.client.chat()).status == 200


@pytest.mark.parametrize(
    ("headers", "fields", "status"),
    [
        ({"authorization": "Bearer wrong"}, {}, 401),
        ({}, {"model": "nothing"}, 404),
        ({}, {"model": 7}, 400),
        ({}, {"service_tier": "flex"}, 503),
        ({}, {"priority": 1}, 503),
        ({"accept": "image/png"}, {}, 406),
        ({"content-type": "text/plain"}, {}, 415),
        ({"content-encoding": "gzip"}, {}, 415),
        ({"x-request-timeout": "-1"}, {}, 400),
        ({"idempotency-key": "once"}, {}, 503),
        ({"origin": "https://example.org"}, {}, 503),
    ],
)
async def test_what_is_wrong_otherwise_or_not_certain_goes_to_its_view(
    served: Gateway,
    full: Any,
    seen_by_views: list[str],
    headers: dict[str, str],
    fields: dict[str, Any],
    status: int,
) -> None:
    assert (await served.client.chat()).status == 503
    body = chat_body() | fields
    reply = await served.client.post("/v1/chat/completions", body, headers=headers)
    assert reply.status == status
    assert len(seen_by_views) == 2


async def test_a_key_that_may_not_ask_is_told_so(
    served: Gateway, full: Any, seen_by_views: list[str]
) -> None:
    def keys() -> list[str]:
        tenant = served.rows.tenant
        make = actions.create_key
        return [
            make(actor=SYSTEM_ACTOR, tenant=tenant, name="a", endpoints=["/v1/completions"]).secret,
            make(actor=SYSTEM_ACTOR, tenant=tenant, name="b", addresses=["10.0.0.0/8"]).secret,
        ]

    for secret in await run_in_db_thread(keys):
        other = AsgiClient(served.client.app, secret)
        for _ in range(2):
            assert (await served.client.chat()).status == 503
            assert (await other.chat()).status == 403


@pytest.mark.usefixtures("no_record_waits")
async def test_every_early_refusal_is_counted_and_few_have_a_row(
    served: Gateway, full: Any, seen_by_views: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[tuple[str, str, int]] = []
    monkeypatch.setattr(
        recorder,
        "http",
        lambda *, handler, method, status, **_: counted.append((handler, method, status)),
    )
    app = AsgiClient(http_application(never), served.rows.secret)
    for _ in range(40):
        assert (await app.chat(stream=True)).status == 503
    assert len(seen_by_views) < 10
    assert counted == [("/v1/chat/completions", "POST", 503)] * 40
    await run_in_db_thread(writer.write_waiting, at_once=True)
    rows = await run_in_db_thread(lambda: list(RequestEntry.objects.all()))
    assert len(rows) == MAX_LOGGED_PER_WINDOW + 1
    assert sum(row.times for row in rows) == 40
    assert {(row.model, row.code, row.stream) for row in rows} == {("fake", "overloaded", True)}


@pytest.mark.usefixtures("no_record_waits")
async def test_a_large_body_that_is_not_read_has_a_row_too(
    served: Gateway, full: Any, seen_by_views: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    app = AsgiClient(http_application(never), served.rows.secret)
    with caplog.at_level("INFO", "quire.access"):
        replies = [await app.complete("x" * (1 << 18)) for _ in range(MAX_LOGGED_PER_WINDOW + 5)]
    assert {(reply.status, reply.error["code"]) for reply in replies} == {(503, "overloaded")}
    assert not seen_by_views
    await run_in_db_thread(writer.write_waiting, at_once=True)
    rows = await run_in_db_thread(lambda: list(RequestEntry.objects.order_by("pk")))
    assert (len(rows), sum(row.times for row in rows)) == (
        MAX_LOGGED_PER_WINDOW + 1,
        MAX_LOGGED_PER_WINDOW + 5,
    )
    assert {(row.endpoint, row.code, row.status) for row in rows} == {
        ("completions", "overloaded", 503)
    }
    assert rows[0].header_id == replies[0].headers["x-request-id"]
    logged = caplog.records[-1].access  # type: ignore[attr-defined]
    assert (logged["tenant"], logged["error"]) == (served.rows.tenant.slug, "overloaded")


async def never(*_: Any) -> None:
    raise AssertionError("this isn't of the API")
