"""The page of budgets: what is spent of each, and setting and lifting them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django.conf import settings
from django.contrib.auth.decorators import login_required
from django.contrib.messages import get_messages, success
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from accounts.reauthentication import reauthentication_required
from adapters.access import access_prices_of, names_for, priceable_names, unknown_name_warning
from common.errors import NotFound
from console.views.base import deed, post_int, post_text, render_page, tenant_context
from engine.contract.errors import InvalidRequest, QuireError
from metering import actions
from metering.budgets import BudgetState, access_budget, access_budgets, access_prices, states_of
from metering.models import Period, Price
from metering.money import amount_text
from tenants.access import access_key, access_keys, access_role, first_tenant
from tenants.actors import to_actor
from tenants.models import Role, Tenant

MAX_BUDGETS = 200


@require_safe
@never_cache
@login_required
def budgets(request: HttpRequest) -> HttpResponse:
    """The budgets of one of the user's tenants."""
    return render_page(request, show_budgets)


def show_budgets(
    request: HttpRequest,
    tenant: Tenant | None,
    *,
    told: dict[str, Any] | None = None,
    error: QuireError | None = None,
) -> HttpResponse:
    """The page, with what was just done or refused."""
    user: Any = request.user
    tenant = tenant or first_tenant(user)
    context: dict[str, Any] = {**tenant_context(user, tenant), "told": told, "error": error}
    if tenant is not None:
        role = access_role(user, tenant)
        manages = role.rank >= Role.ADMIN.rank
        found, known = list(access_budgets(user, tenant)[:MAX_BUDGETS]), names_for(tenant)
        context |= {
            "budgets": [_row(state, known) for state in states_of(found)],
            "manages": manages,
            "operator": to_actor(user).is_operator,
            "keys": access_keys(user, tenant).filter(revoked_at=None)[:MAX_BUDGETS]
            if manages
            else (),
            "periods": Period.choices,
            "currency": settings.QUIRE["CURRENCY"].upper(),
        }
    return render(request, "console/budgets.html", context, status=error.status if error else 200)


def _row(state: BudgetState, known: Collection[str]) -> dict[str, Any]:
    budget = state.budget
    return {
        "budget": budget,
        "of": f"key {budget.api_key.prefix}" if budget.api_key else "the tenant",
        "model": budget.model or "all",
        "warning": unknown_name_warning(budget.model, known),
        "spent_amount": amount_text(state.nanos),
        "amount": None if budget.amount is None else f"{budget.amount:f}",
        "tokens": state.tokens,
        "percent": state.percent,
        "ends": state.end,
    }


@reauthentication_required
@deed("budgets", show_budgets)
def set_budget(request: HttpRequest, tenant: Tenant) -> dict[str, Any]:
    """Set one; the same key, model and period again changes it."""
    named = post_int(request, "key")
    made = actions.set_budget(
        actor=request.user,
        tenant=tenant,
        key=None if named is None else access_key(request.user, tenant, named),
        model=post_text(request, "model") or "",
        period=request.POST.get("period", ""),
        tokens=post_int(request, "tokens"),
        amount=post_text(request, "amount"),
        alert_percent=post_int(request, "alert_percent"),
    )
    told = unknown_name_warning(made.model, names_for(tenant))
    return {"text": f"The budget is set: {made}. {told or 'It holds from now on.'}"}


@reauthentication_required
@deed("budgets", show_budgets)
def delete_budget(request: HttpRequest, tenant: Tenant, pk: int) -> dict[str, Any]:
    """Lift one."""
    found = access_budget(request.user, tenant, pk)
    text = f"The budget is removed: {found}."
    actions.delete_budget(actor=request.user, budget=found)
    return {"text": text}


# -- The page of prices: what tokens cost, and since when. Operators set them.


MAX_PRICES = 300


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
    found = list(access_prices_of(user)[:MAX_PRICES])
    context = {
        "prices": [(price, _state(price, found, now)) for price in found],
        "operator": to_actor(request.user).is_operator,
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


@reauthentication_required
@require_POST
@never_cache
@login_required
def set_price(request: HttpRequest) -> HttpResponse:
    """A price from now on, or from a moment (UTC) to come."""
    try:
        made = actions.set_price(
            actor=request.user,
            model=post_text(request, "model") or "",
            input_per_million=post_text(request, "input") or "",
            cached_per_million=post_text(request, "cached"),
            output_per_million=post_text(request, "output") or "",
            valid_from=_moment(post_text(request, "valid_from")),
        )
    except QuireError as error:
        return show_prices(request, error)
    told = unknown_name_warning(made.model, priceable_names())
    success(request, f"The price is set: {made} UTC. {told}".strip())
    return redirect("prices")


@reauthentication_required
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
