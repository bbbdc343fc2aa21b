"""Dangerous acts ask for the password again when the last time is a while ago."""

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
from django.http import HttpRequest, HttpResponse

SESSION_KEY = "quire_authenticated_at"


@receiver(user_logged_in, dispatch_uid="accounts.reauthentication")
def _record_login(request: HttpRequest, **_: object) -> None:
    request.session[SESSION_KEY] = time.time()


def is_recently_authenticated(request: HttpRequest) -> bool:
    """Whether this session's person proved who they are within the last minutes.

    Who has neither password nor second factor (single sign-on alone) can't be asked again here.
    """
    user: Any = request.user
    moments = [request.session.get(SESSION_KEY) or 0.0]
    moments += [record["at"] for record in get_authentication_records(request, user)]
    if time.time() - max(moments) < app_settings.REAUTHENTICATION_TIMEOUT:
        return True
    return not get_reauthentication_flows(user)


def reauthentication_required(
    view: Callable[..., HttpResponse],
) -> Callable[..., HttpResponse]:
    """By POST only with a recent proof; the request goes on by itself once it's given."""

    @wraps(view)
    def asked(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        asks = request.method == "POST" and request.user.is_authenticated
        if asks and not is_recently_authenticated(request):
            raise ReauthenticationRequired
        return view(request, *args, **kwargs)

    return asked
