"""Tools of MCP servers, listed and called over streamable HTTP.

An operator enters a server's address, and the server itself may be hostile. So each connection goes
to an address that the egress rules allow (`common.outbound_http`), whatever the name resolves to by
then; redirects are followed within the server's origin alone; answers, tools and time are bounded;
and a tool runs only while its definition is the one that an operator approved by a test.
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

#: Timeouts in seconds of a listing, and of a call including the listing before it.
LIST_TIMEOUT_S, CALL_TIMEOUT_S = 15.0, 60.0
#: Maximum size of one HTTP response.
MAX_ANSWER_BYTES = 4 << 20
#: Maximum length of a call's result for the model; the rest is cut off.
MAX_RESULT_CHARS = 50_000
#: Maximum number of a server's tools, and of characters of a tool's definition as JSON: all of them
#: are in each prompt.
MAX_TOOLS, MAX_DEFINITION_CHARS = 64, 20_000
#: Maximum length of a function's name, as in OpenAI's API.
MAX_NAME_CHARS = 64

T = TypeVar("T")


class McpServerError(QuireError):
    """An MCP server can't be reached, or its answer is invalid."""

    status = 502
    code = "mcp_server_error"
    error_type = "server_error"


@dataclass(frozen=True)
class ToolResult:
    """A call's result as text for the model. `is_error`: whether it failed."""

    text: str
    is_error: bool = False


async def list_tools(url: str, authorization: str, prefix: str) -> list[dict[str, Any]]:
    """The server's tools as [{"function", "name", "description", "parameters"}].

    Args:
        authorization: value of the header, or "".
        prefix: prepended to the names of functions, so that those of two servers differ.
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
    """Call a tool with arguments as JSON. Its definition is as in `list_tools`.

    The server's errors are returned as results: the model may try again.
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
        # Not `client.call_tool`: it validates the result against the server's own schema, whose
        # regular expressions may block this process's only event loop for hours.
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
    """Tools of all pages, up to `MAX_TOOLS` + 1."""
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
    """A tool's definition for the model, and its name at the server. Raises `McpServerError`."""
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
    if "\\u0000" in text:  # not allowed in PostgreSQL's JSON
        raise McpServerError(f"The definition of the tool {tool.name[:100]!r} has NUL characters.")
    return definition


def _function_name(prefix: str, name: str, used_names: dict[str, Any]) -> str:
    """A name for the model, different from those of the server's other tools."""
    function = re.sub(r"[^A-Za-z0-9_-]", "_", f"{prefix}__{name}")[:MAX_NAME_CHARS]
    number = 2
    unique = function
    while unique in used_names:
        suffix = f"_{number}"
        unique, number = function[: MAX_NAME_CHARS - len(suffix)] + suffix, number + 1
    return unique


def _text_of(result: CallToolResult) -> str:
    """A result's text; other content is only named. Structured content if there is no text."""
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
    """Run the operation with a client of the server and return its result.

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
    except Exception as error:  # a hostile server may make the client library raise anything
        cause = _first_error(error)
        if isinstance(cause, QuireError):
            raise cause from error
        # PostgreSQL can't store NUL, and escape sequences would control a terminal.
        text = re.sub("[\x00-\x1f\x7f-\x9f]+", " ", str(cause)) or type(cause).__name__
        raise McpServerError(f"{target.host} answers nothing of use: {text[:500]}") from error


def _first_error(error: BaseException) -> BaseException:
    """The first error in a task group's exception, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _transport() -> httpx2.AsyncBaseTransport:
    """A transport that connects to checked addresses only, and limits the size of responses."""
    import httpx2

    class BoundedStream(httpx2.AsyncByteStream):
        """A response body that raises an error beyond `MAX_ANSWER_BYTES`."""

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
        """Connects to the checked address; the name is used for the certificate only."""

        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            host, scheme = request.url.host, request.url.scheme
            port = request.url.port or (443 if scheme == "https" else 80)
            address = await anyio.to_thread.run_sync(resolve, host, port)
            pinned = httpx2.Request(
                request.method,
                request.url.copy_with(host=str(address)),
                headers=request.headers,  # including `Host`
                stream=request.stream,
                extensions={**request.extensions, "sni_hostname": host},
            )
            response = await super().handle_async_request(pinned)
            # Compressed responses may be a thousand times as large as what was transferred.
            if response.headers.get("Content-Encoding", "identity") != "identity":
                await response.aclose()
                raise McpServerError(
                    "The server sends compressed answers, which weren't asked for."
                )
            response.stream = BoundedStream(cast("httpx2.AsyncByteStream", response.stream))
            return response

    return PinnedTransport(trust_env=False)
