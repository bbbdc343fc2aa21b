"""The page of MCP servers, whose tools the playground may call. For operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from django.contrib.auth.decorators import login_required
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from accounts.reauthentication import reauthentication_required
from catalog.mcp_servers import (
    FIELDS,
    access_mcp_server,
    access_mcp_servers,
    check_mcp_server,
    delete_mcp_server,
    set_mcp_server,
)
from common.one_time import pop_one_time, store_one_time
from console.views.base import MAX_TENANTS, post_text
from engine.contract.errors import QuireError
from tenants.access import access_tenant, access_tenants
from tenants.sessions import UserRequest


@require_safe
@never_cache
@login_required
def mcp_servers(request: UserRequest) -> HttpResponse:
    """All servers, with their tools."""
    return show(request)


def show(request: UserRequest, error: QuireError | None = None) -> HttpResponse:
    """Render the page with the last outcome or error."""
    try:
        servers = access_mcp_servers(request.user)
    except QuireError as refusal:
        context = {"error": refusal, "refused": True}
        return render(request, "console/mcp_servers.html", context, status=refusal.status)
    name = request.POST.get("name") or request.GET.get("name", "")
    edited = servers.filter(name=name).first()
    chosen = request.POST.getlist("tenants") or (
        [tenant.slug for tenant in edited.tenants.all()] if edited else []
    )
    tenants = access_tenants(request.user).filter(active=True).order_by("name")[:MAX_TENANTS]
    context = {
        "servers": servers,
        "edited": edited,
        "help": FIELDS,
        "name": name,
        "url": request.POST.get("url") or (edited.url if edited else ""),
        "public": request.POST.get("public") == "on" if request.POST else edited and edited.public,
        "tenants": [(tenant, tenant.slug in chosen) for tenant in tenants],
        "error": error,
        "told": pop_one_time(request) if request.method == "GET" else {},
    }
    status = error.status if error else 200
    return render(request, "console/mcp_servers.html", context, status=status)


def mcp_action(function: Callable[..., str]) -> Callable[..., HttpResponseBase]:
    """Turn a function from a request to an outcome into a POST view that shows it once."""

    @reauthentication_required
    @require_POST
    @never_cache
    @login_required
    @wraps(function)
    def view(request: UserRequest, **kwargs: Any) -> HttpResponse:
        try:
            store_one_time(request, text=function(request, **kwargs))
        except QuireError as error:
            return show(request, error)
        return redirect("mcp-servers")

    return view


@mcp_action
def set_server(request: UserRequest) -> str:
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


@mcp_action
def check_server(request: UserRequest, name: str) -> str:
    """List its tools and approve them as they are."""
    return _check(request, name)


def _check(request: UserRequest, name: str) -> str:
    server = access_mcp_server(request.user, name)
    num_tools = len(check_mcp_server(actor=request.user, server=server).tools)
    return f"{name} answers. Tools that may run: {num_tools}."


@mcp_action
def delete_server(request: UserRequest, name: str) -> str:
    """Remove a server."""
    delete_mcp_server(actor=request.user, server=access_mcp_server(request.user, name))
    return f"{name} is removed. Its tools no longer run."
