"""Letting a request in: rate limits, budgets, and the reservation of its tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from django.conf import settings
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from common.db import in_admission_thread
from common.errors import BudgetSpent, RateLimited, ServiceUnavailable
from engine.system.redis_client import error_code_of
from metering.budgets import rebuild_counters
from metering.money import FREE, Rates, amount_text
from metering.open_requests import (
    GATEWAY,
    RESERVATION_TTL_S,
    OpenRequest,
    open_key,
    reservation_key,
)
from metering.redis_scripts import redis_key, redis_link, run_script
from metering.rules import (
    AdapterUse,
    BudgetLimit,
    ConcurrencyLimit,
    TokenBucket,
    billing_names,
    get_buckets,
    get_concurrency_limits,
    get_rules,
    moment_of,
)
from tenants.authentication import Caller

#: A bucket is full again after a minute, so a reservation means little beyond a few.
ADMISSION_TTL_S = 3600
#: How long a request waits for others to give back what they hold of a budget, and between looks.
WAIT_TIMEOUT_S, POLL_INTERVAL_S, MAX_POLL_INTERVAL_S = 30.0, 0.02, 0.5
#: How long a request waits for a Redis that went away, unless FAILOVER_WAIT_S says otherwise, and
#: between two tries.
REDIS_WAIT_S, REDIS_LOOK_S = 30.0, 0.2
#: When a place among the running requests may be free: nobody can know, clients ask again.
RUNNING_RETRY_S = 1.0

_json = msgspec.json.Encoder()


@dataclass(frozen=True)
class Admission:
    """What the tightest limits are like after this request; None where there's no limit.

    `limit_*`: a minute's worth. `remaining_*`: what is left now. `reset_*_s`: seconds until the
    limit is back to its full. `output_tokens`: what is reserved besides the prompt; more may not
    be generated. `reserved`: whether `settle` has something to give back. `prices`: the prices that
    hold for the request. `epochs`: the counters of its budgets, as they were.
    """

    limit_requests: int | None = None
    remaining_requests: int | None = None
    reset_requests_s: float | None = None
    limit_tokens: int | None = None
    remaining_tokens: int | None = None
    reset_tokens_s: float | None = None
    output_tokens: int | None = None
    reserved: bool = False
    prices: Rates = FREE
    epochs: Mapping[str, str] = field(default_factory=dict)


UNLIMITED = Admission()


def takeover_key(request_id: str) -> str:
    """Which gateway goes on with a request that another one had let in."""
    return redis_key(f"taken:{request_id}")


@dataclass(frozen=True)
class LimitCheck:
    """A request with all limits that hold for it."""

    request_id: str
    model: str
    prompt_tokens: int
    output_tokens: int
    min_output: int
    prices: Rates
    buckets: Sequence[TokenBucket]
    running: Sequence[ConcurrencyLimit]
    budgets: Sequence[BudgetLimit]
    open_request: bytes

    @property
    def keys(self) -> list[str]:
        """As `admit.lua` has them."""
        limits = (*self.buckets, *self.running, *self.budgets)
        names = [limit.redis_key for limit in limits]
        return [*names, reservation_key(self.request_id), open_key(GATEWAY)]

    def arguments(self, costs: Sequence[int], *, partial: bool) -> list[Any]:
        """As `admit.lua` has them."""
        told = {
            "id": self.request_id,
            "buckets": [[b.capacity, cost] for b, cost in zip(self.buckets, costs, strict=True)],
            "covered": sum(bucket.kind == "tokens" for bucket in self.buckets),
            "sets": [limit.max_running for limit in self.running],
            "budgets": [[limit.tokens, limit.nanos, limit.end] for limit in self.budgets],
            "prompt": self.prompt_tokens,
            "output": self.output_tokens,
            "least": self.min_output,
            "picos": [self.prices.prompt, self.prices.output],
            "partial": partial,
            "ttl": RESERVATION_TTL_S if self.budgets or self.running else ADMISSION_TTL_S,
        }
        return [_json.encode(told), self.open_request]


@dataclass(frozen=True, kw_only=True)
class AdmissionRequest:
    """A request that wants to be let in.

    Attributes:
        prompts: how many tokens each prompt has; () for one with `prompt_tokens`. outputs: of each.
        started_at: when the request came, seconds since 1970: its budgets' periods and its price
            are those of that moment.
        adapter: what it goes through; its price holds before the model's, if it has one, and
            budgets narrowed to it hold beside those of the model.
        outbox: the stream that tells what ran, should this gateway die. stream: for the ledger.
        header_id: the `x-request-id` that it came with.
        stream_id, billed, known_token_counts: of a stream that another gateway had, see
        `OpenRequest`.
    """

    request_id: str
    endpoint: str
    model: str
    prompt_tokens: int
    max_output_tokens: int
    started_at: float = field(default_factory=time.time)
    prompts: Sequence[int] = ()
    outputs: int = 1
    adapter: AdapterUse | None = None
    outbox: str = ""
    stream: bool = False
    header_id: str = ""
    stream_id: str = ""
    billed: tuple[int, int] = (0, 0)
    known_token_counts: Mapping[str, int] = field(default_factory=dict)

    def open_request(self, caller: Caller, rates: Rates) -> bytes:
        """What another gateway bills should this one die."""
        adapted = self.adapter or AdapterUse("", "")
        return OpenRequest(
            request_id=self.request_id,
            tenant_id=caller.tenant_id,
            key_id=caller.key_id,
            user_id=caller.user_id,
            endpoint=self.endpoint,
            model=self.model,
            prompts=list(self.prompts) or [self.prompt_tokens],
            outputs=self.outputs,
            started_at=self.started_at,
            stream=self.stream,
            rates=rates,
            outbox=self.outbox,
            adapter=adapted.name,
            adapter_digest=adapted.digest,
            header_id=self.header_id,
            stream_id=self.stream_id,
            billed=self.billed,
            known=dict(self.known_token_counts),
            most=self.max_output_tokens,
        ).encode()


async def admit(caller: Caller, asking: AdmissionRequest) -> Admission:
    """Count a request and reserve its tokens in every limit that holds for it, or in none.

    Of a limit a minute the reservation is prompt + `max_output_tokens`, but never more than the
    minute. Of a budget it's the same, or what is left of it: then `output_tokens` says how many
    may be generated. While others hold what would be enough, the request waits for
    `WAIT_TIMEOUT_S` at most
    before it's content with less. `settle` corrects all of it to what was used.

    Raises: `RateLimited` and `BudgetSpent` (429) with `retry_after`; `ServiceUnavailable` (503)
    without Redis, or without the database while its budgets aren't known.
    """
    asked = await _asked(caller, asking)
    if not (asked.buckets or asked.running or asked.budgets):
        # Nothing to ask, and nothing to wait for; should this gateway die, another one bills it.
        link = redis_link()
        link.send("HSET", open_key(GATEWAY), asking.request_id, asked.open_request)
        link.flush()  # before the engine hears of it, which it does over another connection
        return replace(UNLIMITED, prices=asked.prices, reserved=True)
    return await _reserve_with_retry(asked)


async def take_over_request(
    caller: Caller, asking: AdmissionRequest, *, gateway: str
) -> Admission | None:
    """Go on with a request that another gateway let in: from now on only this one settles it.

    What is reserved stays reserved. None when it was settled already. Raises `ServiceUnavailable`
    without Redis.
    """
    asked = await _asked(caller, asking)
    names = [open_key(gateway), open_key(GATEWAY), takeover_key(asked.request_id)]
    arguments = [asked.request_id, asked.open_request, GATEWAY, RESERVATION_TTL_S]
    try:
        taken = await run_script(redis_link(), "adopt", names, arguments)
    except (RedisError, OSError) as error:
        raise ServiceUnavailable(
            "The stream can't be resumed right now. Try again later."
        ) from error
    return replace(UNLIMITED, prices=asked.prices, reserved=True) if taken else None


async def _asked(caller: Caller, asking: AdmissionRequest) -> LimitCheck:
    """A request with the limits and prices that hold for it."""
    rules = await get_rules(caller)
    moment = moment_of(asking.started_at)
    model, adapter = asking.model, asking.adapter
    names = billing_names(model, adapter.name if adapter is not None else "")
    rates = rules.rates((*(adapter.prices if adapter else ()), model), moment)
    most = asking.max_output_tokens
    return LimitCheck(
        request_id=asking.request_id,
        model=model,
        prompt_tokens=asking.prompt_tokens,
        output_tokens=most,
        min_output=min(most, max(1, len(asking.prompts))),
        prices=rates,
        buckets=get_buckets(caller),
        running=get_concurrency_limits(caller),
        budgets=rules.limits(caller.key_id, names, moment),
        open_request=asking.open_request(caller, rates),
    )


async def _reserve_with_retry(asked: LimitCheck) -> Admission:
    """Take, though Redis goes away meanwhile: who came in time isn't turned away for its restart.

    Asking twice takes once. Raises `ServiceUnavailable` when Redis stays away or refuses.
    """
    until = time.monotonic() + settings.QUIRE.get("FAILOVER_WAIT_S", REDIS_WAIT_S)
    while True:
        try:
            return await _reserve(asked)
        except (RedisError, OSError) as error:
            if not _is_transient(error) or time.monotonic() >= until:
                message = "Limits can't be checked right now. Try again."
                raise ServiceUnavailable(message) from error
            await asyncio.sleep(REDIS_LOOK_S)


def _is_transient(error: RedisError | OSError) -> bool:
    """Whether Redis was cut off or starts; one that refuses commands needs its operator."""
    lost = isinstance(error, OSError | RedisConnectionError | RedisTimeoutError)
    return lost or (isinstance(error, RedisError) and error_code_of(error) == "LOADING")


async def _reserve(asked: LimitCheck) -> Admission:
    """Ask until it's decided: counters are filled, and what others hold is waited for."""
    costs = [_cost(bucket, asked.prompt_tokens, asked.output_tokens) for bucket in asked.buckets]
    patient_until, pause = time.monotonic() + WAIT_TIMEOUT_S, POLL_INTERVAL_S
    while True:
        partial = time.monotonic() >= patient_until
        reply = await run_script(
            redis_link(), "admit", asked.keys, asked.arguments(costs, partial=partial)
        )
        what, index, wait, granted, *levels = reply
        if what == b"unknown":
            await in_admission_thread(rebuild_counters, asked.budgets[index - 1])
        elif what == b"wait":
            await asyncio.sleep(pause)
            pause = min(MAX_POLL_INTERVAL_S, pause * 1.5)
        else:
            break
    if what == b"bucket":
        found = [float(level) for level in levels[: len(asked.buckets)]]
        raise _rate_limited(asked, costs, found, float(wait), index - 1)
    if what == b"set":
        raise _too_many(asked.running[index - 1])
    if what == b"budget":
        raise _budget_exceeded(asked, asked.budgets[index - 1], float(wait))
    return _admitted(asked, costs, levels, granted)


