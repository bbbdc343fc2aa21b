"""Which token buckets a request takes from, and how many may run beside it."""

from __future__ import annotations

from dataclasses import dataclass

from django.conf import settings

from metering.redis_clients import key
from tenants.authentication import Caller


@dataclass(frozen=True)
class Bucket:
    """One limit. Full it holds a minute's worth, and it refills evenly.

    `kind` is "tokens" or "requests", `owner` "tenant" or "key" (or "user" never: sessions share the
    tenant's), `capacity` a minute's worth, > 0.
    """

    kind: str
    owner: str
    owner_id: int
    capacity: int

    @property
    def redis_key(self) -> str:
        """Where its level is kept."""
        return key(f"limit:{self.kind}:{self.owner}:{self.owner_id}")


def buckets_of(caller: Caller) -> list[Bucket]:
    """The caller's limits, those of tokens first. 0 is no limit; None for a tenant the default."""
    quire = settings.QUIRE
    found = [
        ("tokens", "tenant", caller.tokens_per_minute, quire["DEFAULT_TOKENS_PER_MINUTE"]),
        ("tokens", "key", caller.key_tokens_per_minute, 0),
        ("requests", "tenant", caller.requests_per_minute, quire["DEFAULT_REQUESTS_PER_MINUTE"]),
        ("requests", "key", caller.key_requests_per_minute, 0),
    ]
    # Keys that followed each other by rotation share what the first had.
    ids = {"tenant": caller.tenant_id, "key": caller.key_family or caller.key_id}
    buckets = []
    for kind, owner, limit, default in found:
        capacity, owner_id = default if limit is None else limit, ids[owner]
        if capacity and owner_id is not None:
            buckets.append(Bucket(kind, owner, owner_id, capacity))
    return buckets


@dataclass(frozen=True)
class RunningLimit:
    """How many requests of a tenant or a key may run at a time: `most`, > 0."""

    owner: str
    owner_id: int
    most: int

    @property
    def redis_key(self) -> str:
        """Where those that run are kept, by id."""
        return key(f"running:{self.owner}:{self.owner_id}")


def running_limits_of(caller: Caller) -> list[RunningLimit]:
    """The caller's, the tenant's first."""
    found = [
        ("tenant", caller.tenant_id, caller.max_running_requests),
        ("key", caller.key_family or caller.key_id, caller.key_max_running_requests),
    ]
    return [
        RunningLimit(owner, owner_id, most) for owner, owner_id, most in found if owner_id and most
    ]
