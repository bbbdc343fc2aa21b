"""The operators' page of MCP servers, whose tools the playground may call."""

from __future__ import annotations

from typing import Any

from catalog.mcp_servers import (
    FIELDS,
    access_mcp_server,
    access_mcp_servers,
    check_mcp_server,
    delete_mcp_server,
    set_mcp_server,
)
from console.views.base import MAX_TENANTS, InstallationPage, post_text
from tenants.access import access_tenant, access_tenants
from tenants.sessions import UserRequest


def _context(request: UserRequest) -> dict[str, Any]:
    servers = access_mcp_servers(request.user)
    name = request.POST.get("name") or request.GET.get("name", "")
    edited = servers.filter(name=name).first()
    chosen = request.POST.getlist("tenants") or (
        [tenant.slug for tenant in edited.tenants.all()] if edited else []
    )
    tenants = access_tenants(request.user).filter(active=True).order_by("name")[:MAX_TENANTS]
    return {
        "servers": servers,
        "edited": edited,
        "help": FIELDS,
        "name": name,
        "url": request.POST.get("url") or (edited.url if edited else ""),
        "public": request.POST.get("public") == "on" if request.POST else edited and edited.public,
        "tenants": [(tenant, tenant.slug in chosen) for tenant in tenants],
    }


mcp_servers = InstallationPage("mcp-servers", "mcp_servers", _context)


@mcp_servers.action
def set_server(request: UserRequest) -> dict[str, str]:
    """Add or change a server, then list its tools."""
    server = set_mcp_server(
        actor=request.user,
        name=post_text(request, "name") or "",
        url=post_text(request, "url"),
        authorization="" if "forget" in request.POST else post_text(request, "authorization"),
        public="public" in request.POST,
        tenants=[access_tenant(request.user, slug) for slug in request.POST.getlist("tenants")],
    )
    return _check(request, server.name)


@mcp_servers.action
def check_server(request: UserRequest, name: str) -> dict[str, str]:
    """List the server's tools again and approve them in their current form."""
    return _check(request, name)


def _check(request: UserRequest, name: str) -> dict[str, str]:
    server = access_mcp_server(request.user, name)
    num_tools = len(check_mcp_server(actor=request.user, server=server).tools)
    return {"text": f"{name} answers. Tools that may run: {num_tools}."}


@mcp_servers.action
def delete_server(request: UserRequest, name: str) -> dict[str, str]:
    delete_mcp_server(actor=request.user, server=access_mcp_server(request.user, name))
    return {"text": f"{name} is removed. Its tools no longer run."}
