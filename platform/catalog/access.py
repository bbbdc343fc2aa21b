"""Which models a caller may use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from django.db import DatabaseError, InterfaceError
from django.db.models import Q, QuerySet

from catalog.errors import ModelNotFound
from catalog.events import served_model_changed
from catalog.models import DesiredState, Replica, ServedModel
from tenants.authentication import Caller
from tenants.cached_lookup import CachedLookup
from tenants.db_threads import in_db_thread
from tenants.errors import ServiceUnavailable
from tenants.models import Tenant

__all__ = [
    "ModelCard",
    "ModelNotFound",
    "access_model",
    "access_models",
    "access_replicas",
    "access_served_models",
    "served_model_names",
]

TTL_S = 2.0
#: With the database away, a tenant goes on with the models that it had.
STALE_S = 60.0


@dataclass(frozen=True)
class ModelCard:
    """What a client sees of a model. `created`: seconds since the epoch; `root`: its base model.

    `max_model_len` is None until a replica has said it.
    """

    id: str
    created: int
    owned_by: str
    root: str
    max_model_len: int | None


Cards = dict[str, ModelCard]
T = TypeVar("T")
_names: CachedLookup[str, list[str]] = CachedLookup(ttl=TTL_S, size=1)
_cards: CachedLookup[int, Cards] = CachedLookup(ttl=TTL_S, size=10_000)


async def access_models(caller: Caller) -> list[ModelCard]:
    """The loaded models that are public or shared with the caller's tenant, by name.

    Raises: `ServiceUnavailable` (503) when the database is away and nothing was known lately.
    """
    return list((await _tenant_cards(caller.tenant_id)).values())


async def access_model(caller: Caller, name: str) -> ModelCard:
    """Raises `ModelNotFound` (404, `param` "model") for one that isn't there or isn't theirs."""
    card = (await _tenant_cards(caller.tenant_id)).get(name)
    if card is None:
        raise ModelNotFound(
            f"The model {name[:200]!r} does not exist or you have no access to it.", param="model"
        )
    return card


async def served_model_names() -> list[str]:
    """Names of all models that shall be loaded, whoever may use them: for health, not for callers.

    Raises: `ServiceUnavailable` (503) when the database is away and nothing was known lately.
    """
    return await _remembered(_names, "all", _read_names)


def access_served_models(tenant: Tenant) -> QuerySet[ServedModel]:
    """Rows of the models for a tenant, loaded or not."""
    allowed = Q(public=True) | Q(tenants=tenant)
    return ServedModel.objects.filter(allowed).distinct()


def access_replicas(tenant: Tenant) -> QuerySet[Replica]:
    """Rows of the replicas that serve a tenant's models."""
    models = access_served_models(tenant).values("pk")
    return Replica.objects.filter(served_model__in=models).select_related("served_model")


async def _tenant_cards(tenant_id: int) -> Cards:
    return await _remembered(_cards, tenant_id, lambda: _read_cards(tenant_id))


async def _remembered(cache: CachedLookup[Any, T], name: object, read: Callable[[], T]) -> T:
    """Ask the cache, then the database, then, while that is away, what was known lately."""
    try:
        return await cache.get(name, lambda: in_db_thread(read))
    except ServiceUnavailable:
        stale = cache.within(name, STALE_S)
        if stale is None:
            raise
        return stale


def _read_names() -> list[str]:
    loaded = ServedModel.objects.filter(desired_state=DesiredState.LOADED)
    try:
        return list(loaded.values_list("name", flat=True))
    except (DatabaseError, InterfaceError) as error:
        raise ServiceUnavailable("The catalogue can't be read right now.") from error


def _read_cards(tenant_id: int) -> Cards:
    allowed = Q(public=True) | Q(tenants=tenant_id)
    try:
        loaded = ServedModel.objects.filter(allowed, desired_state=DesiredState.LOADED).distinct()
        return {model.name: _card(model) for model in loaded}
    except (DatabaseError, InterfaceError) as error:
        raise ServiceUnavailable(
            "The models can't be listed right now. Try again in a moment."
        ) from error


def _card(model: ServedModel) -> ModelCard:
    return ModelCard(
        id=model.name,
        created=int(model.created_at.timestamp()),
        owned_by="quire",
        root=model.name,
        max_model_len=model.max_model_len,
    )


def forget(**_: object) -> None:
    """Look everything up anew in this process."""
    _cards.clear()
    _names.clear()


served_model_changed.connect(forget, dispatch_uid="catalog.access")
