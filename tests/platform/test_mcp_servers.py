"""MCP servers: tools of a real one, and what a hostile one can't do."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from catalog import mcp_client, mcp_servers
from catalog.mcp_client import McpServerError, call_tool, list_tools
from catalog.models import McpServer
from common.errors import NotFound, PermissionDenied
from common.outbound_http import OutboundRequestBlocked
from engine.contract.errors import InvalidRequest
from tenants.actors import SYSTEM_ACTOR
from tenants.models import AuditEntry, Tenant, User
from tests.fakes.mcp_server import (
    answering,
    changed_tools,
    endless,
    redirecting,
    serving,
    weather_tools,
)

Tools = dict[str, dict[str, Any]]
LONG = "weather__long_text"


@pytest.fixture(scope="module")
def calls() -> list[str]:
    return []


@pytest.fixture(scope="module")
def url(calls: list[str]) -> Iterator[str]:
    with serving(weather_tools(calls)) as address:
        yield address


@pytest.fixture
def loopback(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' servers are on this machine, which is no public address and may be busy."""
    monkeypatch.setattr(mcp_client, "LIST_TIMEOUT_S", 120.0)
    settings.QUIRE = settings.QUIRE.replace(egress_networks=("127.0.0.1/32",))


async def tools_of(url: str) -> Tools:
    return {tool["function"]: tool for tool in await list_tools(url, "", "weather")}


@pytest.mark.usefixtures("loopback")
async def test_tools_are_listed_and_called(url: str, calls: list[str]) -> None:
    tools = await tools_of(url)
    assert sorted(tools) == ["weather__fails", "weather__forecast", "weather__hangs", LONG]
    forecast = tools["weather__forecast"]
    assert forecast["description"] == "The weather of a city."
    assert forecast["parameters"]["required"] == ["city"]
    result = await call_tool(url, "", forecast, '{"city": "Porto"}')
    assert (result.text, result.is_error, calls[-1]) == ("Rain in Porto", False, "Porto")


@pytest.mark.usefixtures("loopback")
async def test_what_goes_wrong_is_a_result_that_the_model_reads(url: str) -> None:
    tools = await tools_of(url)
    for function, arguments, text in (
        ("weather__fails", "{}", "Error executing tool fails"),
        ("weather__forecast", '{"town": 1}', "city"),
        ("weather__forecast", "{", "not JSON"),
        ("weather__forecast", "[]", "JSON object"),
    ):
        result = await call_tool(url, "", tools[function], arguments)
        assert result.is_error
        assert text in result.text
    refused = await call_tool("http://127.0.0.1:1/mcp", "", tools["weather__forecast"], "{}")
    assert refused.is_error


