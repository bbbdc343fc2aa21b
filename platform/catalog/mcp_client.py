"""Tools of MCP servers, listed and called over streamable HTTP.

A server's address is typed in by an operator, and the server itself may be hostile. So each
connection goes to an address that the rules for egress allow (`common.outbound_http`), whatever the
name means by then; redirects are followed within the server's origin alone; answers, tools and time
are bounded; and a tool runs only while it is defined as it was when an operator tested the server.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import anyio

from common.outbound_http import check_url, resolve
from engine.contract.errors import QuireError

if TYPE_CHECKING:
    import httpx2
    from mcp import Client
    from mcp.types import CallToolResult, Tool

#: Of one listing, and of one call with the listing before it.
LIST_TIMEOUT_S, CALL_TIMEOUT_S = 15.0, 60.0
#: Of one HTTP answer.
MAX_ANSWER_BYTES = 4 << 20
#: Of what a call returns to the model; the rest is cut off.
MAX_RESULT_CHARS = 50_000
#: Tools of a server, and the characters of one's definition as JSON: all are in each prompt.
MAX_TOOLS, MAX_DEFINITION_CHARS = 64, 20_000
#: Of a function's name, as OpenAI has it.
MAX_NAME_CHARS = 64

T = TypeVar("T")


class McpServerError(QuireError):
    """An MCP server can't be reached, or answers what can't be used."""

    status = 502
    code = "mcp_server_error"
    error_type = "server_error"


@dataclass(frozen=True)
class ToolResult:
    """What a call returned, as text for the model. `is_error`: whether it failed."""

    text: str
    is_error: bool = False


async def list_tools(url: str, authorization: str, prefix: str) -> list[dict[str, Any]]:
    """The server's tools as [{"function", "name", "description", "parameters"}].

    Args:
        authorization: value of the header, or "".
        prefix: what the names of functions begin with, so that those of two servers differ.
    Raises: `InvalidRequest` (`url`), `OutboundRequestBlocked`, `McpServerError`.
    """
    tools = await _run(url, authorization, _all_tools, LIST_TIMEOUT_S)
    if len(tools) > MAX_TOOLS:
        raise McpServerError(f"The server has more than {MAX_TOOLS} tools.")
    definitions: dict[str, dict[str, Any]] = {}
    for tool in tools:
        definition = _definition(tool)
        function = _function_name(prefix, tool.name, definitions)
        definitions[function] = {"function": function, **definition}
    return list(definitions.values())


async def call_tool(
    url: str, authorization: str, tool: dict[str, Any], arguments: str
) -> ToolResult:
    """Call a tool, defined as in `list_tools`, with arguments as JSON.

    What goes wrong at the server is a result too: the model may try again.
    """
    from mcp.types import CallToolRequest, CallToolRequestParams, CallToolResult

    try:
        values = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        return ToolResult(f"The arguments are not JSON: {error}.", is_error=True)
    if not isinstance(values, dict):
        return ToolResult("The arguments must be a JSON object.", is_error=True)
    approved = {name: tool[name] for name in ("name", "description", "parameters")}

    async def call(client: Client) -> CallToolResult | str:
        listed = [row for row in await _all_tools(client) if row.name == tool["name"]]
        if not listed:
            return f"The server no longer has the tool {tool['name']}."
        if len(listed) > 1 or _definition(listed[0]) != approved:
            return (
                f"The server has changed the tool {tool['name']}. It runs again once an operator "
                "has tested the server."
            )
        params = CallToolRequestParams(name=tool["name"], arguments=values)
        # Not `client.call_tool`: it matches the result against the server's own schema, whose
        # patterns may keep this process's only loop busy for hours.
        return await client.session.send_request(CallToolRequest(params=params), CallToolResult)

    try:
        result = await _run(url, authorization, call, CALL_TIMEOUT_S)
    except QuireError as error:
        return ToolResult(error.message, is_error=True)
    if isinstance(result, str):
        return ToolResult(result, is_error=True)
    text = _text_of(result)
    if len(text) > MAX_RESULT_CHARS:
        text = f"{text[:MAX_RESULT_CHARS]}\n[Cut off: the result has {len(text)} characters.]"
    return ToolResult(text, result.is_error)


async def _all_tools(client: Client) -> list[Tool]:
    """Tools of all pages, up to one more than `MAX_TOOLS`."""
    tools: list[Tool] = []
    cursor: str | None = None
    for _ in range(MAX_TOOLS + 1):  # pages may be empty
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None or len(tools) > MAX_TOOLS:
            break
    return tools


def _definition(tool: Tool) -> dict[str, Any]:
    """What the model sees of a tool, and its name at the server. Raises `McpServerError`."""
    definition = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema,
    }
    if not tool.name.isprintable():
        raise McpServerError(f"The name of the tool {tool.name[:100]!r} isn't printable.")
    try:
        text = json.dumps(definition, allow_nan=False)
    except ValueError as error:
        raise McpServerError(
            f"The definition of the tool {tool.name[:100]!r} has numbers that JSON doesn't have."
        ) from error
    if len(text) > MAX_DEFINITION_CHARS:
        raise McpServerError(
            f"The definition of the tool {tool.name[:100]!r} has {len(text)} characters; the limit "
            f"is {MAX_DEFINITION_CHARS}."
        )
    if "\\u0000" in text:  # PostgreSQL's JSON has none
        raise McpServerError(f"The definition of the tool {tool.name[:100]!r} has NUL characters.")
    return definition


def _function_name(prefix: str, name: str, used_names: dict[str, Any]) -> str:
    """A name for the model that none of the server's other tools has."""
    function = re.sub(r"[^A-Za-z0-9_-]", "_", f"{prefix}__{name}")[:MAX_NAME_CHARS]
    number = 2
    unique = function
    while unique in used_names:
        suffix = f"_{number}"
        unique, number = function[: MAX_NAME_CHARS - len(suffix)] + suffix, number + 1
    return unique


