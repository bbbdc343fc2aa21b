"""Letting a request in: rate limits, and the reservation of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

from redis.exceptions import RedisError

from metering.errors import RateLimited
from metering.limits import Bucket, buckets_of
from metering.redis_clients import key, redis_link
from metering.scripts import run_script
from tenants.authentication import Caller
from tenants.errors import ServiceUnavailable

#: A bucket is full again after a minute, so a reservation means little beyond a few.
RESERVATION_TTL_S = 3600


@dataclass(frozen=True)
class Admission:
    """What the tightest limits are like after this request; None where there's no limit.

    `limit_*`: a minute's worth. `remaining_*`: what is left now. `reset_*_s`: seconds until the
    limit is back to its full. `output_tokens`: what is reserved besides the prompt; more may not
    be generated.
    """

    limit_requests: int | None = None
    remaining_requests: int | None = None
    reset_requests_s: float | None = None
    limit_tokens: int | None = None
    remaining_tokens: int | None = None
    reset_tokens_s: float | None = None
    output_tokens: int | None = None


UNLIMITED = Admission()


def reservation_key(request_id: str) -> str:
    """Where Redis keeps what a running request has reserved."""
    return key(f"reservation:{request_id}")


async def admit(
    caller: Caller,
    *,
    request_id: str,
    endpoint: str,
    model: str,
    prompt_tokens: int,
    max_output_tokens: int,
) -> Admission:
    """Count a request and reserve its tokens in every limit that holds for it, or in none.

    The reservation is prompt + `max_output_tokens`, but never more than a limit's minute; `settle`
    corrects it to what was used.

    Raises: `RateLimited` (429) with `retry_after`; `ServiceUnavailable` (503) without Redis.
    """
    buckets = buckets_of(caller)
    if not buckets:
        return UNLIMITED
    costs = [_cost(bucket, prompt_tokens, max_output_tokens) for bucket in buckets]
    covered = sum(bucket.kind == "tokens" for bucket in buckets)
    arguments = [
        word for b, cost in zip(buckets, costs, strict=True) for word in (b.capacity, cost)
    ]
    keys = [*(bucket.redis_key for bucket in buckets), reservation_key(request_id)]
    try:
        reply = await run_script(
            redis_link(), "admit", keys, [*arguments, covered, RESERVATION_TTL_S]
        )
    except (RedisError, OSError) as error:
        raise ServiceUnavailable("Limits can't be checked right now. Try again.") from error
    taken, refused, wait, *levels = reply
    if not taken:
        bucket, cost = buckets[refused - 1], costs[refused - 1]
        raise _over(bucket, cost, float(levels[refused - 1]), float(wait), model)
    found = _admission(buckets, [float(level) for level in levels])
    reserved = [c for b, c in zip(buckets, costs, strict=True) if b.kind == "tokens"]
    if not reserved:
        return found
    return replace(found, output_tokens=min(reserved) - prompt_tokens)


def _cost(bucket: Bucket, prompt_tokens: int, max_output_tokens: int) -> int:
    """What a request takes from a bucket. Raises `RateLimited` for a prompt that can never fit."""
    if bucket.kind == "requests":
        return 1
    if prompt_tokens > bucket.capacity:
        raise RateLimited(
            f"The prompt has {prompt_tokens} tokens, but the limit of this {bucket.owner} is "
            f"{bucket.capacity} tokens a minute.",
            retry_after=60.0,
        )
    return min(prompt_tokens + max_output_tokens, bucket.capacity)


def _over(bucket: Bucket, cost: int, level: float, wait: float, model: str) -> RateLimited:
    left = max(0, int(level))
    return RateLimited(
        f"Rate limit of this {bucket.owner} reached for {model[:200]}: {bucket.capacity} "
        f"{bucket.kind} a minute, {left} left, {cost} needed. Try again in {wait:.2f} s.",
        retry_after=max(wait, 0.001),
    )


def _admission(buckets: list[Bucket], levels: list[float]) -> Admission:
    values: dict[str, float] = {}
    for kind in ("requests", "tokens"):
        mine = [(lvl, b) for b, lvl in zip(buckets, levels, strict=True) if b.kind == kind]
        if mine:
            level, bucket = min(mine, key=lambda pair: pair[0])
            values[f"limit_{kind}"] = bucket.capacity
            values[f"remaining_{kind}"] = max(0, int(level))
            values[f"reset_{kind}_s"] = (bucket.capacity - level) * 60 / bucket.capacity
    return Admission(**values)  # type: ignore[arg-type]
