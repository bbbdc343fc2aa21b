"""The page of prices: what tokens cost, and since when. Operators set them."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib.auth.decorators import login_required
from django.contrib.messages import get_messages, success
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from adapters.names import access_prices_of, priced_names, warning
from console.deeds import text_of
from console.identity.recent import recent_authentication_required
from engine.contract.errors import InvalidRequest, QuireError
from metering import actions
from metering.models import Price
from metering.spending import access_prices
from tenants.actors import as_actor
from tenants.errors import NotFound

MOST = 300


@require_safe
@never_cache
@login_required
def prices(request: HttpRequest) -> HttpResponse:
    """Prices of what one may use, each model's newest first."""
    return show_prices(request)


def show_prices(request: HttpRequest, error: QuireError | None = None) -> HttpResponse:
    """The page, with what was refused."""
    user: Any = request.user
    now = timezone.now()
    found = list(access_prices_of(user)[:MOST])
    context = {
        "prices": [(price, _state(price, found, now)) for price in found],
        "operator": as_actor(request.user).is_operator,
        "currency": settings.QUIRE["CURRENCY"].upper(),
        "error": error,
        "told": [str(message) for message in get_messages(request)],
    }
    return render(request, "console/prices.html", context, status=error.status if error else 200)


def _state(price: Price, all_prices: list[Price], now: Any) -> str:
    if price.valid_from > now:
        return "future"
    later = (
        other
        for other in all_prices
        if other.model == price.model and price.valid_from < other.valid_from <= now
    )
    return "past" if next(later, None) else "now"


@recent_authentication_required
@require_POST
@never_cache
@login_required
def set_price(request: HttpRequest) -> HttpResponse:
    """A price from now on, or from a moment (UTC) to come."""
    try:
        made = actions.set_price(
            actor=request.user,
            model=text_of(request, "model") or "",
            input_per_million=text_of(request, "input") or "",
            cached_per_million=text_of(request, "cached"),
            output_per_million=text_of(request, "output") or "",
            valid_from=_moment(text_of(request, "valid_from")),
        )
    except QuireError as error:
        return show_prices(request, error)
    told = warning(made.model, priced_names())
    success(request, f"The price is set: {made} UTC. {told}".strip())
    return redirect("prices")


@recent_authentication_required
@require_POST
@never_cache
@login_required
def delete_price(request: HttpRequest, pk: int) -> HttpResponse:
    """Take back one that hasn't begun."""
    try:
        found = access_prices().filter(pk=pk).first()
        if found is None:
            raise NotFound("Price not found.")
        actions.delete_price(actor=request.user, price=found)
    except QuireError as error:
        return show_prices(request, error)
    success(request, "The price is withdrawn.")
    return redirect("prices")


def _moment(text: str | None) -> Any:
    """What `<input type="datetime-local">` sends, as UTC. Raises `InvalidRequest`."""
    from datetime import UTC, datetime

    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC)
    except ValueError as error:
        raise InvalidRequest(f"from: {error}", param="valid_from") from error
