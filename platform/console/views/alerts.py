"""The alerts page for operators: open and past alerts, silencing, and the webhook."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.paginator import Paginator

from common.errors import NotFound
from console.views.base import InstallationPage, post_int, post_text
from console.views.settings import MAX_ROWS
from engine.contract.errors import InvalidRequest
from history.alerts import RULES, access_alerts, silence_alert
from metering import actions
from metering.budgets import access_deliveries, access_delivery, access_webhooks
from tenants.sessions import UserRequest

PAGE = 50
#: Hours of silence to choose from -> label.
SILENCES = {1: "an hour", 24: "a day", 168: "a week"}


def _context(request: UserRequest) -> dict[str, Any]:
    rows = access_alerts(request.user)
    return {
        "open": list(rows.filter(finished_at=None)),
        "page": Paginator(rows.exclude(finished_at=None), PAGE).get_page(request.GET.get("page")),
        "silences": SILENCES.items(),
        "rules": [(name, (rule.__doc__ or "").strip()) for name, rule in RULES.items()],
        "can_mail": bool(settings.QUIRE.smtp_url),
        "webhook": access_webhooks(request.user, None).first(),
        "deliveries": access_deliveries(request.user, None)[:MAX_ROWS],
    }


#: Open alerts, then past ones.
alerts = InstallationPage("alerts", "alerts", _context)


@alerts.action
def silence(request: UserRequest, pk: int) -> dict[str, str]:
    """Silence an alert for some hours: no mail about it, and no event before it ends."""
    alert = access_alerts(request.user).filter(pk=pk).first()
    if alert is None:
        raise NotFound("Alert not found.")
    hours = post_int(request, "hours")
    if hours not in SILENCES:
        raise InvalidRequest(
            f"hours must be one of {', '.join(map(str, SILENCES))}.", param="hours"
        )
    silence_alert(actor=request.user, alert=alert, hours=hours)
    return {"text": f"No mail about {alert}, and no event before its end, for {SILENCES[hours]}."}


@alerts.action
def set_webhook(request: UserRequest) -> dict[str, str]:
    """Set the operators' webhook and create a new secret, shown once."""
    url = post_text(request, "url") or ""
    return {"secret": actions.set_webhook(actor=request.user, tenant=None, url=url).secret}


@alerts.action
def delete_webhook(request: UserRequest) -> dict[str, str]:
    actions.delete_webhook(actor=request.user, tenant=None)
    return {"text": "No more events are sent."}


@alerts.action
def try_webhook(request: UserRequest) -> dict[str, str]:
    """Send the operators' webhook a test event."""
    actions.send_test_event(actor=request.user, tenant=None)
    return {"text": "A test event is being sent. Reload the page in a moment to see the result."}


@alerts.action
def send_again(request: UserRequest, pk: int) -> dict[str, str]:
    """Retry an abandoned event."""
    actions.redeliver(actor=request.user, delivery=access_delivery(request.user, None, pk))
    return {"text": "The event is being sent again."}
