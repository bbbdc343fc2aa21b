"""MCP servers by page, by REST and by command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command

from catalog.models import McpServer
from tests.console.conftest import Login
from tests.fakes.mcp_server import answering, serving, weather_tools

PAGE = "/console/mcp-servers/"
API = "/api/mcp-servers/"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(weather_tools([])) as address:
        yield address


@pytest.fixture(autouse=True)
def loopback(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("catalog.mcp_client.LIST_TIMEOUT_S", 120.0)  # a busy machine
    settings.QUIRE = settings.QUIRE.replace(egress_networks=("127.0.0.1/32",))


def test_an_operator_adds_tests_changes_and_removes_a_server(login: Login, url: str) -> None:
    root = login("root")
    assert "No MCP server yet." in root.get(PAGE).content.decode()
    fields = {"name": "weather", "url": url, "authorization": "Bearer s3cret", "tenants": ["acme"]}
    page = root.post(f"{PAGE}set/", fields, follow=True).content.decode()
    assert "weather answers. Tools that may run: 4." in page
    assert "The weather of a city." in page
    assert "s3cret" not in page
    (server,) = McpServer.objects.all()
    assert [tenant.slug for tenant in server.tenants.all()] == ["acme"]
    form = root.get(f"{PAGE}?name=weather").content.decode()
    assert "Change weather" in form
    assert '<option value="acme" selected>' in form
    McpServer.objects.update(tools=[])
    page = root.post(f"{PAGE}weather/test/", follow=True).content.decode()
    assert "Tools that may run: 4." in page
    changed = root.post(f"{PAGE}set/", {"name": "weather", "url": url, "public": "on"})
    assert changed.status_code == 302
    server.refresh_from_db()
    assert (server.public, server.authorization) == (True, "Bearer s3cret")
    root.post(f"{PAGE}set/", {"name": "weather", "url": url, "forget": "on"})
    server.refresh_from_db()
    assert server.authorization == ""
    root.post(f"{PAGE}weather/delete/")
    assert not McpServer.objects.exists()


def test_a_server_that_does_not_answer_is_kept_with_what_it_said(login: Login) -> None:
    fields = {"name": "gone", "url": "http://127.0.0.1:1/mcp"}
    page = login("root").post(f"{PAGE}set/", fields)
    assert page.status_code == 502
    assert page.content.decode().count("127.0.0.1 answers nothing of use") == 2
    private = login("root").post(f"{PAGE}set/", {**fields, "url": "http://10.0.0.1/mcp"})
    assert (private.status_code, private.context["error"].param) == (400, "url")


@pytest.mark.usefixtures("committed")
def test_the_playground_lists_the_servers_of_a_tenant(login: Login, url: str) -> None:
    root = login("root")
    root.post(f"{PAGE}set/", {"name": "weather", "url": url, "tenants": ["acme"]})
    (listed,) = login("ada").get("/console/api/models").json()["mcp_servers"]
    assert listed["name"] == "weather"
    assert "weather__forecast" in listed["tools"]
    assert login("olga").get("/console/api/models").json()["mcp_servers"] == []


def test_the_same_by_the_api(login: Login, url: str) -> None:
    root, json = login("root"), "application/json"
    body = {"url": url, "authorization": "Bearer s3cret", "tenants": ["acme"]}
    added = root.put(f"{API}weather/", body, content_type=json)
    assert (added.status_code, added.json()["tools"], added.json()["tenants"]) == (
        200,
        [],
        ["acme"],
    )
    assert "s3cret" not in added.content.decode()
    tested = root.post(f"{API}weather/test/").json()
    assert tested["tools"][0]["name"] == "forecast"
    assert root.put(f"{API}weather/", {"public": True}, content_type=json).json()["url"] == url
    assert [row["name"] for row in root.get(API).json()["results"]] == ["weather"]
    invalid_response = root.put(f"{API}other/", {"uri": url}, content_type=json)
    assert (invalid_response.status_code, invalid_response.json()["error"]["param"]) == (400, "uri")
    for name in ("ada", "nobody"):
        client = login(name)
        assert client.get(API).status_code == 403
        assert client.put(f"{API}x/", body, content_type=json).status_code == 403
        assert client.post(f"{API}weather/test/").status_code == 403
        assert client.delete(f"{API}weather/").status_code == 403
    assert root.delete(f"{API}weather/").status_code == 204


def run(*args: str) -> str:
    out = StringIO()
    call_command(*args, stdout=out)
    return out.getvalue()


@pytest.mark.usefixtures("rows")
def test_a_servers_words_do_not_steer_the_terminal() -> None:
    tool = {"name": "x", "description": "One\n\x1b]0;two\x07", "inputSchema": {"type": "object"}}
    with serving(answering(f'"result": {json.dumps({"tools": [tool]})}')) as address:
        run("set_mcp_server", "hostile", "--url", address)
        assert run("check_mcp_server", "hostile").splitlines()[1] == "x     One ]0;two"


@pytest.mark.usefixtures("rows")
def test_the_same_by_commands(url: str) -> None:
    printed = run("set_mcp_server", "weather", "--url", url, "--tenant", "acme")
    assert "weather is set. Tools: forecast" in printed
    assert "acme" in run("list_mcp_servers")
    assert "The weather of a city." in run("check_mcp_server", "weather")
    assert "all" in run("set_mcp_server", "weather", "--public") + run("list_mcp_servers")
    assert "deleted" in run("delete_mcp_server", "weather")
    assert not McpServer.objects.exists()
