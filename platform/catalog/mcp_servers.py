"""MCP servers: access to them, and the only functions that change them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from asgiref.sync import async_to_sync
from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from catalog.mcp_client import McpServerError, list_tools
from catalog.models import McpServer
from common.db import changed, save_valid
from common.errors import Conflict, NotFound
from common.outbound_http import OutboundRequestBlocked, check_public
from engine.contract.errors import InvalidRequest
from tenants.actors import Actor, require_operator
from tenants.audit import log_action
from tenants.models import Tenant, User

#: Maximum number of servers: the playground lists all of a tenant's.
MAX_SERVERS = 100
#: Fields that can be set, with help texts for pages, commands and the API.
FIELDS = {
    "url": "Address of the streamable HTTP endpoint, such as https://tools.example.com/mcp",
    "authorization": "Authorization header, such as Bearer sk-...; stored, never shown again, and "
    "forgotten with another address",
    "public": "Every tenant may use it",
    "tenants": "Tenants that may use it, if not every tenant may",
}


def access_mcp_servers(user: Actor | User) -> QuerySet[McpServer]:
    """All servers. Raises `PermissionDenied` unless the user is an operator."""
    require_operator(user)
    return McpServer.objects.prefetch_related("tenants")


def access_mcp_server(user: Actor | User, name: str) -> McpServer:
    """Raises `PermissionDenied`, `NotFound`."""
    server = access_mcp_servers(user).filter(name=name).first()
    if server is None:
        raise NotFound(f"MCP server {name[:100]!r} not found.", param="name")
    return server


def mcp_servers_of(tenant_id: int) -> QuerySet[McpServer]:
    """Servers whose tools a tenant may use."""
    return McpServer.objects.filter(Q(public=True) | Q(tenants=tenant_id)).distinct()


@transaction.atomic
def set_mcp_server(
    *,
    actor: Actor | User,
    name: str,
    url: str | None = None,
    authorization: str | None = None,
    public: bool | None = None,
    tenants: Collection[Tenant] | None = None,
) -> McpServer:
    """Add a server, or change the fields that aren't None.

    A new address requires a new test of its tools, and deletes the header unless it is set too: it
    was the previous server's secret.

    Raises: `PermissionDenied`; `InvalidRequest` with `param`; `Conflict` beyond `MAX_SERVERS`.
    """
    actor = require_operator(actor)
    server = McpServer.objects.select_for_update().filter(name=name).first()
    if server is None:
        if not url:
            raise InvalidRequest("A new MCP server needs its address.", param="url")
        if McpServer.objects.count() >= MAX_SERVERS:
            raise Conflict(f"There are {MAX_SERVERS} MCP servers. Delete some.", param="name")
        server = McpServer(name=name)
    if url is not None:
        check_public(url)
    if authorization and not (authorization.isascii() and authorization.isprintable()):
        raise InvalidRequest("authorization must be printable ASCII.", param="authorization")
    values = {"url": url, "authorization": authorization, "public": public}
    changes = changed(server, {key: value for key, value in values.items() if value is not None})
    if "url" in changes:
        server.tools, server.tested_at, server.error = [], None, ""
        server.authorization = authorization or ""
    save_valid(server)
    if tenants is not None:
        server.tenants.set(tenants)
    log_action(
        actor,
        "mcp_server.set",
        server,
        url=server.url,
        public=server.public,
        tenants=sorted(server.tenants.values_list("slug", flat=True)),
        changed=sorted(changes),
    )
    return server


def check_mcp_server(*, actor: Actor | User, server: McpServer) -> McpServer:
    """List the server's tools and approve their definitions. Takes up to `LIST_TIMEOUT_S`.

    Raises: `PermissionDenied`; `McpServerError`, `OutboundRequestBlocked`: the tools approved
    before stay approved.
    """
    actor = require_operator(actor)
    try:
        tools = async_to_sync(list_tools)(server.url, server.authorization, server.name)
    except (McpServerError, OutboundRequestBlocked) as error:
        McpServer.objects.filter(pk=server.pk).update(
            tested_at=timezone.now(), error=error.message[:1000]
        )
        raise
    with transaction.atomic():
        row = McpServer.objects.select_for_update().filter(pk=server.pk, url=server.url).first()
        if row is None:
            raise Conflict(f"{server.name} was changed while it was checked.")
        row.tools, row.tested_at, row.error = tools, timezone.now(), ""
        row.save(update_fields=["tools", "tested_at", "error", "changed_at"])
        names = [tool["name"] for tool in tools]
        log_action(actor, "mcp_server.check", row, tools=names)
    return row


@transaction.atomic
def delete_mcp_server(*, actor: Actor | User, server: McpServer) -> None:
    """Delete a server. Conversations keep the results of its tools."""
    actor = require_operator(actor)
    log_action(actor, "mcp_server.delete", server, url=server.url)
    server.delete()


def offered_tools(tenant_id: int, names: Collection[str]) -> list[dict[str, Any]]:
    """Tools of the named servers in OpenAI's form. Raises `NotFound` for others' servers."""
    rows = {server.name: server for server in mcp_servers_of(tenant_id).filter(name__in=names)}
    for name in names:
        if name not in rows:
            raise NotFound(f"MCP server {name[:100]!r} not found.", param="mcp_servers")
    return [
        {
            "type": "function",
            "function": {
                "name": tool["function"],
                "description": tool["description"],
                "parameters": tool["parameters"],
            },
        }
        for name in dict.fromkeys(names)
        for tool in rows[name].tools
    ]


def find_tool(tenant_id: int, function: str) -> tuple[McpServer, dict[str, Any]]:
    """The tool with this name for the model. Raises `NotFound`."""
    server = mcp_servers_of(tenant_id).filter(name=function.partition("__")[0]).first()
    tools = [tool for tool in server.tools if tool["function"] == function] if server else []
    if server is None or not tools:
        raise NotFound(f"Tool {function[:100]!r} not found.", param="function")
    return server, tools[0]