@pytest.mark.usefixtures("loopback")
async def test_results_calls_and_tools_have_limits(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = await tools_of(url)
    monkeypatch.setattr(mcp_client, "MAX_RESULT_CHARS", 1000)
    result = await call_tool(url, "", tools[LONG], '{"length": 1001}')
    assert result.text == "x" * 1000 + "\n[Cut off: the result has 1001 characters.]"
    monkeypatch.setattr(mcp_client, "CALL_TIMEOUT_S", 0.5)
    hanging = await call_tool(url, "", tools["weather__hangs"], "{}")
    assert (hanging.text, hanging.is_error) == ("127.0.0.1 didn't answer within 0.5 s.", True)
    monkeypatch.setattr(mcp_client, "MAX_TOOLS", 3)
    with pytest.raises(McpServerError, match="more than 3 tools"):
        await tools_of(url)
    monkeypatch.setattr(mcp_client, "MAX_TOOLS", 4)
    monkeypatch.setattr(mcp_client, "MAX_DEFINITION_CHARS", 10)
    with pytest.raises(McpServerError, match="the limit is 10"):
        await tools_of(url)


@pytest.mark.usefixtures("loopback")
async def test_an_answer_without_an_end_is_cut_off() -> None:
    expected = pytest.raises(McpServerError, match="more than 4194304 bytes")
    with serving(endless) as address, expected:
        await tools_of(address)


@pytest.mark.usefixtures("loopback")
async def test_a_redirect_to_another_address_is_not_followed() -> None:
    with serving(redirecting) as address, pytest.raises(McpServerError, match="not followed"):
        await tools_of(address)


def tool_listing(**fields: Any) -> str:
    tool = {"name": "x", "inputSchema": {"type": "object"}, **fields}
    return f'"result": {json.dumps({"tools": [tool]})}'


@pytest.mark.usefixtures("loopback", "db")
@pytest.mark.parametrize(
    ("listing", "text"),
    [
        (
            tool_listing(inputSchema={"type": "object", "default": float("nan")}),
            "numbers that JSON",
        ),
        (
            tool_listing(inputSchema={"type": "object", "default": float("inf")}),
            "numbers that JSON",
        ),
        (tool_listing(description="a\0b"), "NUL"),
        (tool_listing(name="a\x1b[2J"), "printable"),
        ('"error": {"code": 1, "message": "a\\u0000b\\u001b"}', "use: a b $"),
    ],
    ids=("nan", "infinity", "nul", "escapes", "nul in an error"),
)
def test_what_cannot_be_stored_or_shown_is_refused(listing: str, text: str) -> None:
    with serving(answering(listing)) as address:
        server = mcp_servers.set_mcp_server(actor=SYSTEM_ACTOR, name="x", url=address)
        with pytest.raises(McpServerError, match=text):
            mcp_servers.check_mcp_server(actor=SYSTEM_ACTOR, server=server)
    server.refresh_from_db()
    assert re.search(text, server.error)


@pytest.mark.usefixtures("loopback")
async def test_results_are_not_matched_with_patterns_of_the_server() -> None:
    """With a longer text this one would keep the loop busy for years."""
    pattern = {"properties": {"text": {"type": "string", "pattern": "^(a|a)*$"}}}
    listing = tool_listing(outputSchema={"type": "object", **pattern})
    returned = {"content": [{"type": "text", "text": "Hi"}], "structuredContent": {"text": "aab"}}
    with serving(answering(listing, f'"result": {json.dumps(returned)}')) as address:
        (tool,) = await list_tools(address, "", "x")
        result = await call_tool(address, "", tool, "{}")
    assert (result.text, result.is_error) == ("Hi", False)


async def test_a_private_address_is_not_asked(url: str) -> None:
    with pytest.raises(OutboundRequestBlocked):
        await tools_of(url)


@pytest.mark.usefixtures("loopback")
async def test_a_name_is_looked_up_anew_for_each_request(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that means a public address first, and the machine itself later."""
    asked = []
    resolve = mcp_client.resolve

    def rebound(host: str, port: int) -> Any:
        asked.append(host)
        return resolve(host if len(asked) < 3 else "127.0.0.2", port)

    monkeypatch.setattr(mcp_client, "resolve", rebound)
    with pytest.raises(OutboundRequestBlocked):
        await tools_of(url)


@pytest.mark.usefixtures("loopback")
async def test_a_tool_that_changed_does_not_run(url: str) -> None:
    tools = await tools_of(url)
    with serving(changed_tools()) as address:
        changed = await call_tool(address, "", tools["weather__forecast"], '{"city": "Porto"}')
        gone = await call_tool(address, "", tools[LONG], '{"length": 1}')
    assert changed.is_error
    assert "has changed the tool forecast" in changed.text
    assert gone.is_error
    assert "no longer has the tool long.text" in gone.text


@pytest.mark.usefixtures("loopback")
async def test_a_call_can_be_stopped(url: str, calls: list[str]) -> None:
    tools = await tools_of(url)
    calls.clear()
    task = asyncio.create_task(call_tool(url, "", tools["weather__hangs"], "{}"))
    while "hangs" not in calls:
        await asyncio.sleep(0.01)
        assert not task.done(), task.result()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_names_that_are_alike_are_told_apart() -> None:
    names: dict[str, Any] = {}
    for name in ("a.b", "a_b", "a/b", "y" * 100, "y" * 101):
        names[mcp_client._function_name("s", name, names)] = name
    assert list(names)[:3] == ["s__a_b", "s__a_b_2", "s__a_b_3"]
    assert len(names) == 5
    assert max(map(len, names)) == 64


@pytest.fixture
def acme(db: None) -> Tenant:
    return Tenant.objects.create(slug="acme", name="Acme")


@pytest.mark.usefixtures("loopback")
def test_a_server_is_added_checked_shared_and_deleted(url: str, acme: Tenant) -> None:
    other = Tenant.objects.create(slug="other", name="Other")
    server = mcp_servers.set_mcp_server(
        actor=SYSTEM_ACTOR, name="weather", url=url, authorization="Bearer s3cret", tenants=[acme]
    )
    assert mcp_servers.offered_tools(acme.pk, ["weather"]) == []  # nobody has looked at them yet
    server = mcp_servers.check_mcp_server(actor=SYSTEM_ACTOR, server=server)
    offered = mcp_servers.offered_tools(acme.pk, ["weather"])
    assert offered[0]["function"]["name"] == "weather__forecast"
    assert mcp_servers.find_tool(acme.pk, "weather__forecast")[0] == server
    for refused in (
        lambda: mcp_servers.offered_tools(other.pk, ["weather"]),
        lambda: mcp_servers.find_tool(other.pk, "weather__forecast"),
        lambda: mcp_servers.find_tool(acme.pk, "weather__nothing"),
    ):
        with pytest.raises(NotFound):
            refused()
    mcp_servers.set_mcp_server(actor=SYSTEM_ACTOR, name="weather", public=True)
    assert mcp_servers.offered_tools(other.pk, ["weather"]) == offered
    server = mcp_servers.set_mcp_server(actor=SYSTEM_ACTOR, name="weather", url=url)
    assert server.authorization == "Bearer s3cret"
    server = mcp_servers.set_mcp_server(actor=SYSTEM_ACTOR, name="weather", url=f"{url}/")
    assert server.authorization == ""  # it isn't this server's
    assert mcp_servers.offered_tools(acme.pk, ["weather"]) == []  # another address, other tools
    server = mcp_servers.set_mcp_server(
        actor=SYSTEM_ACTOR, name="weather", url=url, authorization="Bearer s3cret"
    )
    assert server.authorization == "Bearer s3cret"
    mcp_servers.delete_mcp_server(actor=SYSTEM_ACTOR, server=server)
    audit = AuditEntry.objects.filter(action__startswith="mcp_server.")
    assert "s3cret" not in json.dumps([entry.details for entry in audit])
    assert audit.count() == 7


@pytest.mark.usefixtures("loopback")
def test_a_failed_check_says_why_and_keeps_the_tools(acme: Tenant) -> None:
    address = "http://127.0.0.1:1/mcp"
    server = mcp_servers.set_mcp_server(actor=SYSTEM_ACTOR, name="gone", url=address, public=True)
    McpServer.objects.update(tools=[{"function": "gone__x"}])
    with pytest.raises(McpServerError):
        mcp_servers.check_mcp_server(actor=SYSTEM_ACTOR, server=server)
    server.refresh_from_db()
    assert server.error.startswith("127.0.0.1")
    assert server.tools == [{"function": "gone__x"}]


def test_bad_fields_and_other_people_are_refused(acme: Tenant) -> None:
    def refused(name: str, **fields: Any) -> str | None:
        with pytest.raises(InvalidRequest) as error:
            mcp_servers.set_mcp_server(actor=SYSTEM_ACTOR, name=name, **fields)
        return error.value.param

    public = "https://tools.example.com/mcp"
    assert refused("x") == "url"
    assert refused("x", url="ftp://tools.example.com/") == "url"
    assert refused("x", url="http://169.254.169.254/mcp") == "url"
    assert refused("x__y", url=public) == "name"
    assert refused("x", url=public, authorization="a\r\nb") == "authorization"
    user = User.objects.create(username="mo")
    with pytest.raises(PermissionDenied):
        mcp_servers.set_mcp_server(actor=user, name="x", url=public)
