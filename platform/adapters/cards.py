"""Adapters that a caller may request, for the data plane; cached for two seconds per tenant.

Only this module resolves names to content. From then on a request uses the digest.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from django.db import DatabaseError, InterfaceError
from django.db.models import Q

from adapters.models import AdapterAlias, AdapterVersion
from adapters.signals import adapters_changed
from adapters.store import content_path
from catalog.access import ModelCard, ModelNotFound, tenant_cards
from catalog.access import access_model as access_base
from catalog.access import access_models as access_bases
from catalog.signals import served_model_changed
from common.cached_lookup import AsyncTTLCache
from common.db import in_admission_thread
from common.errors import ServiceUnavailable
from common.object_storage import has_object_storage
from engine.contract.errors import InvalidRequest
from engine.contract.lora import AdapterRef
from metering.rules import AdapterUse
from tenants.authentication import Caller

TTL_S = 2.0
#: Seconds after a commit until every gateway applies it; 0.5 s for a look-up that was in progress.
SEEN_WITHIN_S = TTL_S + 0.5
#: While the database is down, a tenant keeps the adapters that it had.
STALE_S = 60.0


@dataclass(frozen=True)
class AdapterCard:
    """A name of an adapter, and the versions served under it.

    Attributes:
        name: without its base. base: the served model's. owner: the tenant's slug, "" for shared.
        alias_id: the alias's row, part of the hash that assigns requests to the canary.
        version, canary: what the engine needs; the name in them is the alias's.
        canary_percent: share of the requests, in [0, 99].
    """

    name: str
    base: str
    owner: str
    alias_id: int
    changed_at: datetime
    version: AdapterRef
    canary: AdapterRef | None = None
    canary_percent: int = 0

    @property
    def full_name(self) -> str:
        """`base:name`."""
        return f"{self.base}:{self.name}"

    @property
    def names(self) -> tuple[str, str]:
        """All names by which it can be requested."""
        return self.name, self.full_name

    def choose_version(self, sticky: str) -> AdapterRef:
        """The version for a request: the same for equal `sticky`, random for ""."""
        if self.canary is None:
            return self.version
        if sticky:
            hashed = hashlib.sha256(f"{self.alias_id}\0{sticky}".encode("utf-8", "replace"))
            bucket = int.from_bytes(hashed.digest()[:8], "big") % 100
        else:
            bucket = secrets.randbelow(100)
        return self.canary if bucket < self.canary_percent else self.version

    def billing_for(self, ref: AdapterRef) -> AdapterUse:
        """Names for the ledger and prices.

        A tenant chooses its own adapters' names, so their prices use a name that includes the
        tenant: otherwise it could choose the name of something cheaper.
        """
        prices = (f"{self.full_name}#{self.owner}",) if self.owner else (self.full_name, self.name)
        return AdapterUse(self.name, ref.digest, prices)


@dataclass(frozen=True)
class ModelTarget:
    """A resolved name: a model alone, or a model with an adapter.

    `card`: what the client sees. `base`: the served model's card.
    """

    card: ModelCard
    base: ModelCard
    adapter: AdapterCard | None = None


_card_cache: AsyncTTLCache[int, tuple[AdapterCard, ...]] = AsyncTTLCache(ttl=TTL_S, size=10_000)


async def access_target(caller: Caller, name: str | None) -> ModelTarget:
    """The model or adapter with this name; without one as `catalog.access.access_model`.

    Models take precedence, then the tenant's own adapters, then shared ones. An adapter can be
    requested as `name` or as `base:name`.

    Raises:
        ModelNotFound: (404, `param` "model") it doesn't exist or the caller has no access.
        InvalidRequest: several models have an adapter of this name; or no name and several models.
        ServiceUnavailable: the database is down and nothing usable is cached.
    """
    try:
        card = await access_base(caller, name)
    except ModelNotFound:
        bases = await tenant_cards(caller.tenant_id)
        if name is None or name in bases:
            raise
        adapter = _match_qualified(await _allowed_cards(caller, bases), name, bases)
        if adapter is None:
            raise
        base = bases[adapter.base]
        return ModelTarget(card_of(adapter, base, name), base, adapter)
    return ModelTarget(card, card)


async def access_models(caller: Caller) -> list[ModelCard]:
    """The models that the caller may use, each followed by its adapters.

    Raises: `ServiceUnavailable` as `access_target`.
    """
    bases = await tenant_cards(caller.tenant_id)
    usable = await _allowed_cards(caller, bases)
    visible = _visible_names(usable, bases)
    cards: list[ModelCard] = []
    for base in await access_bases(caller):
        cards += [base, *(visible.pop(base.id, ()) if not base.alias_of else ())]
    return [*cards, *(card for rest in visible.values() for card in rest)]


def card_of(adapter: AdapterCard, base: ModelCard, name: str) -> ModelCard:
    """An adapter's card in `/v1/models`, under the name that the client uses."""
    return replace(
        base,
        id=name,
        created=int(adapter.changed_at.timestamp()),
        owned_by=adapter.owner or "quire",
        root=base.id,
        parent=base.id,
        alias_of="",
        digest=adapter.version.digest,
    )


