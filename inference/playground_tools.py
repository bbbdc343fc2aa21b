"""Tool calls on MCP servers, from a `call_tool` frame of the playground to `tool_result`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from catalog.mcp_client import ToolResult, call_tool
from catalog.mcp_servers import find_tool, offered_tools
from common.db import run_in_db_thread
from engine.contract.errors import InvalidRequest
from inference.errors import as_quire_error, envelope, report
from storage.playground_document import MAX_SERVERS
from tenants.authentication import Caller

logger = logging.getLogger(__name__)

#: Maximum number of answers with calls to one question; each needs another prompt, which is billed.
MAX_ROUNDS = 10

Send = Callable[[dict[str, Any]], Awaitable[None]]


async def add_offered_tools(body: dict[str, Any], names: Any, caller: Caller) -> None:
    """Add the tools of the named MCP servers to the body of a chat completion.

    Raises: `NotFound` for a server that isn't the tenant's; `InvalidRequest` for a question that
    has had `MAX_ROUNDS` rounds, and for a tool that has the name of one of the body's own.
    """
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not is_list or len(names) > MAX_SERVERS:
        raise InvalidRequest(
            f"mcp_servers must be a list of at most {MAX_SERVERS} names.", param="mcp_servers"
        )
    if not names:
        return
    if _num_rounds(body["messages"]) >= MAX_ROUNDS:
        raise InvalidRequest(
            f"The model called tools {MAX_ROUNDS} times for this question. Ask something new to go "
            "on.",
            param="mcp_servers",
            code="too_many_tool_rounds",
        )
    offered = await run_in_db_thread(offered_tools, caller.tenant_id, names)
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        return  # validating the body reports this
    functions = {tool["function"]["name"] for tool in offered}
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and function.get("name") in functions:
            raise InvalidRequest(
                f"The tool {function['name']} is one of an MCP server's too. Rename it.",
                param="tools",
            )
    if tools or offered:
        body["tools"] = [*tools, *offered]


def _num_rounds(messages: Any) -> int:
    """Number of answers with calls since the last question."""
    rounds = 0
    for message in reversed(messages if isinstance(messages, list) else []):
        role = message.get("role") if isinstance(message, dict) else None
        if role == "user":
            break
        rounds += role == "assistant" and bool(message.get("tool_calls"))
    return rounds


class ToolCall:
    """Calls a tool and sends its result as a frame; errors are sent as an `error` frame.

    Args:
        message: a `call_tool` frame with a checked id: {"function", "arguments"}.
    """

    def __init__(self, message: dict[str, Any], caller: Caller, send: Send) -> None:
        self.name: str = message["id"]
        self._message, self._caller, self._send = message, caller, send
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    def stop(self) -> None:
        """Stop early at the user's request, with a result that says so."""
        if self._task is not None and not self._stopped:
            self._stopped = True
            self._task.cancel()

    async def run(self) -> None:
        """Call the tool and send the result."""
        self._task = asyncio.current_task()
        try:
            result = await self._call()
        except asyncio.CancelledError:
            if not self._stopped or self._task is None:
                raise
            self._task.uncancel()
            result = ToolResult("The user stopped this call.", is_error=True)
        except Exception as error:
            report(error, self.name)
            failure = envelope(as_quire_error(error))
            await self._send({"type": "error", "id": self.name, **failure})
            return
        frame = {"type": "tool_result", "text": result.text, "is_error": result.is_error}
        await self._send({**frame, "id": self.name, "stopped": self._stopped})

    async def _call(self) -> ToolResult:
        self._caller.require("inference")
        values = [self._message.get(name) for name in ("function", "arguments")]
        for name, value in zip(("function", "arguments"), values, strict=True):
            if not isinstance(value, str):
                raise InvalidRequest(f"{name} must be a string.", param=name)
        function, arguments = map(str, values)
        server, tool = await run_in_db_thread(find_tool, self._caller.tenant_id, function)
        started_at = time.perf_counter()
        result = await call_tool(server.url, server.authorization, tool, arguments)
        logger.info(
            "tool call",
            extra={
                "mcp_server": server.name,
                "tool": tool["name"],
                "tenant": self._caller.tenant,
                "failed": result.is_error,
                "duration_ms": round(1000 * (time.perf_counter() - started_at)),
            },
        )
        return result
