"""Middleware for required second factors, and for logins without Redis or after many attempts."""

from __future__ import annotations

from collections.abc import Callable

import redis
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.cache import add_never_cache_headers

from common.errors import PermissionDenied
from inference.errors import error_response
from tenants.sessions import needs_second_factor

#: Paths open to a user who must still set up a second factor: their account, and the logout.
OPEN = ("/account/", "/login/", "/logout/", "/static/", "/invitation/")
#: Status -> default `Retry-After` in seconds.
AGAIN_S = {429: 60, 503: 1}


class IdentityMiddleware:
    """The innermost middleware. It is synchronous, as are the views below it."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Redirect users who lack a required second factor to the page to set one up."""
        user = request.user
        if (
            not request.path_info.startswith(OPEN)
            and user.is_authenticated
            and needs_second_factor(user)
        ):
            if request.path_info.startswith(("/api/", "/console/api/")):
                text = f"Your role asks for a second factor: set one up at {reverse('mfa_index')}."
                return error_response(PermissionDenied(text, code="second_factor_required"))
            return redirect(f"{reverse('mfa_index')}?required=yes")
        response = self.get_response(request)
        if (wait := AGAIN_S.get(response.status_code)) is not None:
            response.setdefault("Retry-After", str(wait))
        if request.path_info.startswith("/account/"):
            add_never_cache_headers(response)
        return response

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        """Answer 503 without Redis: it counts login attempts, so no login is possible."""
        if isinstance(error, redis.RedisError):
            return render(request, "503.html", status=503)
        return None
