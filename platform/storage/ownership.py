"""How much a tenant's stored answers and conversations take, as each process knows it.

The database is asked once a minute.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.core.signals import setting_changed
from django.db.models import Sum
from django.utils import timezone

from common.errors import StorageFull
from storage.models import ItemConversation, SavedConversation, StoredCompletion, StoredResponse
from tenants.actors import Actor, to_actor
from tenants.authentication import Caller
from tenants.models import ActorKind, ApiKey, User


def ownership_fields(caller: Caller) -> dict[str, Any]:
    """Columns of `storage.models.Owned`."""
    return {"tenant_id": caller.tenant_id, "key_id": caller.key_id, "user_id": caller.user_id}


def actor_of(caller: Caller) -> Actor:
    """For the audit log."""
    if caller.user_id is not None:
        user = User.objects.filter(pk=caller.user_id).first()
        if user is not None:
            return to_actor(user)
    key = None if caller.key_id is None else ApiKey.objects.filter(pk=caller.key_id).first()
    return Actor(f"API key {key or caller.key_id}", kind=ActorKind.KEY, key=key)


def default_expiry() -> datetime | None:
    """When what is kept from now on is forgotten; None for never."""
    days = settings.QUIRE.response_days
    return timezone.now() + timedelta(days=days) if days else None


CACHE_TTL_S = 60.0


@dataclass(slots=True)
class _CachedUsage:
    """`size`: in characters. `at`: `time.monotonic()` when the database was asked."""

    size: int
    at: float


_usage_cache: dict[int, _CachedUsage] = {}


def limit() -> int:
    """The most that a tenant's answers may take; 0 is no limit."""
    return settings.QUIRE.tenant_quotas.stored_chars


def is_usage_cached(tenant_id: int) -> bool:
    """Whether `check_storage_quota` need not ask the database before. Of a full tenant it always
    is."""
    known = _usage_cache.get(tenant_id)
    if not limit():
        return True
    return known is not None and known.size < limit() and time.monotonic() - known.at < CACHE_TTL_S


def check_storage_quota(tenant_id: int) -> None:
    """Raise `StorageFull` when the tenant has no room for another answer. May block.

    Processes count for themselves between two looks: a tenant can go over by what it stores in a
    minute.
    """
    if not is_usage_cached(tenant_id):
        size = sum(
            int(kind.objects.filter(tenant_id=tenant_id).aggregate(sum=Sum("size"))["sum"] or 0)
            for kind in (StoredResponse, StoredCompletion, SavedConversation, ItemConversation)
        )
        if len(_usage_cache) > 10_000:
            _usage_cache.clear()
        _usage_cache[tenant_id] = _CachedUsage(size, time.monotonic())
    most = limit()
    if most and _usage_cache[tenant_id].size >= most:
        raise StorageFull(
            f"This tenant's stored answers may take {most} characters and do. Delete some, or set "
            "store to false.",
            param="store",
        )


def add_stored_chars(tenant_id: int, size: int) -> None:
    """An answer of so many characters was stored."""
    known = _usage_cache.get(tenant_id)
    if known is not None:
        known.size += size


def forget(**_: object) -> None:
    """Ask again."""
    _usage_cache.clear()


setting_changed.connect(forget, dispatch_uid="storage.ownership")
