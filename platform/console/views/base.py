"""Helpers shared by the console's views: the current tenant, JSON views and POST actions."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from functools import wraps
from typing import Any
from urllib.parse import urlencode

import redis
from django import forms
from django.contrib.auth.decorators import login_required
from django.http import HttpResponse, JsonResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from accounts.reauthentication import reauthentication_required
from common.errors import NotFound, ServiceUnavailable
from common.one_time import pop_one_time, store_one_time
from engine.contract.errors import InvalidRequest, QuireError
from inference.errors import error_response
from tenants.access import access_tenant, access_tenants, first_tenant
from tenants.authentication import AuthenticationFailed
from tenants.models import Tenant, User
from tenants.sessions import UserRequest

View = Callable[[UserRequest], HttpResponse]
Page = Callable[..., HttpResponseBase]


def page_view(view: Page) -> Page:
    """Serve GET to logged-in users only, and keep the page out of caches."""
    return require_safe(never_cache(login_required(view)))


def form_view(view: Page) -> Page:
    """Like `page_view`, and POST by users who have logged in recently."""
    allowed = require_http_methods(["GET", "HEAD", "POST"])
    return reauthentication_required(allowed(never_cache(login_required(view))))


def change_view(view: Page) -> Page:
    """Serve only POST, by users who have logged in recently."""
    return reauthentication_required(require_POST(never_cache(login_required(view))))


def json_view(function: Callable[[UserRequest], dict[str, Any]]) -> View:
    """Turn a function that returns a dict into a JSON view; 401 without a logged-in user."""

    @require_safe
    @never_cache
    @wraps(function)
    def view(request: UserRequest) -> HttpResponse:
        try:
            if not request.user.is_authenticated:
                raise AuthenticationFailed("Log in first.", code="not_logged_in")
            return JsonResponse(function(request))
        except QuireError as error:
            return error_response(error)
        except redis.RedisError as error:
            unavailable = ServiceUnavailable("Replicas are unknown: no connection to Redis.")
            unavailable.__cause__ = error
            return error_response(unavailable)

    return view


def start_of(day: date) -> datetime:
    """Return the start of a day in UTC."""
    return datetime.combine(day, time.min, UTC)


def end_of(day: date) -> datetime:
    """Return the next midnight in UTC, or the last representable time for `date.max`."""
    if day == date.max:
        return datetime.max.replace(tzinfo=UTC)
    return start_of(day + timedelta(days=1))


MAX_TENANTS = 500
#: Session key of the most recently viewed tenant, which other pages show by default.
SESSION_TENANT = "tenant"


def current_tenant(request: UserRequest) -> Tenant | None:
    """Return the requested tenant, else the one viewed last, else the user's first.

    Raises: `NotFound` if the user may not access the requested tenant.
    """
    user = request.user
    named = request.POST.get("tenant") or request.GET.get("tenant")
    last = request.session.get(SESSION_TENANT)
    if not named:
        previous = access_tenants(user).filter(active=True, slug=last).first() if last else None
        return previous or first_tenant(user)
    tenant = access_tenant(user, named)
    if last != tenant.slug:
        request.session[SESSION_TENANT] = tenant.slug
    return tenant


def require_tenant(request: UserRequest) -> Tenant:
    """Return the current tenant. Raises: `NotFound` also for a user without any."""
    tenant = current_tenant(request)
    if tenant is None:
        raise NotFound("You belong to no tenant.")
    return tenant


def scope_query(request: UserRequest) -> dict[str, str]:
    """Return the query. If it names no tenant, members get the last viewed one, operators all."""
    query = request.GET.dict()
    if not query.get("tenant") and not request.user.is_superuser:
        tenant = current_tenant(request)
        query["tenant"] = tenant.slug if tenant else ""
    return query


def tenant_context(user: User, tenant: Tenant | None) -> dict[str, Any]:
    """Template context of the tenant picker at the top of a page."""
    tenants = list(access_tenants(user).filter(active=True).order_by("name")[:MAX_TENANTS])
    return {"tenant": tenant, "tenants": tenants, "more_tenants": len(tenants) > 1}


def redirect_with_message(
    request: UserRequest, page: str, tenant: Tenant, **outcome: Any
) -> HttpResponse:
    """Redirect to the page, which shows `outcome` once: reloading it doesn't repeat the action."""
    store_one_time(request, tenant=tenant.slug, **outcome)
    return redirect(f"{reverse(page)}?{urlencode({'tenant': tenant.slug})}")


Action = Callable[..., dict[str, Any]]


