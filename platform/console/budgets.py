"""The page of budgets: what is spent of each, and setting and lifting them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django.conf import settings
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from adapters.names import names_for, warning
from console.deeds import deed, number_of, text_of
from console.identity.recent import recent_authentication_required
from console.tenancy import first_tenant, opened, tenant_context
from engine.contract.errors import QuireError
from metering import actions
from metering.models import Period
from metering.money import amount_text
from metering.spending import BudgetState, access_budget, access_budgets, states_of
from tenants.access import access_key, access_keys, access_role
from tenants.actors import as_actor
from tenants.models import Role, Tenant

MOST = 200


@require_safe
@never_cache
@login_required
def budgets(request: HttpRequest) -> HttpResponse:
    """The budgets of one of the user's tenants."""
    return opened(request, show_budgets)


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
        found, known = list(access_budgets(user, tenant)[:MOST]), names_for(tenant)
        context |= {
            "budgets": [_row(state, known) for state in states_of(found)],
            "manages": manages,
            "operator": as_actor(user).is_operator,
            "keys": access_keys(user, tenant).filter(revoked_at=None)[:MOST] if manages else (),
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
        "warning": warning(budget.model, known),
        "spent_amount": amount_text(state.nanos),
        "amount": None if budget.amount is None else f"{budget.amount:f}",
        "tokens": state.tokens,
        "percent": state.percent,
        "ends": state.end,
    }


@recent_authentication_required
@deed("budgets", show_budgets)
def set_budget(request: HttpRequest, tenant: Tenant) -> dict[str, Any]:
    """Set one; the same key, model and period again changes it."""
    named = number_of(request, "key")
    made = actions.set_budget(
        actor=request.user,
        tenant=tenant,
        key=None if named is None else access_key(request.user, tenant, named),
        model=text_of(request, "model") or "",
        period=request.POST.get("period", ""),
        tokens=number_of(request, "tokens"),
        amount=text_of(request, "amount"),
        alert_percent=number_of(request, "alert_percent"),
    )
    told = warning(made.model, names_for(tenant))
    return {"text": f"The budget is set: {made}. {told or 'It holds from now on.'}"}


@recent_authentication_required
@deed("budgets", show_budgets)
def delete_budget(request: HttpRequest, tenant: Tenant, pk: int) -> dict[str, Any]:
    """Lift one."""
    found = access_budget(request.user, tenant, pk)
    text = f"The budget is removed: {found}."
    actions.delete_budget(actor=request.user, budget=found)
    return {"text": text}
