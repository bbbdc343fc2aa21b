"""The pages of budgets and prices. Operators set prices."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

from django.conf import settings
from django.utils import timezone

from adapters.access import access_prices_of, names_for, priceable_names, unknown_name_warning
from common.errors import NotFound
from console.views.base import InstallationPage, TenantPage, post_int, post_text
from engine.contract.errors import InvalidRequest
from metering import actions
from metering.budgets import BudgetState, access_budget, access_budgets, access_prices, states_of
from metering.models import Period, Price
from metering.money import amount_text
from tenants.access import access_key, access_keys, access_role
from tenants.actors import to_actor
from tenants.models import Role, Tenant
from tenants.sessions import UserRequest

MAX_BUDGETS = 200
#: Elapsed share of a period from which spending can be extrapolated.
MIN_FORECAST_SHARE = 0.1


def _budgets_context(request: UserRequest, tenant: Tenant) -> dict[str, Any]:
    user = request.user
    manages = access_role(user, tenant).rank >= Role.ADMIN.rank
    rows, names = list(access_budgets(user, tenant)[:MAX_BUDGETS]), names_for(tenant)
    keys = access_keys(user, tenant).filter(revoked_at=None)[:MAX_BUDGETS] if manages else ()
    return {
        "budgets": [_row(state, names) for state in states_of(rows)],
        "names": sorted(names),
        "manages": manages,
        "operator": to_actor(user).is_operator,
        "keys": keys,
        "periods": Period.choices,
        "currency": settings.QUIRE.currency.upper(),
    }


#: The budgets of one of the user's tenants.
budgets = TenantPage("budgets", "budgets", _budgets_context)


def _row(state: BudgetState, names: Collection[str]) -> dict[str, Any]:
    budget = state.budget
    return {
        "budget": budget,
        "of": f"key {budget.api_key.name or budget.api_key.prefix}"
        if budget.api_key
        else "the tenant",
        "model": budget.model or "all",
        "warning": unknown_name_warning(budget.model, names),
        "spent_amount": amount_text(state.nanos),
        "amount": None if budget.amount is None else f"{budget.amount:f}",
        "tokens": state.tokens,
        "percent": state.percent,
        "ends": state.end,
        "forecast": _forecast_percent(state, timezone.now()),
    }


def _forecast_percent(state: BudgetState, now: datetime) -> float | None:
    """Percentage of the budget that will be spent by the end of the period at the current rate;
    None in the first tenth of the period.
    """
    share = (now - state.start) / (state.end - state.start)
    return state.percent / share if share >= MIN_FORECAST_SHARE else None


@budgets.action
def set_budget(request: UserRequest, tenant: Tenant) -> dict[str, Any]:
    """Set a budget, replacing one with the same key, model and period."""
    key_id = post_int(request, "key")
    budget = actions.set_budget(
        actor=request.user,
        tenant=tenant,
        key=None if key_id is None else access_key(request.user, tenant, key_id),
        model=post_text(request, "model") or "",
        period=request.POST.get("period", ""),
        tokens=post_int(request, "tokens"),
        amount=post_text(request, "amount"),
        alert_percent=post_int(request, "alert_percent"),
    )
    warning = unknown_name_warning(budget.model, names_for(tenant))
    return {"text": f"The budget is set: {budget}. {warning or 'Effective now.'}"}


@budgets.action
def delete_budget(request: UserRequest, tenant: Tenant, pk: int) -> dict[str, Any]:
    budget = access_budget(request.user, tenant, pk)
    text = f"The budget is removed: {budget}."
    actions.delete_budget(actor=request.user, budget=budget)
    return {"text": text}


MAX_PRICES = 300


def _prices_context(request: UserRequest) -> dict[str, Any]:
    user = request.user
    now, operator = timezone.now(), to_actor(user).is_operator
    rows = list(access_prices_of(user)[:MAX_PRICES])
    names = priceable_names() if operator else frozenset()
    return {
        "prices": [(price, _state(price, rows, now)) for price in rows],
        "operator": operator,
        "names": sorted(names),
        "currency": settings.QUIRE.currency.upper(),
    }


#: The prices of the models available to the user, newest first for each model.
prices = InstallationPage("prices", "prices", _prices_context)


def _state(price: Price, all_prices: list[Price], now: Any) -> str:
    if price.valid_from > now:
        return "future"
    later = (
        other
        for other in all_prices
        if other.model == price.model and price.valid_from < other.valid_from <= now
    )
    return "past" if next(later, None) else "now"


@prices.action
def set_price(request: UserRequest) -> dict[str, Any]:
    """Set a price from now on or from a future time (UTC)."""
    price = actions.set_price(
        actor=request.user,
        model=post_text(request, "model") or "",
        input_per_million=post_text(request, "input") or "",
        cached_per_million=post_text(request, "cached"),
        output_per_million=post_text(request, "output") or "",
        per_image=post_text(request, "image"),
        per_audio_minute=post_text(request, "audio_minute"),
        valid_from=_parse_time(post_text(request, "valid_from")),
    )
    warning = unknown_name_warning(price.model, priceable_names())
    return {"text": f"The price is set: {price} UTC. {warning}".strip()}


@prices.action
def delete_price(request: UserRequest, pk: int) -> dict[str, Any]:
    """Delete a price that nothing was billed at."""
    price = access_prices().filter(pk=pk).first()
    if price is None:
        raise NotFound("Price not found.")
    actions.delete_price(actor=request.user, price=price)
    return {"text": "The price is removed."}


def _parse_time(text: str | None) -> datetime | None:
    """Parse the value of `<input type="datetime-local">` as UTC. Raises: `InvalidRequest`."""
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC)
    except ValueError as error:
        raise InvalidRequest(f"from: {error}", param="valid_from") from error
