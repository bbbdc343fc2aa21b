"""Rows of adapters that a resolver found for a tenant: kept, checked and taken live as any other.

A tenant gets a version of its own, so what one has resolved is never another's, and what a name
leads to is content: files that change afterwards change nothing that is served.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings
from django.db.models import Q

from adapters import actions, files, room
from adapters.errors import AdapterInvalid
from adapters.hub_resolver import HUB_RESOLVER, is_fetched
from adapters.models import WORKING, Adapter, AdapterVersion, VersionState
from adapters.store import adapters_dir
from catalog.models import ServedModel
from engine.contract.errors import EngineOverloaded
from tenants.actors import Actor
from tenants.models import Tenant

logger = logging.getLogger(__name__)

SOURCE = "resolver:"
#: Of one tenant that may wait for their checks: each loads the model, and others wait behind.
MOST_WAITING = 8
#: What a client is told to wait where waiting helps.
RETRY_AFTER_S = 2.0


@dataclass(frozen=True)
class Sought:
    """An adapter's name, as one tenant asks for it. `base`: the served model's name."""

    tenant_id: int
    base: str
    name: str


@dataclass(frozen=True)
class Known:
    """What is there of it.

    Attributes:
        there: the tenant has an adapter of this name, or there's a shared one. Then its own traffic
            decides, and nobody is asked: who took it offline meant it.
        waiting: the row of a version that a resolver found and a worker has in hand, or is to have.
        refused: why its check refused it; "" if it didn't.
        models: what the base model is called, for resolvers; empty when it's gone.
    """

    there: bool = False
    waiting: int | None = None
    refused: str = ""
    models: tuple[str, ...] = ()


def known(sought: Sought) -> Known:
    """What is there, from the database."""
    owned = Q(tenant_id=sought.tenant_id) | Q(tenant__isnull=True)
    rows = Adapter.objects.filter(owned, served_model__name=sought.base, name=sought.name)
    aliases = Q(aliases__name=sought.name)
    also = Adapter.objects.filter(owned & aliases, served_model__name=sought.base)
    if not rows.exists() and not also.exists():
        return Known(models=_names_of(sought.base))
    own = AdapterVersion.objects.filter(adapter__in=rows.filter(tenant_id=sought.tenant_id))
    newest = own.order_by("-number").first()
    if newest is None or not newest.source.startswith(SOURCE):
        return Known(there=True)
    if newest.state in WORKING:
        return Known(there=True, waiting=newest.pk)
    failed = newest.state == VersionState.FAILED and not own.exclude(pk=newest.pk).exists()
    return Known(there=True, refused=newest.problem if failed else "")


def _names_of(base: str) -> tuple[str, ...]:
    """The source first, as vLLM has it; the served name unless it says the same."""
    source = ServedModel.objects.filter(name=base).values_list("source", flat=True).first()
    if source is None:
        return ()
    return (source,) if Path(source).name == Path(base).name else (source, base)


def take(sought: Sought, resolver: str, path: str) -> int:
    """Store what a resolver found, to go live once it's checked; the version's row.

    Raises: `EngineOverloaded` (429) when too many of the tenant's wait; `AdapterInvalid`,
    `AdapterTooLarge`; `Conflict` when somebody else has just made one of this name.
    """
    found = _allowed(path, resolver)
    waits = AdapterVersion.objects.filter(
        adapter__tenant_id=sought.tenant_id, state__in=WORKING, source__startswith=SOURCE
    )
    if waits.count() >= MOST_WAITING:
        raise too_many()
    logger.info("%s found %s for %s:%s", resolver, found, sought.base, sought.name)
    version = actions.add_staged(
        actor=Actor(f"LoRA resolver {resolver}"),
        tenant=Tenant.objects.get(pk=sought.tenant_id),
        served_model=ServedModel.objects.get(name=sought.base),
        name=sought.name,
        source=f"{SOURCE}{resolver}"[:1000],
        stage=lambda staged: files.stage_folder(found, staged, room.most_of_one()),
        promote=True,
    )
    return version.pk


def too_many() -> EngineOverloaded:
    """For a tenant whose guesses keep everybody busy."""
    error = EngineOverloaded(
        "Too many adapters are being looked up for you. Try again in a moment.", param="model"
    )
    error.retry_after = RETRY_AFTER_S
    return error


def _allowed(path: str, resolver: str) -> Path:
    """The place that a resolver named, links resolved.

    It must lie in a folder that the operator has named, or be what the hub's resolver has just
    fetched. Never in the store: what is there is some tenant's. Raises `AdapterInvalid`, whose
    words tell a tenant nothing about the server.
    """
    places = [*settings.QUIRE["ADAPTER_DIRS"], settings.QUIRE["LORA_RESOLVER_CACHE_DIR"]]
    allowed = [Path(place).expanduser().resolve() for place in places if place]
    found = Path(path).expanduser().resolve()
    inside = any(found.is_relative_to(place) for place in allowed)
    fetched = resolver == HUB_RESOLVER and is_fetched(found)
    if not fetched and (not inside or found.is_relative_to(adapters_dir().resolve())):
        logger.error("%s returned %s, which is outside the allowed directories", resolver, found)
        raise AdapterInvalid(
            "The adapter's files are outside the allowed directories.", param="model"
        )
    if not found.is_dir() and not (found.is_file() and found.suffix == ".gguf"):
        logger.error("%s returned %s, which doesn't exist", resolver, found)
        raise AdapterInvalid("The adapter's files don't exist.", param="model")
    return found
