"""Tools of MCP servers in the playground's socket: offered, called, stopped, limited."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async

from catalog import mcp_servers
from catalog.models import McpServer
from engine.text.tokenizer import Tokenizer
from inference.playground_tools import MAX_ROUNDS
from tenants.actors import SYSTEM_ACTOR
from tests.fakes.mcp_server import serving, weather_tools
from tests.inference.conftest import Gateway
from tests.inference.scripted import says
from tests.inference.test_playground_socket import (
    HELLO,
    frames_until,
    generate,
    session_key,
    socket,
)

__all__ = ["session_key"]
FORECAST = "weather__forecast"


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
async def weather(
    gateway: Gateway, calls: list[str], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[McpServer]:
    """A server whose tools the tenant may call."""
    monkeypatch.setattr("catalog.mcp_client.LIST_TIMEOUT_S", 120.0)  # a busy machine
    settings.QUIRE = settings.QUIRE.replace(egress_networks=("127.0.0.1/32",))
    with serving(weather_tools(calls)) as url:

        def add() -> McpServer:
            server = mcp_servers.set_mcp_server(
                actor=SYSTEM_ACTOR, name="weather", url=url, tenants=[gateway.rows.tenant]
            )
            return mcp_servers.check_mcp_server(actor=SYSTEM_ACTOR, server=server)

        yield await sync_to_async(add)()


def call(name: str = "t1", function: str = FORECAST, arguments: Any = None) -> dict[str, Any]:
    text = json.dumps({"city": "Porto"} if arguments is None else arguments)
    return {"type": "call_tool", "id": name, "function": function, "arguments": text}


async def test_a_tool_is_offered_called_and_its_result_goes_to_the_model(
    gateway: Gateway, tokenizer: Tokenizer, session_key: str, weather: McpServer, calls: list[str]
) -> None:
    text = '<tool_call>{"name": "weather__forecast", "arguments": {"city": "Porto"}}</tool_call>'
    replica = gateway.scripted(says(tokenizer, text, "Take an umbrella."))
    replica.model.tool_call_parser = "hermes"
    async with gateway.serving(replica), socket(session_key) as page:
        await page.send_json_to(generate(mcp_servers=["weather"]))
        frames = await frames_until(page, "done", "error")
        assert frames[-1]["finish_reason"] == "tool_calls", frames
        (called,) = [frame for frame in frames if frame["type"] == "call"]
        arguments = "".join(f["text"] for f in frames if f["type"] == "arguments")
        assert called["name"] == FORECAST
        await page.send_json_to(
            {"type": "call_tool", "id": "t1", "function": FORECAST, "arguments": arguments}
        )
        (result,) = await frames_until(page, "tool_result", "error")
        assert (result["text"], result["is_error"], result["id"]) == ("Rain in Porto", False, "t1")
        function = {"name": FORECAST, "arguments": arguments}
        messages = [
            *HELLO,
            {
                "role": "assistant",
                "tool_calls": [{"id": called["call_id"], "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": called["call_id"], "content": result["text"]},
        ]
        await page.send_json_to(generate("c2", messages=messages, mcp_servers=["weather"]))
        frames = await frames_until(page, "done", "error")
        assert frames[-1]["type"] == "done", frames
    assert calls == ["Porto"]
    assert "Rain in Porto" in tokenizer.decode(replica.received[1].prompt_token_ids)
    assert "The weather of a city." in tokenizer.decode(replica.received[0].prompt_token_ids)


async def test_a_call_is_stopped_and_the_socket_goes_on(
    gateway: Gateway, tokenizer: Tokenizer, session_key: str, weather: McpServer, calls: list[str]
) -> None:
    async with gateway.serving(gateway.scripted(says(tokenizer, "x"))), socket(session_key) as page:
        await page.send_json_to(call(function="weather__hangs", arguments={}))
        await page.send_json_to({"type": "stop", "id": "t1"})
        (stopped,) = await frames_until(page, "tool_result", "error")
        assert (stopped["is_error"], stopped["stopped"]) == (True, True)
        await page.send_json_to(call("t1"))
        (result,) = await frames_until(page, "tool_result", "error")
        assert result["text"] == "Rain in Porto"


async def test_a_call_that_fails_here_ends_with_an_error(
    gateway: Gateway, tokenizer: Tokenizer, session_key: str, weather: McpServer, calls: list[str]
) -> None:
    async with gateway.serving(gateway.scripted(says(tokenizer, "x"))), socket(session_key) as page:
        deep = {**call("t1"), "arguments": "[" * 5000}
        await page.send_json_to(deep)
        (result,) = await frames_until(page, "tool_result", "error")
        assert (result["type"], result["is_error"]) == ("tool_result", True)
        await sync_to_async(McpServer.objects.update)(tools=[{"function": FORECAST}])
        await page.send_json_to(call("t2"))
        (failed,) = await frames_until(page, "tool_result", "error")
        assert (failed["type"], failed["id"]) == ("error", "t2")
    assert calls == []


async def test_another_tenants_tools_do_not_exist(
    gateway: Gateway, tokenizer: Tokenizer, session_key: str, weather: McpServer, calls: list[str]
) -> None:
    await sync_to_async(weather.tenants.clear)()
    async with gateway.serving(gateway.scripted(says(tokenizer, "x"))), socket(session_key) as page:
        await page.send_json_to(call())
        (refused,) = await frames_until(page, "tool_result", "error")
        assert (refused["error"]["param"], calls) == ("function", [])
        await page.send_json_to(generate(mcp_servers=["weather"]))
        (refused,) = await frames_until(page, "done", "error")
        assert refused["error"]["param"] == "mcp_servers"


async def test_rounds_and_fields_have_limits(
    gateway: Gateway, tokenizer: Tokenizer, session_key: str, weather: McpServer
) -> None:
    function = {"name": FORECAST, "arguments": "{}"}
    asked = {"role": "assistant", "tool_calls": [{"id": "x", "function": function}]}
    tool_answer = {"role": "tool", "tool_call_id": "x", "content": ""}
    forecast_tool = {
        "type": "function",
        "function": {"name": FORECAST, "parameters": {"type": "object"}},
    }
    async with gateway.serving(gateway.scripted(says(tokenizer, "x"))), socket(session_key) as page:
        for frame, param in (
            (generate(messages=HELLO + [asked, tool_answer] * MAX_ROUNDS), "mcp_servers"),
            (generate(tools=[forecast_tool]), "tools"),
            (generate(mcp_servers="weather"), "mcp_servers"),
            (generate(mcp_servers=["x"] * 17), "mcp_servers"),
            ({**call(), "arguments": {}}, "arguments"),
            ({**call(), "function": None}, "function"),
        ):
            await page.send_json_to({"mcp_servers": ["weather"], **frame})
            (refused,) = await frames_until(page, "done", "error", "tool_result")
            assert refused["error"]["param"] == param, refused
        anew = generate(
            messages=[*HELLO, *[asked, tool_answer] * MAX_ROUNDS, *HELLO], mcp_servers=["weather"]
        )
        await page.send_json_to(anew)
        frames = await frames_until(page, "done", "error")
        assert frames[-1]["type"] == "done", frames
