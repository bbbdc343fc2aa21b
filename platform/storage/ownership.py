"""Size of tenants' stored responses and conversations, cached in each process.

The database is queried once a minute.
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
    """The caller as an actor, for the audit log."""
    if caller.user_id is not None:
        user = User.objects.filter(pk=caller.user_id).first()
        if user is not None:
            return to_actor(user)
    key = None if caller.key_id is None else ApiKey.objects.filter(pk=caller.key_id).first()
    return Actor(f"API key {key or caller.key_id}", kind=ActorKind.KEY, key=key)


def default_expiry() -> datetime | None:
    """Expiry of objects stored now; None for never."""
    days = settings.QUIRE.response_days
    return timezone.now() + timedelta(days=days) if days else None


CACHE_TTL_S = 60.0


@dataclass(slots=True)
class _CachedUsage:
    """`size`: in characters. `read_at`: `time.monotonic()` of the query."""

    size: int
    read_at: float


_usage_cache: dict[int, _CachedUsage] = {}


def limit() -> int:
    """Maximum size of a tenant's stored answers; 0 is no limit."""
    return settings.QUIRE.tenant_quotas.stored_chars


def is_usage_cached(tenant_id: int) -> bool:
    """Whether `check_storage_quota` needs no database query; always False for a full tenant."""
    cached = _usage_cache.get(tenant_id)
    if not limit():
        return True
    return (
        cached is not None
        and cached.size < limit()
        and time.monotonic() - cached.read_at < CACHE_TTL_S
    )


def check_storage_quota(tenant_id: int) -> None:
    """Raise `StorageFull` if the tenant has no space for another answer. May block.

    Between queries each process counts only its own answers, so a tenant can exceed its quota by
    what it stores in a minute.
    """
    if not is_usage_cached(tenant_id):
        size = sum(
            int(kind.objects.filter(tenant_id=tenant_id).aggregate(sum=Sum("size"))["sum"] or 0)
            for kind in (StoredResponse, StoredCompletion, SavedConversation, ItemConversation)
        )
        if len(_usage_cache) > 10_000:
            _usage_cache.clear()
        _usage_cache[tenant_id] = _CachedUsage(size, time.monotonic())
    max_chars = limit()
    if max_chars and _usage_cache[tenant_id].size >= max_chars:
        raise StorageFull(
            f"This tenant's stored answers may take {max_chars} characters and do. Delete some, or "
            "set store to false.",
            param="store",
        )


def add_stored_chars(tenant_id: int, size: int) -> None:
    """Count a stored answer with this many characters."""
    cached = _usage_cache.get(tenant_id)
    if cached is not None:
        cached.size += size


def forget(**_: object) -> None:
    """Clear the cache."""
    _usage_cache.clear()


setting_changed.connect(forget, dispatch_uid="storage.ownership")
