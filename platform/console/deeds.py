"""What the console's pages have in common that change something by POST."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from django import forms
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST

from console.tenancy import done, named_tenant
from engine.contract.errors import InvalidRequest, QuireError
from tenants.errors import NotFound

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
                tenant = named_tenant(request)
                if tenant is None:
                    raise NotFound("You belong to no tenant.")
                return done(request, page, tenant, **function(request, tenant, **where))
            except QuireError as error:
                return show(request, tenant, error=error)

        return view

    return decorate


def checked(form: forms.Form) -> dict[str, Any]:
    """What the form holds. Raises `InvalidRequest` with the first thing that's wrong."""
    if not form.is_valid():
        field, problems = next(iter(form.errors.items()))
        raise InvalidRequest(f"{field}: {problems[0]}", param=field)
    return form.cleaned_data


def text_of(request: HttpRequest, name: str) -> str | None:
    """A field of the form; None when it's empty."""
    return request.POST.get(name, "").strip() or None


def number_of(request: HttpRequest, name: str) -> int | None:
    """The same as a whole number. Raises `InvalidRequest`."""
    text = text_of(request, name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InvalidRequest(f"{name} must be a whole number, got {text[:50]!r}.", param=name)
    return int(text)
