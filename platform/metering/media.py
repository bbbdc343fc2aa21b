"""Limits on the images, videos, documents and audio files of requests."""

from __future__ import annotations

from collections.abc import Mapping

from redis.exceptions import RedisError

from common.errors import RateLimited, ServiceUnavailable
from metering.redis_scripts import redis_link, run_script
from metering.rules import TokenBucket
from tenants.authentication import Caller
from tenants.caller import MediaLimits

_UNITS = {"media": "media", "media_bytes": "bytes of media", "media_seconds": "seconds of decoding"}


async def admit_media(caller: Caller, *, count: int, num_bytes: int, param: str) -> None:
    """Count a request's media, before any is fetched or decoded.

    `num_bytes`: total of the known sizes. `param`: the media's field in the request.

    Raises: `RateLimited` (429) with `retry_after`, also while an earlier charge has overdrawn a
        limit; `ServiceUnavailable` (503) without Redis.
    """
    # Seconds aren't known yet, so 0: refuses only while an earlier charge has overdrawn the limit.
    amounts = {"media": count, "media_bytes": num_bytes, "media_seconds": 0}
    for bucket in _buckets(caller):
        if (amount := amounts[bucket.kind]) > bucket.capacity:
            raise RateLimited(
                f"The request has {amount} {_UNITS[bucket.kind]}, but the limit of this "
                f"{bucket.owner} is {bucket.capacity} a minute.",
                retry_after=60.0,
                param=param,
            )
    if refused := await _acquire(caller, "all", amounts):
        bucket, wait = refused
        raise RateLimited(
            f"Rate limit of this {bucket.owner} reached: {bucket.capacity} {_UNITS[bucket.kind]} a "
            f"minute. Try again in {wait:.2f} s.",
            retry_after=max(wait, 0.001),
            param=param,
        )


async def charge_media(caller: Caller, *, num_bytes: int = 0, seconds: float = 0.0) -> None:
    """Charge a medium's actual amount; the next ones wait until the limit has refilled.

    Raises: `ServiceUnavailable` (503) without Redis.
    """
    await _acquire(caller, "debt", {"media_bytes": num_bytes, "media_seconds": seconds})


async def _acquire(
    caller: Caller, mode: str, amounts: Mapping[str, float]
) -> tuple[TokenBucket, float] | None:
    """Take from the limits of these kinds. `mode`: as in `take.lua`.

    Returns the limit that refused and the seconds until it has enough.
    """
    buckets = [bucket for bucket in _buckets(caller) if bucket.kind in amounts]
    if not buckets:
        return None
    names = [bucket.redis_key for bucket in buckets]
    arguments = [
        value for bucket in buckets for value in (f"{amounts[bucket.kind]:.6f}", bucket.capacity)
    ]
    try:
        exceeded, wait = await run_script(redis_link(), "take", names, [mode, *arguments])
    except (RedisError, OSError) as error:
        raise ServiceUnavailable("Limits can't be checked right now. Try again.") from error
    return (buckets[exceeded - 1], float(wait)) if exceeded else None


def _buckets(caller: Caller) -> list[TokenBucket]:
    """The caller's limits on media, the tenant's first."""
    limits = (
        ("tenant", caller.tenant_id, caller.media_limits),
        ("key", caller.key_family or caller.key_id, caller.key_media_limits),
    )
    return [
        TokenBucket(kind, owner, owner_id, capacity)
        for owner, owner_id, values in limits
        for kind, capacity in zip(MediaLimits._fields, values, strict=True)
        if capacity and owner_id is not None
    ]
