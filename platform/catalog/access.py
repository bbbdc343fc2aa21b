"""Access to models: which ones a caller may use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from django.conf import settings
from django.db import DatabaseError, InterfaceError
from django.db.models import Q, QuerySet

from catalog.models import DesiredState, Replica, ServedModel
from catalog.signals import served_model_changed
from common.cached_lookup import AsyncTTLCache
from common.db import in_admission_thread
from common.errors import ModelNotFound, NotFound, ServiceUnavailable
from engine.contract.errors import InvalidRequest
from tenants.actors import Actor, require_operator
from tenants.authentication import Caller
from tenants.models import Tenant, User

__all__ = [
    "ModelCard",
    "ModelNotFound",
    "access_loaded_model",
    "access_model",
    "access_models",
    "access_replicas",
    "access_served_models",
    "get_cached_model",
    "served_model_names",
    "tenant_cards",
]

TTL_S = 2.0
#: While the database is down, a tenant keeps the models that it had.
STALE_S = 60.0


@dataclass(frozen=True)
class ModelCard:
    """A model as clients see it. `created`: seconds since the epoch; `root`: its base model.

    `max_model_len` is None until a replica has reported it. `alias_of`: the model that this name is
    an alias of, "" for a model's own name. `parent`: an adapter's base model, "" for a model;
    `digest`: of the adapter's current content. `fallbacks`: models that answer while it is down.
    `wakes`: it is stopped while idle, and started by the next request. `source`: what it was loaded
    from, which no client is told.
    """

    id: str
    created: int
    owned_by: str
    root: str
    max_model_len: int | None
    alias_of: str = ""
    parent: str = ""
    digest: str = ""
    fallbacks: tuple[str, ...] = ()
    wakes: bool = False
    source: str = ""


ModelCards = dict[str, ModelCard]
T = TypeVar("T")
_names: AsyncTTLCache[str, dict[str, bool]] = AsyncTTLCache(ttl=TTL_S, size=1)
_cards: AsyncTTLCache[int, ModelCards] = AsyncTTLCache(ttl=TTL_S, size=10_000)


async def access_models(caller: Caller) -> list[ModelCard]:
    """The loaded models that are public or shared with the caller's tenant, by name.

    Raises: `ServiceUnavailable` (503) when the database is down and nothing usable is cached.
    """
    cards = await tenant_cards(caller.tenant_id)
    return [card for card in cards.values() if caller.can_use_model(card.id)]


async def access_model(caller: Caller, name: str | None) -> ModelCard:
    """The model with this name, alias or folder; without a name the only one that the caller may
    use, or of several the one that the instance was started with.

    Raises:
        ModelNotFound: (404, `param` "model") it doesn't exist or the caller has no access.
        InvalidRequest: the name is missing, and the caller has several other models.
    """
    return _match_name(await tenant_cards(caller.tenant_id), caller, name)


def get_cached_model(caller: Caller, name: str | None) -> ModelCard | None:
    """Result of `access_model` if it is cached; None if the database must be read or it raises."""
    cards = _cards.peek(caller.tenant_id)
    try:
        return None if cards is None else _match_name(cards, caller, name)
    except (ModelNotFound, InvalidRequest):
        return None


def _match_name(tenant_cards: ModelCards, caller: Caller, name: str | None) -> ModelCard:
    """The caller's model with this name. Raises the errors of `access_model`."""
    cards = {
        card_name: card
        for card_name, card in tenant_cards.items()
        if caller.can_use_model(card_name)
    }
    if not name:
        return _single_model(cards)
    card = cards.get(name)
    if card is None and name.startswith("/"):
        # vLLM's name of a model that was started by its folder.
        folder = name.rstrip("/") or name
        card = next((model for model in cards.values() if model.source == folder), None)
    if card is not None and card.alias_of:
        card = cards.get(card.alias_of)
    if card is None:
        raise ModelNotFound(
            f"The model {name[:200]!r} does not exist or you have no access to it.", param="model"
        )
    return card