def _visible_names(
    usable: Sequence[AdapterCard], bases: dict[str, ModelCard]
) -> dict[str, list[ModelCard]]:
    """By base, each adapter under its shortest unambiguous name."""
    visible: dict[str, list[ModelCard]] = {}
    for card in usable:
        short = card.name not in bases and _is_name_unique(usable, card)
        name = card.name if short else card.full_name
        if short or _match_qualified(usable, name, bases) is card:
            visible.setdefault(card.base, []).append(card_of(card, bases[card.base], name))
    return visible


def _is_name_unique(usable: Iterable[AdapterCard], card: AdapterCard) -> bool:
    try:
        return _match_bare(usable, card.name) is card
    except InvalidRequest:
        return False


def _match_qualified(
    usable: Sequence[AdapterCard], name: str, bases: dict[str, ModelCard]
) -> AdapterCard | None:
    """Match `base:name`, where the base may be an alias, or the name alone."""
    for card in usable:
        base, colon, rest = name.rpartition(":")
        if not colon or rest != card.name or base not in bases:
            continue
        if card.base == (bases[base].alias_of or base):
            return card
    return _match_bare(usable, name)


def _match_bare(usable: Iterable[AdapterCard], name: str) -> AdapterCard | None:
    """Prefer the tenant's own to a shared one. Raises `InvalidRequest` for several of a kind."""
    matches = [card for card in usable if card.name == name]
    tenant_matches = [card for card in matches if card.owner]
    candidates = tenant_matches or matches
    if len(candidates) > 1:
        names = ", ".join(sorted(card.full_name for card in candidates))
        raise InvalidRequest(
            f"Several models have an adapter {name[:200]!r}: name one of {names}.", param="model"
        )
    return candidates[0] if candidates else None


async def _allowed_cards(caller: Caller, bases: dict[str, ModelCard]) -> list[AdapterCard]:
    cards = await _of_tenant(caller.tenant_id)
    return [
        card
        for card in cards
        if card.base in bases and caller.can_use_adapter(_names(card, bases), card.base)
    ]


def _names(card: AdapterCard, bases: dict[str, ModelCard]) -> list[str]:
    """The adapter's names in allow-lists; a bare name that is also a model's means the model."""
    return [card.full_name] if card.name in bases else [*card.names]


async def _of_tenant(tenant_id: int) -> tuple[AdapterCard, ...]:
    try:
        return await _card_cache.get(tenant_id, lambda: in_admission_thread(_read, tenant_id))
    except ServiceUnavailable:
        stale = _card_cache.get_if_younger(tenant_id, STALE_S)
        if stale is None:
            raise
        return stale


def _read(tenant_id: int) -> tuple[AdapterCard, ...]:
    """The tenant's own first, by base and name."""
    rows = AdapterAlias.objects.filter(
        Q(tenant_id=tenant_id) | Q(tenant__isnull=True), version__isnull=False
    ).select_related("tenant", "served_model", "version", "canary")
    try:
        cards = [_card(alias) for alias in rows]
    except (DatabaseError, InterfaceError) as error:
        raise ServiceUnavailable(
            "The adapters can't be looked up right now. Try again in a moment."
        ) from error
    return tuple(sorted(cards, key=lambda card: (not card.owner, card.base, card.name)))


def _card(alias: AdapterAlias) -> AdapterCard:
    owner = alias.tenant.slug if alias.tenant is not None else ""
    if alias.version is None:
        raise ValueError(f"{alias} has no version.")
    return AdapterCard(
        name=alias.name,
        base=alias.served_model.name,
        owner=owner,
        alias_id=alias.pk,
        changed_at=alias.changed_at,
        version=_ref(alias.version, alias.name, owner),
        canary=_ref(alias.canary, alias.name, owner) if alias.canary is not None else None,
        canary_percent=alias.canary_percent,
    )


def _ref(version: AdapterVersion, name: str, owner: str) -> AdapterRef:
    path = str(content_path(version.digest))
    report = version.report if isinstance(version.report, dict) else {}
    return AdapterRef(
        digest=version.digest,
        name=name,
        path=path,
        owner=owner,
        tokenizer=str(report.get("tokenizer") or ""),
        vocab_size=int(report.get("vocab_size") or 0),
        num_bytes=version.num_bytes if has_object_storage() else 0,
    )


def forget(**_: object) -> None:
    """Clear this process's cache."""
    _card_cache.clear()


adapters_changed.connect(forget, dispatch_uid="adapters.cards")
served_model_changed.connect(forget, dispatch_uid="adapters.cards")
