"""The alerts page: what is wrong now, what was, and silence, for operators."""

from __future__ import annotations

from django.conf import settings
from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from accounts.reauthentication import reauthentication_required
from common.errors import NotFound
from common.one_time import pop_one_time, store_one_time
from console.views.base import post_int
from engine.contract.errors import InvalidRequest, QuireError
from history.alerts import RULES, access_alerts, silence_alert
from tenants.sessions import UserRequest

PAGE = 50
#: Hours of silence that can be chosen, in words.
SILENCES = {1: "an hour", 24: "a day", 168: "a week"}


@require_safe
@never_cache
@login_required
def alerts(request: UserRequest) -> HttpResponse:
    """Open alerts, then those that are over."""
    return show(request)


def show(request: UserRequest, error: QuireError | None = None) -> HttpResponse:
    """Render the page with the last outcome or error."""
    try:
        rows = access_alerts(request.user)
    except QuireError as refusal:
        context = {"error": refusal, "refused": True}
        return render(request, "console/alerts.html", context, status=refusal.status)
    context = {
        "open": list(rows.filter(finished_at=None)),
        "page": Paginator(rows.exclude(finished_at=None), PAGE).get_page(request.GET.get("page")),
        "silences": SILENCES.items(),
        "rules": [(name, (rule.__doc__ or "").strip()) for name, rule in RULES.items()],
        "can_mail": bool(settings.QUIRE.smtp_url),
        "error": error,
        "told": pop_one_time(request) if request.method == "GET" else {},
    }
    return render(request, "console/alerts.html", context, status=error.status if error else 200)


@reauthentication_required
@require_POST
@never_cache
@login_required
def silence(request: UserRequest, pk: int) -> HttpResponse:
    """Send no mail about an alert for a while."""
    try:
        alert = access_alerts(request.user).filter(pk=pk).first()
        if alert is None:
            raise NotFound("Alert not found.")
        hours = post_int(request, "hours")
        if hours not in SILENCES:
            raise InvalidRequest(
                f"hours must be one of {', '.join(map(str, SILENCES))}.", param="hours"
            )
        silence_alert(actor=request.user, alert=alert, hours=hours)
    except QuireError as error:
        return show(request, error)
    store_one_time(request, text=f"No mail about {alert} for {SILENCES[hours]}.")
    return redirect("alerts")
