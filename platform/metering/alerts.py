"""Soft limits: one alert per period when a budget's spending reaches its threshold.

Sent by mail to the tenant's owners and admins, and by its webhook (`metering.webhooks`).
"""

from __future__ import annotations

import logging
from smtplib import SMTPException

from django.conf import settings
from django.core.mail import send_mail
from django.db import transaction

from common.db import pages
from common.errors import RateLimited
from metering.budgets import BudgetState, states_of
from metering.models import Budget
from metering.money import amount_text
from metering.webhooks import create_event
from tenants.models import Membership, Role

logger = logging.getLogger(__name__)


def send_budget_alerts() -> int:
    """Send the alerts that are due; returns the number of budgets.

    Mail and webhook are recorded separately: one that fails is retried at the next call.
    """
    num_sent = 0
    watched = Budget.objects.filter(alert_percent__gt=0, tenant__active=True).order_by("pk")
    for page in pages(list(watched.values_list("pk", flat=True))):
        budgets = watched.filter(pk__in=page).select_related("tenant", "api_key")
        for state in states_of(list(budgets)):
            if state.percent >= state.budget.alert_percent:
                num_sent += _notify(state)
    return num_sent


def _notify(state: BudgetState) -> bool:
    """Whether anything was sent."""
    budget, sent = state.budget, False
    if budget.alerted_for != state.start and _mail(state):
        Budget.objects.filter(pk=budget.pk).update(alerted_for=state.start)
        sent = True
    if budget.webhook_for != state.start:
        try:
            with transaction.atomic():
                if create_event(budget.tenant, "budget.alert", alert_payload(state)) is not None:
                    Budget.objects.filter(pk=budget.pk).update(webhook_for=state.start)
                    sent = True
        except RateLimited as error:
            logger.warning("an alert of %s waits: %s", budget.tenant, error.message)
    return sent


def _mail(state: BudgetState) -> bool:
    if not settings.QUIRE.smtp_url:
        return False
    members = Membership.objects.filter(
        tenant=state.budget.tenant, role__in=(Role.OWNER, Role.ADMIN), user__is_active=True
    )
    addresses = [a for a in members.values_list("user__email", flat=True) if a]
    if not addresses:
        return False
    subject = f"{state.percent:.0f} % of a budget of {state.budget.tenant.slug} is spent"
    text = (
        f"Of the budget ({state.budget}) {state.tokens:,} tokens and {amount_text(state.nanos)} "
        f"{settings.QUIRE.currency} are spent.\nIt resets at "
        f"{state.end:%Y-%m-%d %H:%M} UTC; requests that it can't pay are refused until then.\n"
    )
    try:
        for address in addresses:  # separate mails: recipients don't see each other's addresses
            send_mail(subject, text, None, [address])
    except (SMTPException, OSError) as error:
        logger.warning("an alert was not mailed: %s", error)
        return False
    return True


def alert_payload(state: BudgetState) -> dict[str, object]:
    """The body of a webhook's budget event."""
    budget = state.budget
    return {
        "budget": budget.pk,
        "key": budget.api_key.public_id if budget.api_key else None,
        "model": budget.model or None,
        "period": budget.period,
        "starts_at": state.start.isoformat(),
        "ends_at": state.end.isoformat(),
        "percent": round(state.percent, 2),
        "tokens": {"spent": state.tokens, "limit": budget.tokens},
        "amount": {
            "spent": amount_text(state.nanos),
            "limit": None if budget.amount is None else f"{budget.amount:f}",
            "currency": settings.QUIRE.currency,
        },
    }
