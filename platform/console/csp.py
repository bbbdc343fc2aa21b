"""Content-Security-Policy of every HTML page: only this server's files may run, style or load.

There are no inline scripts or styles, and the console's scripts build the page node by node:
Trusted Types make the browser reject any markup from a string. Scripts of Django's admin do parse
markup, so its pages omit Trusted Types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.conf import settings
from django.core.exceptions import DisallowedHost
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.decorators import sync_and_async_middleware

HEADER = "Content-Security-Policy"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "media-src 'self' blob:; font-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
TRUSTED_TYPES = "require-trusted-types-for 'script'; trusted-types 'none'"
PERMISSIONS = "camera=(), microphone=(), geolocation=(), payment=(), usb=()"


@sync_and_async_middleware
def content_security_policy(get_response: Callable[[HttpRequest], Any]) -> Callable[..., Any]:
    """Middleware that sets the header on HTML responses that have none."""

    async def in_loop(request: HttpRequest) -> HttpResponse:
        return protect(request, await get_response(request))

    def in_thread(request: HttpRequest) -> HttpResponse:
        return protect(request, get_response(request))

    return in_loop if iscoroutinefunction(get_response) else in_thread


def protect(request: HttpRequest, response: HttpResponse) -> HttpResponse:
    """Add the headers to HTML responses."""
    html = response.get("Content-Type", "").startswith("text/html")
    # Django's own error page, for developers, has inline styles.
    debug_report = settings.DEBUG and response.status_code >= 400
    if html and not debug_report and HEADER not in response:
        response[HEADER] = policy(request)
        response.setdefault("Permissions-Policy", PERMISSIONS)
    return response


def policy(request: HttpRequest) -> str:
    """The policy for the page at this path."""
    rules = [POLICY, f"connect-src {' '.join(_connect(request))}"]
    if not request.path.startswith(reverse("admin:index")):
        rules.append(TRUSTED_TYPES)
    return "; ".join(rules)


def _connect(request: HttpRequest) -> list[str]:
    """Sources for this server and its WebSockets, which not every browser includes in 'self'."""
    try:
        host = request.get_host()
    except DisallowedHost:
        return ["'self'"]
    return ["'self'", f"{'wss' if request.is_secure() else 'ws'}://{host}"]
