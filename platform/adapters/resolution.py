"""Resolving requests for adapters that don't exist yet, by resolvers, for the requesting tenant.

Resolvers are asked only for valid adapter names, of a model that the caller may use, if the tenant
and the key allow the name.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db.models import Q

from adapters import actions, archive, cards, store
from adapters.cards import ModelTarget, access_target
from adapters.models import WORKING, Adapter, AdapterVersion, VersionState, check_name
from adapters.resolvers import HUB_RESOLVER, is_fetched, lora_resolvers
from adapters.serving import Loaded, state_of
from adapters.store import adapters_dir
from catalog.access import ModelCard, ModelNotFound, tenant_cards
from catalog.models import ServedModel
from common.cached_lookup import AsyncTTLCache
from common.db import run_in_db_thread, run_in_file_thread
from common.errors import AdapterInvalid, AdapterTooLarge, Conflict, ServiceUnavailable
from common.task_queue import check_worker
from engine.contract.errors import EngineOverloaded, InvalidRequest, QuireError
from tenants.actors import Actor
from tenants.authentication import Caller
from tenants.models import Tenant

# Each tenant gets its own version of a resolved adapter, so no tenant uses another's. The version
# is the content: files that change later don't change what is served.

logger = logging.getLogger(__name__)

SOURCE = "resolver:"
#: Maximum number of a tenant's versions that wait for their checks: each check loads the model.
MAX_PENDING_LOOKUPS = 8
#: Seconds that a client should wait before it retries.
RETRY_AFTER_S = 2.0


@dataclass(frozen=True)
class AdapterLookup:
    """An adapter's name as requested by one tenant. `base`: the served model's name."""

    tenant_id: int
    base: str
    name: str


@dataclass(frozen=True)
class LookupState:
    """The database's state of a name.

    Attributes:
        exists: the tenant has an adapter of this name, or there's a shared one. Then its own
            traffic settings decide and no resolver is asked: it may be offline on purpose.
        waiting: the row of a resolved version whose check is pending or running.
        refused: why its check failed; "" if it didn't.
        models: the base model's names, for resolvers; empty if it was deleted.
    """

    exists: bool = False
    waiting: int | None = None
    refused: str = ""
    models: tuple[str, ...] = ()


def get_lookup_state(sought: AdapterLookup) -> LookupState:
    """Read the state of a name from the database."""
    owned = Q(tenant_id=sought.tenant_id) | Q(tenant__isnull=True)
    rows = Adapter.objects.filter(owned, served_model__name=sought.base, name=sought.name)
    aliases = Q(aliases__name=sought.name)
    also = Adapter.objects.filter(owned & aliases, served_model__name=sought.base)
    if not rows.exists() and not also.exists():
        return LookupState(models=_names_of(sought.base))
    tenant_rows = rows.filter(tenant_id=sought.tenant_id)
    versions = AdapterVersion.objects.filter(adapter__in=tenant_rows)
    newest = versions.order_by("-number").first()
    if newest is None or not newest.source.startswith(SOURCE):
        return LookupState(exists=True)
    if newest.state in WORKING:
        return LookupState(exists=True, waiting=newest.pk)
    failed = newest.state == VersionState.FAILED and not versions.exclude(pk=newest.pk).exists()
    return LookupState(exists=True, refused=newest.problem if failed else "")


def _names_of(base: str) -> tuple[str, ...]:
    """The base model's names as vLLM passes them: the source first, then the served name."""
    source = ServedModel.objects.filter(name=base).values_list("source", flat=True).first()
    if source is None:
        return ()
    return (source,) if Path(source).name == Path(base).name else (source, base)


def import_resolved(sought: AdapterLookup, resolver: str, path: str) -> int:
    """Store a resolved adapter, to be made live after its check; returns the version's row.

    Raises: `EngineOverloaded` (429) if too many of the tenant's versions wait; `AdapterInvalid`,
    `AdapterTooLarge`; `Conflict` if another process has just created one of this name.
    """
    source = _allowed(path, resolver)
    waits = AdapterVersion.objects.filter(
        adapter__tenant_id=sought.tenant_id, state__in=WORKING, source__startswith=SOURCE
    )
    if waits.count() >= MAX_PENDING_LOOKUPS:
        raise too_many_lookups()
    logger.info("%s found %s for %s:%s", resolver, source, sought.base, sought.name)
    version = actions.add_staged(
        actor=Actor(f"LoRA resolver {resolver}"),
        tenant=Tenant.objects.get(pk=sought.tenant_id),
        served_model=ServedModel.objects.get(name=sought.base),
        name=sought.name,
        source=f"{SOURCE}{resolver}"[:1000],
        stage=lambda staged: archive.stage_folder(source, staged, store.max_adapter_bytes()),
        promote=True,
    )
    return version.pk


