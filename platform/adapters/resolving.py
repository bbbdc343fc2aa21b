"""A request names an adapter that isn't there: resolvers may find it, for the tenant that asks.

Nobody is asked for a stranger: only for a name that an adapter may have, of a model that the caller
may use, where tenant and key allow that name.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial

from django.core.exceptions import ValidationError

from adapters import cards
from adapters.cards import Target, access_target
from adapters.errors import AdapterInvalid, AdapterTooLarge, Conflict
from adapters.models.adapter import check_name
from adapters.resolved import RETRY_AFTER_S, Known, Sought, known, take, too_many
from adapters.resolvers import lora_resolvers
from adapters.serving import Loaded, state_of
from catalog.access import ModelCard, ModelNotFound, tenant_cards
from engine.contract.errors import InvalidRequest, QuireError
from tenants.authentication import Caller
from tenants.cached_lookup import CachedLookup
from tenants.db_threads import in_db_thread, in_file_thread
from tenants.errors import ServiceUnavailable

logger = logging.getLogger(__name__)

#: What nobody found isn't looked for again so soon.
TTL_S = 5.0
ANSWER_WITHIN_S = 60.0
#: A check loads the model. Who asks again joins the wait.
CHECKED_WITHIN_S = 60.0
LOOK_S = 0.2
#: Look-ups of one tenant at a time, in this process.
MOST_AT_ONCE = 8
MAX_NAME = 100


class _StillChecked(ServiceUnavailable):
    retry_after = RETRY_AFTER_S


@dataclass(frozen=True)
class _Outcome:
    """`found`: it's live now. `refused`: there's one, but it can't be served."""

    found: bool = False
    refused: str = ""


_outcomes: CachedLookup[Sought, _Outcome] = CachedLookup(ttl=TTL_S, size=10_000)
_busy: Counter[int] = Counter()


async def access_or_resolve(caller: Caller, name: str | None) -> Target:
    """As `access_target`; a name that isn't there is looked for by the resolvers.

    Raises: as `access_target`; `AdapterInvalid` for what was found and can't be served,
    `EngineOverloaded` (429) for too many at a time, `ServiceUnavailable` (503) while it's checked
    or a resolver is in trouble.
    """
    try:
        return await access_target(caller, name)
    except ModelNotFound:
        if name is None or not lora_resolvers() or not await _resolve(caller, name):
            raise
    cards.forget()
    return await access_target(caller, name)


async def _resolve(caller: Caller, name: str) -> bool:
    """Whether it's live now under a base of the caller's. Raises as `access_or_resolve`."""
    found = False
    refused = ""
    for base, short in _places(caller, name, await tenant_cards(caller.tenant_id)):
        sought = Sought(caller.tenant_id, base, short)
        outcome = await _outcomes.get(sought, partial(_look, sought))
        found = found or outcome.found
        refused = refused or outcome.refused
    if refused and not found:
        raise AdapterInvalid(f"The adapter {name!r} can't be served: {refused}", param="model")
    return found


def _places(caller: Caller, name: str, bases: dict[str, ModelCard]) -> list[tuple[str, str]]:
    """Base and short name of each adapter that the caller may mean; none for a model's own name."""
    prefix, colon, short = name.rpartition(":")
    own = sorted({card.alias_of or each for each, card in bases.items()})
    if colon:
        own = [bases[prefix].alias_of or prefix] if prefix in bases else []
    if name in bases or len(short) > MAX_NAME:
        return []
    try:
        check_name(short)
    except ValidationError:
        return []
    bare = [] if short in bases else [short]
    return [
        (base, short) for base in own if caller.may_use_adapter([f"{base}:{short}", *bare], base)
    ]


async def _look(sought: Sought) -> _Outcome:
    """Everything that's to be done once for all who ask now."""
    if _busy[sought.tenant_id] >= MOST_AT_ONCE:
        raise too_many()
    _busy[sought.tenant_id] += 1
    try:
        there = await in_db_thread(known, sought)
        if there.waiting is not None:
            return await _checked(there.waiting)
        if there.there:
            return _Outcome(refused=there.refused)
        return await _ask(sought, there)
    finally:
        _busy[sought.tenant_id] -= 1
        if not _busy[sought.tenant_id]:
            del _busy[sought.tenant_id]


async def _ask(sought: Sought, there: Known) -> _Outcome:
    """One resolver after the other, until what one has found can be served."""
    refused, trouble = "", False
    for resolver in lora_resolvers():
        for model in there.models:
            try:
                path = await _path(resolver, model, sought.name)
                if path is None:
                    continue
                outcome = await _taken(sought, resolver, path)
            except (AdapterInvalid, AdapterTooLarge) as error:
                outcome = _Outcome(refused=error.message)
            except QuireError:
                raise
            except ConnectionError as error:  # of what it asks: who reads the log knows what to do
                logger.error("The LoRA resolver %s failed for %r: %s", resolver, sought.name, error)
                trouble = True
                continue
            except Exception:
                logger.exception("The LoRA resolver %s failed for %r.", resolver, sought.name)
                trouble = True
                continue
            if outcome.found:
                return outcome
            refused = refused or outcome.refused
    if trouble and not refused:
        raise ServiceUnavailable("The adapter can't be looked up right now. Try again in a moment.")
    return _Outcome(refused=refused)


async def _path(resolver: str, model: str, name: str) -> str | None:
    """Where a resolver says the adapter is. Raises what the resolver raises, TimeoutError."""
    asked = lora_resolvers()[resolver].resolve_lora(model, name)
    try:
        found = await asyncio.wait_for(asked, ANSWER_WITHIN_S)
    except (AdapterInvalid, AdapterTooLarge):
        raise
    except InvalidRequest as error:  # a `LoRARequest` that can't be one
        raise ValueError(error.message) from error
    return None if found is None else str(found.lora_path)


async def _taken(sought: Sought, resolver: str, path: str) -> _Outcome:
    try:
        return await _checked(await in_file_thread(take, sought, resolver, path))
    except Conflict:  # another process was faster
        there = await in_db_thread(known, sought)
    if there.waiting is not None:
        return await _checked(there.waiting)
    return _Outcome(found=not there.refused, refused=there.refused)


async def _checked(version: int) -> _Outcome:
    """Wait for its check. Raises `ServiceUnavailable` when that takes long."""
    deadline = time.monotonic() + CHECKED_WITHIN_S
    while time.monotonic() < deadline:
        state, problem = await in_db_thread(state_of, Loaded(version))
        if state == "live":
            return _Outcome(found=True)
        if state == "failed":
            return _Outcome(refused=problem or "its check has failed.")
        if state not in ("uploaded", "fetching", "validating", "probing", "ready"):
            return _Outcome()
        await asyncio.sleep(LOOK_S)
    raise _StillChecked("The adapter is still being checked. Try again in a moment.", param="model")


def forget() -> None:
    """Look for everything anew in this process."""
    _outcomes.clear()
    lora_resolvers.cache_clear()
