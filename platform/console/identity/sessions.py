"""Ending one of one's own sessions; allauth's page ends all others at once."""

from __future__ import annotations

from typing import Any

from allauth.usersessions.models import UserSession
from django.contrib.auth.decorators import login_required
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_POST

from tenants.actors import as_actor
from tenants.audit import record


@require_POST
@login_required
def end_session(request: HttpRequest, pk: int) -> HttpResponse:
    """End it; its sockets end within two seconds. Raises Http404 for somebody else's."""
    user: Any = request.user
    found = UserSession.objects.filter(user=user, pk=pk).first()
    if found is None:
        raise Http404
    with transaction.atomic():
        record(actor=as_actor(user), action="session.end", target=user, ended_address=found.ip)
        found.end()
    return redirect("usersessions_list")
