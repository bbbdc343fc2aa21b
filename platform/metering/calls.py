"""Rate limit of calls that don't generate: reports, lists, files, counting tokens."""

from __future__ import annotations

import logging

from redis.exceptions import RedisError

from common.errors import RateLimited
from metering.redis_scripts import redis_link, run_script
from metering.rules import TokenBucket
from tenants.authentication import Caller

logger = logging.getLogger(__name__)

#: Maximum number of calls per minute, of a tenant and of one key.
CALLS_PER_MINUTE = {"tenant": 6_000, "key": 3_000}


async def admit_call(caller: Caller, cost: int) -> None:
    """Count a call as `cost` calls against the per-minute limits of its tenant and its key.

    Without Redis nothing is counted: the call itself may not need Redis.

    Raises: `RateLimited` (429) with `retry_after`.
    """
    ids = {"tenant": caller.tenant_id, "key": caller.key_family or caller.key_id}
    buckets = [
        TokenBucket("calls", owner, owner_id, CALLS_PER_MINUTE[owner])
        for owner, owner_id in ids.items()
        if owner_id is not None
    ]
    names = [bucket.redis_key for bucket in buckets]
    arguments = [
        value for bucket in buckets for value in (min(cost, bucket.capacity), bucket.capacity)
    ]
    try:
        exceeded, wait = await run_script(redis_link(), "take", names, ["all", *arguments])
    except (RedisError, OSError) as error:
        logger.debug("a call was not counted: %s", error)
        return
    if exceeded:
        bucket, seconds = buckets[exceeded - 1], float(wait)
        raise RateLimited(
            f"This {bucket.owner} may make {bucket.capacity} calls a minute that generate nothing; "
            f"this one counts as {cost}. Try again in {seconds:.2f} s.",
            retry_after=max(seconds, 0.001),
        )