def _text_of(result: CallToolResult) -> str:
    """The texts of a result; other content is named. Structured content, where there is no text."""
    parts = []
    for block in result.content:
        if block.type == "text":
            parts.append(block.text)
        elif block.type == "resource" and (text := getattr(block.resource, "text", None)):
            parts.append(text)
        else:
            parts.append(f"[{block.type}, not shown]")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


async def _run(
    url: str, authorization: str, operation: Callable[[Client], Awaitable[T]], timeout_s: float
) -> T:
    """The operation's result with a client of the server.

    Raises: `InvalidRequest` (`url`), `OutboundRequestBlocked`, `McpServerError`.
    """
    import httpx2
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    target = check_url(url)
    headers = {"User-Agent": "quire", **({"Authorization": authorization} if authorization else {})}
    try:
        with anyio.fail_after(timeout_s):
            await anyio.to_thread.run_sync(resolve, target.host, target.port)
            async with (
                httpx2.AsyncClient(
                    transport=_transport(), headers=headers, timeout=timeout_s, trust_env=False
                ) as http,
                Client(streamable_http_client(url, http_client=http), cache=None) as client,
            ):
                return await operation(client)
    except TimeoutError as error:
        raise McpServerError(f"{target.host} didn't answer within {timeout_s:g} s.") from error
    except Exception as error:  # a hostile server may let the client's library raise anything
        cause = _first_error(error)
        if isinstance(cause, QuireError):
            raise cause from error
        # PostgreSQL stores no NUL, and escapes would steer a terminal.
        text = re.sub("[\x00-\x1f\x7f-\x9f]+", " ", str(cause)) or type(cause).__name__
        raise McpServerError(f"{target.host} answers nothing of use: {text[:500]}") from error


def _first_error(error: BaseException) -> BaseException:
    """The first error of a task group's, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _transport() -> httpx2.AsyncBaseTransport:
    """A transport that connects to checked addresses alone, and bounds answers."""
    import httpx2

    class BoundedStream(httpx2.AsyncByteStream):
        """An answer's body that ends with an error beyond `MAX_ANSWER_BYTES`."""

        def __init__(self, stream: httpx2.AsyncByteStream) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for part in self._stream:
                size += len(part)
                if size > MAX_ANSWER_BYTES:
                    raise McpServerError(f"The answer has more than {MAX_ANSWER_BYTES} bytes.")
                yield part

        async def aclose(self) -> None:
            await self._stream.aclose()

    class PinnedTransport(httpx2.AsyncHTTPTransport):
        """Connects to the address that was checked; the name is for the certificate alone."""

        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            host, scheme = request.url.host, request.url.scheme
            port = request.url.port or (443 if scheme == "https" else 80)
            address = await anyio.to_thread.run_sync(resolve, host, port)
            pinned = httpx2.Request(
                request.method,
                request.url.copy_with(host=str(address)),
                headers=request.headers,  # `Host` among them
                stream=request.stream,
                extensions={**request.extensions, "sni_hostname": host},
            )
            response = await super().handle_async_request(pinned)
            # A compressed answer may be a thousand times as large as what came over the line.
            if response.headers.get("Content-Encoding", "identity") != "identity":
                await response.aclose()
                raise McpServerError(
                    "The server sends compressed answers, which weren't asked for."
                )
            response.stream = BoundedStream(cast("httpx2.AsyncByteStream", response.stream))
            return response

    return PinnedTransport(trust_env=False)
