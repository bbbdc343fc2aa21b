"""What a tenant and its keys use: of their limits right now, and in the last days."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import redis
from django.conf import settings

from metering.access import Question, Sums, report
from metering.limits import Bucket, RunningLimit
from metering.redis_clients import sync_client
from tenants.access import access_keys
from tenants.models import ApiKey, Tenant, User

DAYS = 30
MOST_KEYS = 200


@dataclass(frozen=True)
class Limit:
    """A limit with its present use; `used` None: Redis is away, `most` None: no limit."""

    name: str
    most: int | None
    used: int | None

    @property
    def high(self) -> int:
        """From here on it's nearly used up."""
        return (self.most or 0) * 8 // 10


def limits_now(tenant: Tenant) -> list[Limit]:
    """Requests and tokens a minute, and requests at a time."""
    quire = settings.QUIRE
    default = {
        "requests": quire["DEFAULT_REQUESTS_PER_MINUTE"],
        "tokens": quire["DEFAULT_TOKENS_PER_MINUTE"],
    }
    own = {"requests": tenant.requests_per_minute, "tokens": tenant.tokens_per_minute}
    found = []
    client = sync_client()
    try:
        for kind, title in (("requests", "Requests a minute"), ("tokens", "Tokens a minute")):
            given = own[kind]
            most = (default[kind] if given is None else given) or None
            found.append(Limit(title, most, _taken(client, kind, tenant.pk, most)))
        most = tenant.max_running_requests or None
        found.append(Limit("Requests at a time", most, _running(client, tenant.pk, most)))
    finally:
        client.close()
    return found


def _taken(client: redis.Redis, kind: str, pk: int, most: int | None) -> int | None:
    """What of a minute's worth is gone: a bucket refills evenly since it was last touched."""
    if most is None:
        return None
    try:
        level, at = client.hmget(Bucket(kind, "tenant", pk, most).redis_key, "level", "at")
    except redis.RedisError:
        return None
    if level is None or at is None:
        return 0
    now = float(level) + max(0.0, time.time() - float(at)) * most / 60
    return max(0, min(most, round(most - now)))


def _running(client: redis.Redis, pk: int, most: int | None) -> int | None:
    if most is None:
        return None
    try:
        return int(client.scard(RunningLimit("tenant", pk, most).redis_key))
    except redis.RedisError:
        return None


def usage_by_tenant(ids: Sequence[int]) -> dict[int, Sums]:
    """The last `DAYS` days of each, by row."""
    slugs = dict(Tenant.objects.filter(pk__in=ids).values_list("slug", "pk"))
    found: dict[int, Sums] = {}
    for sums in _report(["project_id"], ids):
        pk = slugs.get(sums.group["project_id"] or "")
        if pk is not None:
            _add(found.setdefault(pk, Sums(sums.start)), sums)
    return found


def keys_with_use(user: User, tenant: Tenant) -> list[tuple[ApiKey, Sums | None]]:
    """The keys that the user may see and that aren't revoked, those used last first."""
    keys = access_keys(user, tenant).filter(revoked_at=None)
    found: dict[str, Sums] = {}
    for sums in _report(["api_key_id"], [tenant.pk]):
        name = sums.group["api_key_id"]
        if name:
            _add(found.setdefault(name, Sums(sums.start)), sums)
    rows = list(keys.order_by("-last_used_at", "-pk")[:MOST_KEYS])
    return [(key, found.get(key.public_id)) for key in rows]


def _report(by: list[str], ids: Sequence[int]) -> list[Sums]:
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    question: dict[str, Any] = {"width": "1d", "group_by": by, "tenants": list(ids)}
    first = today - timedelta(days=DAYS - 1)
    return report(Question(start=first, end=today + timedelta(days=1), **question), whole=True)


def _add(into: Sums, sums: Sums) -> None:
    tokens = (sums.prompt_tokens, sums.cached_tokens, sums.completion_tokens)
    into.add((sums.requests, *tokens, sums.cost_nanos))