def _admitted(
    asked: LimitCheck, costs: Sequence[int], rest: list[bytes], granted: int
) -> Admission:
    count = len(asked.buckets)
    found = _admission(asked.buckets, [float(level) for level in rest[:count]])
    caps = [
        cost - asked.prompt_tokens
        for bucket, cost in zip(asked.buckets, costs, strict=True)
        if bucket.kind == "tokens"
    ]
    if asked.budgets:
        caps.append(granted)
    epochs = {
        limit.redis_key: epoch.decode()
        for limit, epoch in zip(asked.budgets, rest[count:], strict=True)
    }
    return replace(
        found,
        output_tokens=min(caps) if caps else None,
        reserved=True,
        prices=asked.prices,
        epochs=epochs,
    )


def _cost(bucket: TokenBucket, prompt_tokens: int, max_output_tokens: int) -> int:
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


def _rate_limited(
    asked: LimitCheck, costs: Sequence[int], levels: list[float], wait: float, index: int
) -> RateLimited:
    bucket, cost = asked.buckets[index], costs[index]
    left = max(0, int(levels[index]))
    error = RateLimited(
        f"Rate limit of this {bucket.owner} reached for {asked.model[:200]}: {bucket.capacity} "
        f"{bucket.kind} a minute, {left} left, {cost} needed. Try again in {wait:.2f} s.",
        retry_after=max(wait, 0.001),
    )
    error.headers = rate_limit_headers(_admission(asked.buckets, levels))
    return error