def too_many_lookups() -> EngineOverloaded:
    """The error for a tenant with too many running lookups."""
    error = EngineOverloaded(
        "Too many adapters are being looked up for you. Try again in a moment.", param="model"
    )
    error.retry_after = RETRY_AFTER_S
    return error


def _allowed(path: str, resolver: str) -> Path:
    """The path that a resolver returned, with links resolved.

    It must lie in a folder that the operator has configured, or in the hub resolver's download.
    Never in the store, which holds other tenants' content. Raises `AdapterInvalid`, whose message
    reveals nothing about the server.
    """
    folders = [*settings.QUIRE.adapter_dirs, settings.QUIRE.lora_resolver_cache_dir]
    allowed = [folder.resolve() for folder in folders if folder is not None]
    resolved = Path(path).expanduser().resolve()
    inside = any(resolved.is_relative_to(folder) for folder in allowed)
    fetched = resolver == HUB_RESOLVER and is_fetched(resolved)
    if not fetched and (not inside or resolved.is_relative_to(adapters_dir().resolve())):
        logger.error("%s returned %s, which is outside the allowed directories", resolver, resolved)
        raise AdapterInvalid(
            "The adapter's files are outside the allowed directories.", param="model"
        )
    if not resolved.is_dir() and not (resolved.is_file() and resolved.suffix == ".gguf"):
        logger.error("%s returned %s, which doesn't exist", resolver, resolved)
        raise AdapterInvalid("The adapter's files don't exist.", param="model")
    return resolved


#: Seconds for which a name that no resolver knew isn't looked up again.
TTL_S = 5.0
ANSWER_WITHIN_S = 60.0
#: Maximum wait for a check, which loads the model. Repeated requests join the wait.
CHECKED_WITHIN_S = 60.0
POLL_INTERVAL_S = 0.2
#: Maximum number of concurrent look-ups per tenant in this process.
MAX_CONCURRENT_LOOKUPS = 8
MAX_NAME = 100


class StillValidating(ServiceUnavailable):
    retry_after = RETRY_AFTER_S


@dataclass(frozen=True)
class ResolveOutcome:
    """`exists`: it is live now. `refused`: why it exists but can't be served."""

    exists: bool = False
    refused: str = ""


_outcomes: AsyncTTLCache[AdapterLookup, ResolveOutcome] = AsyncTTLCache(ttl=TTL_S, size=10_000)
_in_progress: Counter[int] = Counter()


async def get_or_resolve_target(caller: Caller, name: str | None) -> ModelTarget:
    """Like `access_target`, but missing names are resolved.

    Raises: the errors of `access_target`; `AdapterInvalid` for a resolved adapter that can't be
    served, `EngineOverloaded` (429) for too many at a time, `ServiceUnavailable` (503) during its
    check or if a resolver fails.
    """
    try:
        return await access_target(caller, name)
    except ModelNotFound:
        if name is None or not lora_resolvers() or not await _resolve(caller, name):
            raise
    cards.forget()
    return await access_target(caller, name)


async def _resolve(caller: Caller, name: str) -> bool:
    """Whether it's live under a base of the caller's. Raises as `get_or_resolve_target`."""
    imported = False
    refused = ""
    for base, short in _candidate_names(caller, name, await tenant_cards(caller.tenant_id)):
        lookup = AdapterLookup(caller.tenant_id, base, short)
        outcome = await _outcomes.get(lookup, partial(_resolve_once, lookup))
        imported = imported or outcome.exists
        refused = refused or outcome.refused
    if refused and not imported:
        raise AdapterInvalid(f"The adapter {name!r} can't be served: {refused}", param="model")
    return imported


