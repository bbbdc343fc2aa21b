"""The access line: one a request, for collectors, and never a prompt."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import httpx
import httpx2
import pytest

from config.logging import build_formatter, logging_settings
from inference.edge.handler import http_application
from tests.inference.asgi_client import AsgiClient
from tests.inference.conftest import Gateway, until


@pytest.fixture
def client(served: Gateway) -> AsgiClient:
    return AsgiClient(http_application(served.client.app), served.client.key)


def line(caplog: pytest.LogCaptureFixture) -> dict[str, object]:
    """The only one, as collectors get it."""
    (record,) = [record for record in caplog.records if record.name == "quire.access"]
    return json.loads(build_formatter("json").format(record))


async def test_a_request_leaves_one_line_with_the_clients_id(
    client: AsgiClient, served: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "quire.access")
    reply = await client.post(
        "/v1/completions?secret=of-a-query",
        {"model": "fake", "prompt": "the secret words", "max_tokens": 4},
        headers={"X-Request-Id": "mine-7"},
    )
    assert reply.status == 200
    record = line(caplog)
    assert record["method"] == "POST"
    assert record["path"] == "/v1/completions"
    assert record["status"] == 200
    assert record["bytes"] == len(reply.body)
    assert record["client_request_id"] == record["request_id"] == "mine-7"
    assert record["tenant"] == served.rows.tenant.slug
    assert "secret" not in caplog.text
    assert served.client.key not in caplog.text


async def test_a_request_without_an_id_of_its_own_has_ours(
    client: AsgiClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "quire.access")
    reply = await client.chat(max_tokens=4)
    record = line(caplog)
    assert record["client_request_id"] == ""
    assert record["request_id"] == reply.headers["x-request-id"]


async def test_a_client_that_left_is_told_as_such(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "quire.access")
    replica = gateway.fake(token_delay=0.01)
    async with gateway.serving(replica):
        client = AsgiClient(http_application(gateway.client.app), gateway.client.key)
        body = {"model": "fake", "prompt": "x", "max_tokens": 400, "stream": True}
        exchange = client.open("POST", "/v1/completions", body)
        while replica.steps < 3:
            await gateway.refresh()
        await exchange.leave()
        await until(lambda: caplog.records)
    assert line(caplog)["status"] == 499


async def test_nobody_forges_a_line_or_a_field(
    client: AsgiClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "quire.access")
    await client.get("/v1/models/a\nINFO forged", headers={"X-Request-Id": "two\nlines"})
    assert line(caplog)["client_request_id"] == ""
    (record,) = caplog.records
    assert "\n" not in build_formatter("line").format(record)


async def test_probes_leave_no_line(client: AsgiClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire.access")
    await client.get("/ping")
    assert not caplog.records


def test_access_lines_are_written_as_json_alone() -> None:
    for style, level in (("json", "INFO"), ("line", "WARNING"), ("debug", "WARNING")):
        assert logging_settings("INFO", style)["loggers"]["quire.access"]["level"] == level


def test_clients_do_not_log_the_addresses_that_they_ask() -> None:
    loggers = logging_settings("INFO", "json")["loggers"]
    for client in (httpx._client, httpx2._client):
        assert loggers[client.logger.name]["level"] == "WARNING"


async def test_each_line_about_a_request_names_it_its_tenant_and_its_model(
    gateway: Gateway,
    written: Callable[[], list[dict[str, Any]]],
    settings: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings.QUIRE = settings.QUIRE.replace(failover_wait_s=0.3)
    caplog.set_level(logging.INFO, "quire.access")
    async with gateway.serving(gateway.fake()):
        pass
    await gateway.refresh()
    client = AsgiClient(http_application(gateway.client.app), gateway.client.key)
    first, second = await asyncio.gather(client.chat(), client.chat(model="nobody"))
    assert (first.status, second.status) == (503, 404)
    tenant = gateway.rows.tenant.slug
    for reply, model in ((first, "fake"), (second, "nobody")):
        about = [e for e in written() if e.get("request_id") == reply.headers["x-request-id"]]
        assert {(entry["tenant"], entry["model"]) for entry in about} == {(tenant, model)}
        assert "quire.access" in {entry["logger"] for entry in about}
    assert any("failed" in entry["message"] for entry in written())
