"""The operators' page of people: all users with their roles, factors and last activity."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from allauth.mfa.models import Authenticator
from allauth.usersessions.models import UserSession
from django.core.paginator import Paginator
from django.db.models import Count, Max, Prefetch, Q
from django.http import HttpResponse
from django.shortcuts import render

from console.views.base import page_view
from engine.contract.errors import QuireError
from tenants.access import access_users
from tenants.models import ApiKey, Membership, User
from tenants.sessions import UserRequest

PAGE = 50
MAX_QUERY_CHARS = 200


@dataclass(frozen=True)
class Person:
    """A user's row. `standing`: role in the installation; `factors`: second factors set up."""

    user: User
    standing: str
    memberships: list[Membership]
    factors: str
    seen_at: datetime | None
    num_keys: int


@page_view
def people(request: UserRequest) -> HttpResponse:
    """List the users whose name, email or tenant contains `?q=`."""
    query = request.GET.get("q", "").replace("\0", "").strip()[:MAX_QUERY_CHARS]
    try:
        users = access_users(request.user)
    except QuireError as error:
        return render(request, "console/people.html", {"error": error}, status=error.status)
    if query:
        named = Q(username__icontains=query) | Q(email__icontains=query)
        users = users.filter(named | Q(memberships__tenant__name__icontains=query)).distinct()
    memberships = Membership.objects.select_related("tenant").order_by("tenant__name")
    users = users.prefetch_related(Prefetch("memberships", memberships))
    page = Paginator(users, PAGE).get_page(request.GET.get("page"))
    context = {"page": page, "query": query, "people": _people(list(page))}
    return render(request, "console/people.html", context)


def _people(users: list[User]) -> list[Person]:
    ids = [user.pk for user in users]
    kinds = dict(Authenticator.Type.choices)
    factors: dict[int, list[str]] = {}
    for pk, kind in Authenticator.objects.filter(user__in=ids).values_list("user_id", "type"):
        if kind != Authenticator.Type.RECOVERY_CODES:
            factors.setdefault(pk, []).append(str(kinds.get(kind, kind)))
    seen: dict[Any, datetime] = dict(
        UserSession.objects.filter(user__in=ids)
        .order_by()
        .values("user_id")
        .annotate(seen=Max("last_seen_at"))
        .values_list("user_id", "seen")
    )
    keys: dict[Any, int] = dict(
        ApiKey.objects.filter(created_by__in=ids, revoked_at=None, service_account=None)
        .order_by()
        .values("created_by")
        .annotate(num_keys=Count("pk"))
        .values_list("created_by", "num_keys")
    )
    return [
        Person(
            user=user,
            standing=_standing(user),
            memberships=list(user.memberships.all()),
            factors=", ".join(factors.get(user.pk, [])),
            seen_at=max(filter(None, (seen.get(user.pk), user.last_login)), default=None),
            num_keys=keys.get(user.pk, 0),
        )
        for user in users
    ]


def _standing(user: User) -> str:
    if not user.is_active:
        return "deactivated"
    return "operator" if user.is_superuser else "staff" if user.is_staff else ""
