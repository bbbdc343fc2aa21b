"""A bound on the values of labels: tenants and replicas come and go, series must not pile up."""

from __future__ import annotations

import time
from typing import Any

from redis.asyncio import Redis

from inference.metrics.definitions import ENGINE, FAMILIES, OTHER, TENANT
from inference.metrics.recorder import field_of, split_field

#: The series of a tenant or a replica that sent nothing for so long are dropped.
SILENT_S = 24 * 3600
#: KEYS: a sorted set of names by when they were last heard of. ARGV: now, the bound, names. Returns
#: 1 for each that has a place.
_ADMIT = """
local places = {}
for i = 3, #ARGV do
  local known = redis.call('ZSCORE', KEYS[1], ARGV[i])
  if known or redis.call('ZCARD', KEYS[1]) < tonumber(ARGV[2]) then
    redis.call('ZADD', KEYS[1], ARGV[1], ARGV[i])
    places[#places + 1] = 1
  else
    places[#places + 1] = 0
  end
end
return places
"""


def label_key(prefix: str, label: str) -> str:
    """Key of the values of a label and when each was last heard of."""
    return f"{prefix}:metrics:labels:{label}"


async def bounded(
    redis: Redis, prefix: str, increments: dict[str, float], most_tenants: int
) -> dict[str, float]:
    """The increments, with tenants that have no place as "other". Raises redis.RedisError."""
    split = [(*split_field(field), amount) for field, amount in increments.items()]
    places = await _places(redis, prefix, split, most_tenants)
    merged: dict[str, float] = {}
    for name, labels, part, amount in split:
        if name in _OF_TENANTS:
            # A tenant is the first label of what has one.
            shown = labels[0] if places[labels[0]] else OTHER
            labels = (shown, *labels[1:])
        field = field_of(name, labels, part)
        merged[field] = merged.get(field, 0) + amount
    return merged


_OF_TENANTS = frozenset(name for name, family in FAMILIES.items() if TENANT in family.labels)
_OF_ENGINES = frozenset(name for name, family in FAMILIES.items() if ENGINE in family.labels)


async def _places(
    redis: Redis,
    prefix: str,
    split: list[tuple[str, tuple[str, ...], str, float]],
    most_tenants: int,
) -> dict[str, bool]:
    """Which tenants have a series of their own; replicas always have."""
    now = time.time()
    engines = {labels[1]: now for name, labels, *_ in split if name in _OF_ENGINES}
    tenants = sorted({labels[0] for name, labels, *_ in split if name in _OF_TENANTS})
    if engines:
        await redis.zadd(label_key(prefix, ENGINE), engines)
    if not tenants:
        return {}
    admit = redis.register_script(_ADMIT)
    key = label_key(prefix, TENANT)
    answers = await admit(keys=[key], args=[now, most_tenants, *tenants])
    return {tenant: bool(answer) for tenant, answer in zip(tenants, answers, strict=True)}


async def prune(redis: Redis, prefix: str, hash_key: str) -> None:
    """Drop the series of tenants and replicas that are long silent. Raises redis.RedisError."""
    limit = time.time() - SILENT_S
    for label, place, names in ((TENANT, 0, _OF_TENANTS), (ENGINE, 1, _OF_ENGINES)):
        key = label_key(prefix, label)
        found: Any = await redis.zrangebyscore(key, "-inf", limit)
        silent = {value.decode() for value in found}
        if not silent:
            continue
        dropped: list[bytes] = []
        fields: Any = await redis.hkeys(hash_key)
        for field in fields:
            name, labels, _ = split_field(field.decode())
            if name in names and labels[place] in silent:
                dropped.append(field)
        if dropped:
            await redis.hdel(hash_key, *dropped)
        await redis.zrem(key, *silent)