def _candidate_names(
    caller: Caller, name: str, bases: dict[str, ModelCard]
) -> list[tuple[str, str]]:
    """Base and short name of each adapter that the name may mean; none for a model's own name."""
    prefix, colon, short = name.rpartition(":")
    base_names = sorted({card.alias_of or base for base, card in bases.items()})
    if colon:
        base_names = [bases[prefix].alias_of or prefix] if prefix in bases else []
    if name in bases or len(short) > MAX_NAME:
        return []
    try:
        check_name(short)
    except ValidationError:
        return []
    bare = [] if short in bases else [short]
    return [
        (base, short)
        for base in base_names
        if caller.can_use_adapter([f"{base}:{short}", *bare], base)
    ]


async def _resolve_once(sought: AdapterLookup) -> ResolveOutcome:
    """The look-up shared by all concurrent requests for the name."""
    if _in_progress[sought.tenant_id] >= MAX_CONCURRENT_LOOKUPS:
        raise too_many_lookups()
    _in_progress[sought.tenant_id] += 1
    try:
        state = await run_in_db_thread(get_lookup_state, sought)
        if state.waiting is not None:
            return await _checked(state.waiting)
        if state.exists:
            return ResolveOutcome(refused=state.refused)
        return await _try_resolvers(sought, state)
    finally:
        _in_progress[sought.tenant_id] -= 1
        if not _in_progress[sought.tenant_id]:
            del _in_progress[sought.tenant_id]


async def _try_resolvers(sought: AdapterLookup, state: LookupState) -> ResolveOutcome:
    """Try the resolvers in order until one returns an adapter that can be served."""
    refused, trouble = "", False
    for resolver in lora_resolvers():
        for model in state.models:
            try:
                path = await _path(resolver, model, sought.name)
                if path is None:
                    continue
                outcome = await _import_resolved(sought, resolver, path)
            except (AdapterInvalid, AdapterTooLarge) as error:
                outcome = ResolveOutcome(refused=error.message)
            except QuireError:
                raise
            except ConnectionError as error:  # its back end is down: the log says which
                logger.error("The LoRA resolver %s failed for %r: %s", resolver, sought.name, error)
                trouble = True
                continue
            except Exception:
                logger.exception("The LoRA resolver %s failed for %r.", resolver, sought.name)
                trouble = True
                continue
            if outcome.exists:
                return outcome
            refused = refused or outcome.refused
    if trouble and not refused:
        raise ServiceUnavailable("The adapter can't be looked up right now. Try again in a moment.")
    return ResolveOutcome(refused=refused)


async def _path(resolver: str, model: str, name: str) -> str | None:
    """Ask a resolver for the adapter's path. Raises what the resolver raises, TimeoutError."""
    asked = lora_resolvers()[resolver].resolve_lora(model, name)
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            request = await asked
    except (AdapterInvalid, AdapterTooLarge):
        raise
    except InvalidRequest as error:  # an invalid `LoRARequest`
        raise ValueError(error.message) from error
    return None if request is None else str(request.lora_path)


async def _import_resolved(sought: AdapterLookup, resolver: str, path: str) -> ResolveOutcome:
    try:
        return await _checked(await run_in_file_thread(import_resolved, sought, resolver, path))
    except Conflict:  # another process was faster
        state = await run_in_db_thread(get_lookup_state, sought)
    if state.waiting is not None:
        return await _checked(state.waiting)
    return ResolveOutcome(exists=not state.refused, refused=state.refused)


async def _checked(version: int) -> ResolveOutcome:
    """Wait for its check. Raises `ServiceUnavailable` on timeout, or if no worker runs."""
    deadline = time.monotonic() + CHECKED_WITHIN_S
    while time.monotonic() < deadline:
        state, problem = await run_in_db_thread(state_of, Loaded(version))
        if state == "live":
            return ResolveOutcome(exists=True)
        if state == "failed":
            return ResolveOutcome(refused=problem or "its check has failed.")
        if state not in ("uploaded", "fetching", "validating", "probing", "ready"):
            return ResolveOutcome()
        await run_in_db_thread(check_worker)
        await asyncio.sleep(POLL_INTERVAL_S)
    raise StillValidating(
        "The adapter is still being checked. Try again in a moment.", param="model"
    )


def forget() -> None:
    """Clear this process's cache."""
    _outcomes.clear()
    lora_resolvers.cache_clear()
