"""Which models a caller may use."""

from __future__ import annotations

from dataclasses import dataclass

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


def access_served_models(tenant: Tenant) -> QuerySet[ServedModel]:
    """Rows of the models for a tenant, loaded or not."""
    allowed = Q(public=True) | Q(tenants=tenant)
    return ServedModel.objects.filter(allowed).distinct()


def access_replicas(tenant: Tenant) -> QuerySet[Replica]:
    """Rows of the replicas that serve a tenant's models."""
    models = access_served_models(tenant).values("pk")
    return Replica.objects.filter(served_model__in=models).select_related("served_model")


async def _tenant_cards(tenant_id: int) -> Cards:
    found = _cards.fresh(tenant_id)
    if found is not None:
        return found
    try:
        return await _cards.get(tenant_id, lambda: in_db_thread(_read_cards, tenant_id))
    except ServiceUnavailable:
        stale = _cards.within(tenant_id, STALE_S)
        if stale is None:
            raise
        return stale


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


served_model_changed.connect(forget, dispatch_uid="catalog.access")