def post_action(page: str, show: Page) -> Callable[[Action], Page]:
    """Turn a function from request and tenant to an outcome into a POST view.

    Args:
        page: URL name to redirect to, which shows the outcome.
        show: renders the same page with `error=` if the action is refused.
    """

    def decorate(function: Action) -> Page:
        @require_POST
        @never_cache
        @login_required
        @wraps(function)
        def view(request: UserRequest, **kwargs: Any) -> HttpResponseBase:
            tenant = None
            try:
                tenant = require_tenant(request)
                return redirect_with_message(
                    request, page, tenant, **function(request, tenant, **kwargs)
                )
            except QuireError as error:
                return show(request, tenant, error=error)

        return view

    return decorate


class TenantPage:
    """The view of a page about the current tenant, which shows the outcome of its changes once.

    Args:
        name: URL name.
        template: its name in `console/`.
        context: returns the template's own context for a tenant.
    """

    def __init__(
        self, name: str, template: str, context: Callable[[UserRequest, Tenant], dict[str, Any]]
    ) -> None:
        self._name, self._template, self._context = name, f"console/{template}.html", context
        self._view = page_view(self._get)

    def __call__(self, request: UserRequest) -> HttpResponseBase:
        return self._view(request)

    def _get(self, request: UserRequest) -> HttpResponse:
        try:
            tenant = current_tenant(request)
        except QuireError as error:
            return self.show(request, None, error=error)
        stored = pop_one_time(request) if request.method == "GET" and tenant is not None else {}
        outcome = stored if tenant is not None and stored.get("tenant") == tenant.slug else {}
        return self.show(request, tenant, outcome=outcome)

    def show(
        self,
        request: UserRequest,
        tenant: Tenant | None,
        *,
        outcome: dict[str, Any] | None = None,
        error: QuireError | None = None,
    ) -> HttpResponse:
        """Render the page with the last outcome or error."""
        user = request.user
        tenant = tenant or first_tenant(user)
        context = {**tenant_context(user, tenant), "outcome": outcome, "error": error}
        if tenant is not None:
            context |= self._context(request, tenant)
        return render(request, self._template, context, status=error.status if error else 200)

    def action(self, function: Action) -> Page:
        """Turn a function from request and tenant to an outcome into a POST view."""
        return reauthentication_required(post_action(self._name, self.show)(function))


class InstallationPage:
    """The view of a page about the installation, which shows the outcome of its changes once.

    Args:
        name: URL name. template: its name in `console/`.
        context: returns the template's own context; the page shows a `QuireError` as a refusal.
    """

    def __init__(
        self, name: str, template: str, context: Callable[[UserRequest], dict[str, Any]]
    ) -> None:
        self._name, self._template, self._context = name, f"console/{template}.html", context
        self._view = page_view(self.show)

    def __call__(self, request: UserRequest) -> HttpResponseBase:
        return self._view(request)

    def show(self, request: UserRequest, error: QuireError | None = None) -> HttpResponse:
        """Render the page with the last outcome or error."""
        try:
            context = self._context(request)
        except QuireError as refusal:
            context = {"error": refusal, "refused": True}
            return render(request, self._template, context, status=refusal.status)
        context |= {
            "error": error,
            "outcome": pop_one_time(request) if request.method == "GET" else {},
        }
        return render(request, self._template, context, status=error.status if error else 200)

    def action(self, function: Action) -> Page:
        """Turn a function from a request to an outcome into a POST view."""

        @change_view
        @wraps(function)
        def view(request: UserRequest, **kwargs: Any) -> HttpResponse:
            try:
                store_one_time(request, **function(request, **kwargs))
            except QuireError as error:
                return self.show(request, error)
            return redirect(self._name)

        return view


def cleaned_or_400(form: forms.Form) -> dict[str, Any]:
    """Return the form's cleaned data. Raises: `InvalidRequest` with the first error."""
    if not form.is_valid():
        field, errors = next(iter(form.errors.items()))
        raise InvalidRequest(f"{field}: {errors[0]}", param=field)
    return form.cleaned_data


def post_text(request: UserRequest, name: str) -> str | None:
    """Return a stripped POST field; None if empty."""
    return request.POST.get(name, "").strip() or None


def post_int(request: UserRequest, name: str) -> int | None:
    """Return a POST field as a non-negative integer; None if empty. Raises: `InvalidRequest`."""
    text = post_text(request, name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InvalidRequest(f"{name} must be a whole number, got {text[:50]!r}.", param=name)
    return int(text)
