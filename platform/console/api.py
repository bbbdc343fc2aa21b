"""The JSON behind the console's pages, for logged-in people. Errors have the API's envelope."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import redis
from asgiref.sync import async_to_sync
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from adapters.cards import access_models
from catalog.access import access_replicas, access_served_models
from catalog.models import Replica, ServedModel
from console.overview.now import now, snapshot, states_of
from console.replicas import live_replicas
from console.usage import recent_usage
from engine.contract.errors import QuireError
from engine.contract.pooling_params import GENERATE
from inference.errors import error_response
from tenants.access import Reader, access_tenant, access_tenants
from tenants.actors import as_actor
from tenants.authentication import AuthenticationFailed, caller_for_user
from tenants.errors import PermissionDenied, ServiceUnavailable
from tenants.models import User

#: More than that no one chooses from a list.
MOST_TENANTS = 500
View = Callable[[HttpRequest], HttpResponse]


def json_view(function: Callable[[HttpRequest], dict[str, Any]]) -> View:
    """A view of a function from a logged-in user's request to JSON; 401 for nobody."""

    @require_safe
    @never_cache
    @functools.wraps(function)
    def view(request: HttpRequest) -> HttpResponse:
        try:
            if not request.user.is_authenticated:
                raise AuthenticationFailed("Log in first.", code="not_logged_in")
            return JsonResponse(function(request))
        except QuireError as error:
            return error_response(error)
        except redis.RedisError as error:
            told = ServiceUnavailable("Replicas are unknown: no connection to Redis.")
            told.__cause__ = error
            return error_response(told)

    return view


@json_view
def models(request: HttpRequest) -> dict[str, Any]:
    """The models and adapters that the playground may use as this user, with how each one is.

    For `?tenant=` one of the user's tenants, or else the first they joined: the answer says which,
    and names them all. Models that are known to embed or score rather than talk are left out.
    """
    tenants = _tenants(request.user)
    named = request.GET.get("tenant", "")
    tenant = named if named in {each["id"] for each in tenants} else None
    try:
        caller = async_to_sync(caller_for_user)(request.user, tenant)
    except PermissionDenied:
        return {"models": [], "tenant": None, "tenants": []}
    cards = async_to_sync(access_models)(caller)
    names = {card.parent or card.id for card in cards}
    rows = Replica.objects.filter(served_model__name__in=names).select_related("served_model")
    states = states_of(names, live_replicas(), rows)
    found = [
        {
            "id": card.id,
            "parent": card.parent,
            **state,
            "max_model_len": card.max_model_len or state["context"],
        }
        for card in cards
        for state in [states[card.parent or card.id]]
        if GENERATE in (state["tasks"] or [GENERATE])
    ]
    return {"models": found, "tenant": caller.tenant, "tenants": tenants}


@json_view
def overview_json(request: HttpRequest) -> dict[str, Any]:
    """The models that the user's tenants may use, loaded or not, and the replicas behind them.

    With `?tenant=` those of this one.
    """
    return overview_of(request.user, request.GET.get("tenant"))


def overview_of(reader: Reader, tenant: str | None) -> dict[str, Any]:
    """The same for whoever asks. Raises `NotFound` for a stranger's tenant, redis.RedisError."""
    if tenant:
        return now(access_tenant(reader, tenant).pk)
    operator = as_actor(reader).is_operator
    served, rows = _visible(reader, operator)
    return snapshot(served, rows, operator=operator)


@json_view
def usage(request: HttpRequest) -> dict[str, Any]:
    """The last days' usage by tenant and model."""
    return recent_usage(request.user)


def _tenants(user: User) -> list[dict[str, str]]:
    """The tenants that the user may act in, by name; the first `MOST_TENANTS` of an operator's."""
    found = access_tenants(user).filter(active=True).order_by("name", "pk")
    return [{"id": each.slug, "name": each.name} for each in found[:MOST_TENANTS]]


def _visible(user: Reader, operator: bool) -> tuple[list[ServedModel], list[Replica]]:
    """The models and replica rows that the user may see."""
    if operator:
        return list(ServedModel.objects.all()), list(Replica.objects.select_related("served_model"))
    served, rows = ServedModel.objects.none(), Replica.objects.none()
    for tenant in access_tenants(user):
        served = served | access_served_models(tenant)
        rows = rows | access_replicas(tenant)
    return list(served.distinct()), list(rows.distinct())