def _single_model(cards: ModelCards) -> ModelCard:
    models = {card.id: card for card in cards.values() if not card.alias_of}
    if len(models) == 1:
        return next(iter(models.values()))
    if settings.QUIRE.default_model in models:
        return models[settings.QUIRE.default_model]
    if not cards:
        raise ModelNotFound("You don't have access to any model.", param="model")
    raise InvalidRequest(
        "Missing required parameter: 'model'. This key may use several: see GET /v1/models.",
        param="model",
        code="missing_required_parameter",
    )


async def served_model_names() -> dict[str, bool]:
    """Names of all models that should be loaded, and whether each may have no replica.

    For health checks, not for callers: it ignores access.

    Raises: `ServiceUnavailable` (503) when the database is down and nothing usable is cached.
    """
    return await _cached(_names, "all", _read_names)


def access_loaded_model(name: str) -> ServedModel:
    """The row of a loaded model, for operators; "": chosen as by `access_model`.

    Raises: `NotFound`; `InvalidRequest` without a name if several others are loaded.
    """
    loaded = ServedModel.objects.filter(desired_state=DesiredState.LOADED)
    rows = list((loaded.filter(name=name) if name else loaded)[:2])
    if len(rows) > 1:
        rows = list(loaded.filter(name=settings.QUIRE.default_model))
        if not rows:
            raise InvalidRequest("Several models are served: name one in 'model'.", param="model")
    if not rows:
        raise NotFound(f"Model {name[:200]!r} isn't loaded.", param="model")
    return rows[0]


def access_served_models(tenant: Tenant) -> QuerySet[ServedModel]:
    """Rows of the models for a tenant, loaded or not."""
    allowed = Q(public=True) | Q(tenants=tenant)
    return ServedModel.objects.filter(allowed).distinct()


def access_catalog(user: Actor | User) -> QuerySet[ServedModel]:
    """All models, loaded or not. Raises `PermissionDenied` unless the user is an operator."""
    require_operator(user)
    return ServedModel.objects.prefetch_related("tenants")


def access_replicas(tenant: Tenant) -> QuerySet[Replica]:
    """Rows of the replicas that serve a tenant's models."""
    models = access_served_models(tenant).values("pk")
    return Replica.objects.filter(served_model__in=models).select_related("served_model")


async def tenant_cards(tenant_id: int) -> ModelCards:
    """All models that the tenant may use, by name and alias, regardless of its keys' lists.

    Raises: as `access_models`.
    """
    return await _cached(_cards, tenant_id, lambda: _read_cards(tenant_id))


async def _cached(cache: AsyncTTLCache[Any, T], name: object, read: Callable[[], T]) -> T:
    """Ask the cache, then the database, then, while that is down, older cached data."""
    try:
        return await cache.get(name, lambda: in_admission_thread(read))
    except ServiceUnavailable:
        stale = cache.get_if_younger(name, STALE_S)
        if stale is None:
            raise
        return stale


def _read_names() -> dict[str, bool]:
    loaded = ServedModel.objects.filter(desired_state=DesiredState.LOADED, idle_since=None)
    try:
        return {model.name: model.scales_from_zero for model in loaded}
    except (DatabaseError, InterfaceError) as error:
        raise ServiceUnavailable("The model catalogue is unavailable. Try again later.") from error


def _read_cards(tenant_id: int) -> ModelCards:
    allowed = Q(public=True) | Q(tenants=tenant_id)
    try:
        loaded = ServedModel.objects.filter(allowed, desired_state=DesiredState.LOADED).distinct()
        cards = [card for model in loaded for card in _cards_of(model)]
        return {card.id: card for card in cards}
    except (DatabaseError, InterfaceError) as error:
        raise ServiceUnavailable(
            "The models can't be listed right now. Try again in a moment."
        ) from error


def _cards_of(model: ServedModel) -> list[ModelCard]:
    """The model's card, and one for each alias."""
    card = ModelCard(
        id=model.name,
        created=int(model.created_at.timestamp()),
        owned_by="quire",
        root=model.name,
        max_model_len=model.max_model_len,
        fallbacks=tuple(model.fallbacks),
        wakes=model.idle_minutes > 0,
        source=model.source,
    )
    return [card, *(replace(card, id=name, alias_of=model.name) for name in model.aliases)]


def clear_cache(**_: object) -> None:
    """Clear this process's cache."""
    _cards.clear()
    _names.clear()


served_model_changed.connect(clear_cache, dispatch_uid="catalog.access")
