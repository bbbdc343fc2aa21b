"""Which of the user's tenants a page is about."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from functools import wraps
from typing import Any, Protocol
from urllib.parse import urlencode

import redis
from django import forms
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from common.errors import NotFound, ServiceUnavailable
from common.one_time import pop_one_time, store_one_time
from engine.contract.errors import InvalidRequest, QuireError
from inference.errors import error_response
from tenants.access import access_tenant, access_tenants, first_tenant
from tenants.authentication import AuthenticationFailed
from tenants.models import Tenant, User

# -- What base.py takes from console.views.overview.


View = Callable[[HttpRequest], HttpResponse]


def json_view(function: Callable[[HttpRequest], dict[str, Any]]) -> View:
    """A view of a function from a logged-in user's request to JSON; 401 for nobody."""

    @require_safe
    @never_cache
    @functools.wraps(function)
    def view(request: HttpRequest) -> HttpResponse:
        try:
            if not request.user.is_authenticated:
                raise AuthenticationFailed("Log in first.", code="not_logged_in")
            return JsonResponse(function(request))
        except QuireError as error:
            return error_response(error)
        except redis.RedisError as error:
            told = ServiceUnavailable("Replicas are unknown: no connection to Redis.")
            told.__cause__ = error
            return error_response(told)

    return view


# -- Days (UTC) that forms name, as moments.


def start_of(day: date) -> datetime:
    """Its midnight."""
    return datetime.combine(day, time.min, UTC)


def end_of(day: date) -> datetime:
    """The next midnight; behind the last day that a date can be there is none."""
    if day == date.max:
        return datetime.max.replace(tzinfo=UTC)
    return start_of(day + timedelta(days=1))


MAX_TENANTS = 500
#: Of the session: the tenant that was looked at last. Other pages open with it.
SESSION_TENANT = "tenant"


class RenderPage(Protocol):
    """Renders a page about a tenant, None for one that can't be shown."""

    def __call__(
        self,
        request: HttpRequest,
        tenant: Tenant | None,
        *,
        told: dict[str, Any] | None = None,
        error: QuireError | None = None,
    ) -> HttpResponse: ...


def current_tenant(request: HttpRequest) -> Tenant | None:
    """The tenant that is named, else the one looked at last, else the user's first.

    Raises `NotFound` for a stranger's.
    """
    user: Any = request.user
    named = request.POST.get("tenant") or request.GET.get("tenant")
    last = request.session.get(SESSION_TENANT)
    if not named:
        kept = access_tenants(user).filter(active=True, slug=last).first() if last else None
        return kept or first_tenant(user)
    tenant = access_tenant(user, named)
    if last != tenant.slug:
        request.session[SESSION_TENANT] = tenant.slug
    return tenant


def tenant_context(user: User, tenant: Tenant | None) -> dict[str, Any]:
    """For the choice of a tenant at the top of a page."""
    found = access_tenants(user).filter(active=True).order_by("name")
    shown = list(found[:MAX_TENANTS])
    return {"tenant": tenant, "tenants": shown, "more_tenants": len(shown) > 1}


def render_page(request: HttpRequest, show: RenderPage) -> HttpResponse:
    """The page of the tenant that is named, with what the last POST there kept to be told once."""
    try:
        tenant = current_tenant(request)
    except QuireError as error:
        return show(request, None, error=error)
    kept = pop_one_time(request) if request.method == "GET" and tenant is not None else {}
    told = kept if tenant is not None and kept.get("tenant") == tenant.slug else {}
    return show(request, tenant, told=told)


def redirect_with_message(
    request: HttpRequest, page: str, tenant: Tenant, **kept: Any
) -> HttpResponse:
    """On to the page: whoever reloads that does nothing twice. It tells what was kept, once."""
    store_one_time(request, tenant=tenant.slug, **kept)
    return redirect(f"{reverse(page)}?{urlencode({'tenant': tenant.slug})}")


# -- What the console's pages have in common that change something by POST.


Deed = Callable[..., dict[str, Any]]
Page = Callable[..., HttpResponse]


def deed(page: str, show: Page) -> Callable[[Deed], Page]:
    """Makes a view by POST of a function from request and tenant to what the next page tells.

    `page`: the name of the page that follows. `show(request, tenant, error=)`: the same page for
    what is refused.
    """

    def decorate(function: Deed) -> Page:
        @require_POST
        @never_cache
        @login_required
        @wraps(function)
        def view(request: HttpRequest, **where: Any) -> HttpResponse:
            tenant = None
            try:
                tenant = current_tenant(request)
                if tenant is None:
                    raise NotFound("You belong to no tenant.")
                return redirect_with_message(
                    request, page, tenant, **function(request, tenant, **where)
                )
            except QuireError as error:
                return show(request, tenant, error=error)

        return view

    return decorate


def cleaned_or_400(form: forms.Form) -> dict[str, Any]:
    """What the form holds. Raises `InvalidRequest` with the first thing that's wrong."""
    if not form.is_valid():
        field, problems = next(iter(form.errors.items()))
        raise InvalidRequest(f"{field}: {problems[0]}", param=field)
    return form.cleaned_data


def post_text(request: HttpRequest, name: str) -> str | None:
    """A field of the form; None when it's empty."""
    return request.POST.get(name, "").strip() or None


def post_int(request: HttpRequest, name: str) -> int | None:
    """The same as a whole number. Raises `InvalidRequest`."""
    text = post_text(request, name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InvalidRequest(f"{name} must be a whole number, got {text[:50]!r}.", param=name)
    return int(text)