def _too_many(limit: ConcurrencyLimit) -> RateLimited:
    return RateLimited(
        f"Concurrency limit reached for this {limit.owner}: {limit.max_running} running requests. "
        "Try again later.",
        retry_after=RUNNING_RETRY_S,
    )


def _budget_exceeded(asked: LimitCheck, limit: BudgetLimit, wait: float) -> BudgetSpent:
    most = []
    if limit.tokens >= 0:
        most.append(f"{limit.tokens} tokens")
    if limit.nanos >= 0:
        most.append(amount_text(limit.nanos).rstrip("0").rstrip("."))
    return BudgetSpent(
        f"This {limit.owner} of {' and '.join(most)} a {limit.period} has too little left for a "
        f"prompt of {asked.prompt_tokens} tokens. It resets at "
        f"{moment_of(limit.end):%Y-%m-%d %H:%M} UTC.",
        retry_after=max(wait, 1.0),
    )


def _admission(buckets: Sequence[TokenBucket], levels: list[float]) -> Admission:
    values: dict[str, float] = {}
    for kind in ("requests", "tokens"):
        mine = [(lvl, b) for b, lvl in zip(buckets, levels, strict=True) if b.kind == kind]
        if mine:
            level, bucket = min(mine, key=lambda pair: pair[0])
            values[f"limit_{kind}"] = bucket.capacity
            values[f"remaining_{kind}"] = max(0, int(level))
            values[f"reset_{kind}_s"] = (bucket.capacity - level) * 60 / bucket.capacity
    return Admission(**values)  # type: ignore[arg-type]


def rate_limit_headers(admission: Admission) -> dict[str, str]:
    """`x-ratelimit-limit-requests` and its like; none for what has no limit."""
    headers = {}
    for kind in ("requests", "tokens"):
        limit = getattr(admission, f"limit_{kind}")
        if limit is None:
            continue
        headers[f"x-ratelimit-limit-{kind}"] = str(limit)
        headers[f"x-ratelimit-remaining-{kind}"] = str(getattr(admission, f"remaining_{kind}"))
        reset = getattr(admission, f"reset_{kind}_s") or 0.0
        headers[f"x-ratelimit-reset-{kind}"] = f"{reset:.3f}s"
    return headers
