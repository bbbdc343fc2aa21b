"""Sensitive actions require a recent login or confirmation."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from allauth.account import app_settings
from allauth.account.internal.flows.login import get_authentication_records
from allauth.account.internal.flows.reauthentication import get_reauthentication_flows
from allauth.core.exceptions import ReauthenticationRequired
from django.contrib.auth.signals import user_logged_in
from django.dispatch import receiver
from django.http import HttpRequest, HttpResponseBase

SESSION_KEY = "quire_authenticated_at"


@receiver(user_logged_in, dispatch_uid="accounts.reauthentication")
def _record_login(request: HttpRequest, **_: object) -> None:
    request.session[SESSION_KEY] = time.time()


def is_recently_authenticated(request: HttpRequest) -> bool:
    """Return whether the session's user logged in or confirmed their identity recently.

    Users without a password or second factor (single sign-on) can't confirm it, so True for them.
    """
    user: Any = request.user
    moments = [request.session.get(SESSION_KEY) or 0.0]
    moments += [record["at"] for record in get_authentication_records(request, user)]
    if time.time() - max(moments) < app_settings.REAUTHENTICATION_TIMEOUT:
        return True
    return not get_reauthentication_flows(user)


def reauthentication_required(
    view: Callable[..., HttpResponseBase],
) -> Callable[..., HttpResponseBase]:
    """Require a recent login for a POST, which is repeated after the user has confirmed it."""

    @wraps(view)
    def checked(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        changes = request.method == "POST" and request.user.is_authenticated
        if changes and not is_recently_authenticated(request):
            raise ReauthenticationRequired
        return view(request, *args, **kwargs)

    return checked
