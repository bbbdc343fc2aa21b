"""The playground's tabs other than chat: each is a form of one endpoint and calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.urls import reverse

from console.csp import PERMISSIONS
from console.mounting import mounted
from console.views.base import current_tenant, page_view, tenant_context
from engine.contract.errors import QuireError
from inference.api.audio import realtime
from inference.api.audio.views import TranscriptionsView
from inference.api.completions import CompletionsView
from inference.api.pooling.views import EmbeddingsView, RerankView
from inference.web.authentication import ApiKeyAuthentication
from inference.web.views import GatewayView
from tenants.authentication import Caller, caller_for_user
from tenants.sessions import UserRequest

#: Last part of the page's path -> title, endpoint, path in the API.
TABS: dict[str, tuple[str, type[GatewayView], str]] = {
    "completions": ("Completion", CompletionsView, "/v1/completions"),
    "embeddings": ("Embeddings", EmbeddingsView, "/v1/embeddings"),
    "rerank": ("Rerank", RerankView, "/v1/rerank"),
    "speech": ("Speech", TranscriptionsView, "/v1/audio/transcriptions"),
}


class SessionAuthentication(ApiKeyAuthentication):
    """Authenticates by session instead of API key, for the tenant in `?tenant=`."""

    async def authenticate(  # type: ignore[override]
        self, request: HttpRequest
    ) -> tuple[Caller, None]:
        """Raises the errors of `caller_for_user`."""
        user: Any = await request.auser()
        return await caller_for_user(user, request.GET.get("tenant") or None), None


def session_view(endpoint: type[GatewayView]) -> Callable[..., HttpResponseBase]:
    """Wrap an API endpoint for logged-in users, with the CSRF check that DRF's views skip."""
    view: Any = endpoint.as_view(authentication_classes=(SessionAuthentication,))
    view.csrf_exempt = False
    return view


@page_view
def playground_tab(request: UserRequest, kind: str) -> HttpResponse:
    """A form for one endpoint; scripts send it and show the response."""
    if kind not in TABS:
        raise Http404
    title, _, path = TABS[kind]
    template = f"console/playground_{'speech' if kind == 'speech' else 'tab'}.html"
    try:
        tenant = current_tenant(request)
    except QuireError as error:
        context = {**tenant_context(request.user, None), "error": error, "title": title}
        return render(request, template, context, status=error.status)
    context = {
        **tenant_context(request.user, tenant),
        "kind": kind,
        "title": title,
        "run_url": reverse(f"run-{kind}"),
        "api_path": path,
        "socket_path": mounted(realtime.PATH),
    }
    response = render(request, template, context)
    if kind == "speech":
        response["Permissions-Policy"] = PERMISSIONS.replace("microphone=()", "microphone=(self)")
    return response
