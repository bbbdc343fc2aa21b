"""Admission: rate limits, budgets, and the reservation of a request's tokens."""

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
from metering.money import FREE, MAX_NANOS, Rates, amount_text
from metering.open_requests import (
    GATEWAY,
    RESERVATION_TTL_S,
    OpenRequest,
    open_key,
    reservation_key,
)
from metering.redis_scripts import redis_key, redis_link, run_script
from metering.rules import (
    BENCHMARK,
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

#: A bucket refills within a minute, so an older reservation has no effect.
ADMISSION_TTL_S = 3600
#: Maximum wait for others to release their reservations of a budget, and poll intervals.
WAIT_TIMEOUT_S, POLL_INTERVAL_S, MAX_POLL_INTERVAL_S = 30.0, 0.02, 0.5
#: Wait between two attempts while Redis is unreachable.
REDIS_RETRY_S = 0.2
#: `retry_after` of a concurrency limit: when a running request will end isn't known.
RUNNING_RETRY_S = 1.0

_json = msgspec.json.Encoder()


@dataclass(frozen=True)
class Admission:
    """State of the tightest limits after this request; None without a limit.

    `limit_*`: capacity per minute. `remaining_*`: left now. `reset_*_s`: seconds until the limit is
    full again. `output_tokens`: the most that may be generated; reserved besides the prompt.
    `reserved`: whether `settle` must release a reservation. `prices`: the request's prices.
    `epochs`: versions of its budgets' counters at admission; a counter that was rebuilt from the
    ledger since then has another one, and `settle` counts the request in it anew.
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
    """Key of the gateway that took over a request from another."""
    return redis_key(f"taken:{request_id}")


@dataclass(frozen=True)
class LimitCheck:
    """A request with all limits that apply to it."""

    request_id: str
    model: str
    prompt_tokens: int
    output_tokens: int
    min_output: int
    prices: Rates
    media_nanos: int
    buckets: Sequence[TokenBucket]
    running: Sequence[ConcurrencyLimit]
    budgets: Sequence[BudgetLimit]
    open_request: bytes

    @property
    def keys(self) -> list[str]:
        """Keys of `admit.lua`."""
        limits: list[TokenBucket | ConcurrencyLimit | BudgetLimit]
        limits = [*self.buckets, *self.running, *self.budgets]
        names = [limit.redis_key for limit in limits]
        return [*names, reservation_key(self.request_id), open_key(GATEWAY)]

    def arguments(self, costs: Sequence[int], *, partial: bool) -> list[Any]:
        """Arguments of `admit.lua`."""
        values = {
            "id": self.request_id,
            "buckets": [[b.capacity, cost] for b, cost in zip(self.buckets, costs, strict=True)],
            "num_token_buckets": sum(bucket.kind == "tokens" for bucket in self.buckets),
            "sets": [limit.max_running for limit in self.running],
            "budgets": [[limit.tokens, limit.nanos, limit.end] for limit in self.budgets],
            "prompt": self.prompt_tokens,
            "output": self.output_tokens,
            "min_output": self.min_output,
            "picos": [self.prices.prompt, self.prices.output],
            "media": min(self.media_nanos, MAX_NANOS),
            "partial": partial,
            "ttl": RESERVATION_TTL_S if self.budgets or self.running else ADMISSION_TTL_S,
        }
        return [_json.encode(values), self.open_request]


@dataclass(frozen=True, kw_only=True)
class AdmissionRequest:
    """A request to admit.

    Attributes:
        prompts: number of tokens of each prompt; () for one with `prompt_tokens`. outputs: number
            of outputs per prompt.
        images: number of images of each prompt. audio_ms: milliseconds of audio of each prompt, in
            which someone speaks. () if no prompt has any.
        started_at: arrival in seconds since 1970; decides budget periods and prices.
        adapter: its price, if any, precedes the model's, and its budgets apply besides the model's.
        outbox: stream of the outputs, read if this gateway dies. stream: for the ledger.
        is_continuation: whether it continues an admitted request, and doesn't count as another.
        header_id: the client's `x-request-id`.
        stream_id, billed, previous_token_counts: of a stream taken over from another gateway, see
            `OpenRequest`.
    """

    request_id: str
    endpoint: str
    model: str
    prompt_tokens: int
    max_output_tokens: int
    started_at: float = field(default_factory=time.time)
    prompts: Sequence[int] = ()
    images: Sequence[int] = ()
    audio_ms: Sequence[int] = ()
    outputs: int = 1
    adapter: AdapterUse | None = None
    outbox: str = ""
    stream: bool = False
    is_continuation: bool = False
    header_id: str = ""
    stream_id: str = ""
    billed: tuple[int, int] = (0, 0)
    previous_token_counts: Mapping[str, int] = field(default_factory=dict)

    def open_request(self, caller: Caller, rates: Rates) -> bytes:
        """The record by which another gateway bills the request if this one dies."""
        adapter = self.adapter or AdapterUse("", "")
        return OpenRequest(
            request_id=self.request_id,
            tenant_id=caller.tenant_id,
            key_id=caller.key_id,
            user_id=caller.user_id,
            endpoint=self.endpoint,
            model=self.model,
            prompts=list(self.prompts) or [self.prompt_tokens],
            images=list(self.images),
            audio_ms=list(self.audio_ms),
            outputs=self.outputs,
            started_at=self.started_at,
            stream=self.stream,
            rates=rates,
            outbox=self.outbox,
            adapter=adapter.name,
            adapter_digest=adapter.digest,
            header_id=self.header_id,
            stream_id=self.stream_id,
            billed=self.billed,
            known=dict(self.previous_token_counts),
            most=self.max_output_tokens,
        ).encode()


async def admit(caller: Caller, request: AdmissionRequest) -> Admission:
    """Count a request and reserve its tokens in every limit that applies to it, or in none.

    It reserves prompt + `max_output_tokens`, but at most a limit's capacity per minute. If a budget
    has less left, it reserves that, and `output_tokens` is the cap. If running requests have
    reserved what is missing, it first waits up to `WAIT_TIMEOUT_S` for them. `settle` corrects
    reservations to what was used.

    Raises: `RateLimited` and `BudgetSpent` (429) with `retry_after`; `ServiceUnavailable` (503)
    without Redis, or without the database if budget counters must be rebuilt.
    """
    check = await _limit_check(caller, request)
    if not (check.buckets or check.running or check.budgets):
        # No limits; recorded so that another gateway bills the request if this one dies.
        link = redis_link()
        link.send("HSET", open_key(GATEWAY), request.request_id, check.open_request)
        link.flush()  # before the engine gets the request, over another connection
        return replace(UNLIMITED, prices=check.prices, reserved=True)
    return await _reserve_with_retry(check)


async def take_over_request(
    caller: Caller, request: AdmissionRequest, *, gateway: str
) -> Admission | None:
    """Take over a request that another gateway admitted: from now on only this one settles it.

    Reservations remain. Returns None if it was settled already. Raises `ServiceUnavailable` without
    Redis.
    """
    check = await _limit_check(caller, request)
    names = [open_key(gateway), open_key(GATEWAY), takeover_key(check.request_id)]
    arguments = [check.request_id, check.open_request, GATEWAY, RESERVATION_TTL_S]
    try:
        adopted = await run_script(redis_link(), "adopt", names, arguments)
    except (RedisError, OSError) as error:
        raise ServiceUnavailable(
            "The stream can't be resumed right now. Try again later."
        ) from error
    return replace(UNLIMITED, prices=check.prices, reserved=True) if adopted else None


async def _limit_check(caller: Caller, request: AdmissionRequest) -> LimitCheck:
    """A request with the limits and prices that apply to it."""
    rules = await get_rules(caller)
    moment = moment_of(request.started_at)
    model, adapter = request.model, request.adapter
    names = billing_names(model, adapter.name if adapter is not None else "")
    priced = (*(adapter.prices if adapter else ()), model)
    rates = FREE if request.endpoint == BENCHMARK else rules.rates(priced, moment)
    media_nanos = 0
    if request.images or request.audio_ms:
        media_nanos = rates.media_nanos(sum(request.images), sum(request.audio_ms))
    return LimitCheck(
        request_id=request.request_id,
        model=model,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.max_output_tokens,
        min_output=min(request.max_output_tokens, max(1, len(request.prompts))),
        prices=rates,
        media_nanos=media_nanos,
        buckets=[
            bucket
            for bucket in get_buckets(caller)
            if not (request.is_continuation and bucket.kind == "requests")
        ],
        running=[] if request.is_continuation else get_concurrency_limits(caller),
        budgets=rules.limits(caller.key_id, names, moment),
        open_request=request.open_request(caller, rates),
    )


async def _reserve_with_retry(check: LimitCheck) -> Admission:
    """Reserve, and retry while Redis restarts: the script is idempotent.

    Raises `ServiceUnavailable` if Redis stays unreachable or refuses.
    """
    deadline = time.monotonic() + settings.QUIRE.failover_wait_s
    while True:
        try:
            return await _reserve(check)
        except (RedisError, OSError) as error:
            if not _is_transient(error) or time.monotonic() >= deadline:
                message = "Limits can't be checked right now. Try again."
                raise ServiceUnavailable(message) from error
            await asyncio.sleep(REDIS_RETRY_S)


def _is_transient(error: RedisError | OSError) -> bool:
    """Whether Redis is unreachable or loading; one that refuses commands needs its operator."""
    lost = isinstance(error, OSError | RedisConnectionError | RedisTimeoutError)
    return lost or (isinstance(error, RedisError) and error_code_of(error) == "LOADING")


async def _reserve(check: LimitCheck) -> Admission:
    """Run the script until it decides: rebuild missing counters, wait for others' reservations."""
    costs = [_cost(bucket, check.prompt_tokens, check.output_tokens) for bucket in check.buckets]
    partial_from, interval = time.monotonic() + WAIT_TIMEOUT_S, POLL_INTERVAL_S
    while True:
        partial = time.monotonic() >= partial_from
        reply = await run_script(
            redis_link(), "admit", check.keys, check.arguments(costs, partial=partial)
        )
        outcome, index, wait, granted, *levels = reply
        if outcome == b"unknown":
            await in_admission_thread(rebuild_counters, check.budgets[index - 1])
        elif outcome == b"wait":
            await asyncio.sleep(interval)
            interval = min(MAX_POLL_INTERVAL_S, interval * 1.5)
        else:
            break
    if outcome == b"bucket":
        bucket_levels = [float(level) for level in levels[: len(check.buckets)]]
        raise _rate_limited(check, costs, bucket_levels, float(wait), index - 1)
    if outcome == b"set":
        raise _too_many(check.running[index - 1])
    if outcome == b"budget":
        raise _budget_exceeded(check, check.budgets[index - 1], float(wait))
    return _admitted(check, costs, levels, granted)


def _admitted(
    check: LimitCheck, costs: Sequence[int], levels: list[bytes], granted: int
) -> Admission:
    count = len(check.buckets)
    admission = _admission(check.buckets, [float(level) for level in levels[:count]])
    caps = [
        cost - check.prompt_tokens
        for bucket, cost in zip(check.buckets, costs, strict=True)
        if bucket.kind == "tokens"
    ]
    if check.budgets:
        caps.append(granted)
    epochs = {
        limit.redis_key: epoch.decode()
        for limit, epoch in zip(check.budgets, levels[count:], strict=True)
    }
    return replace(
        admission,
        output_tokens=min(caps) if caps else None,
        reserved=True,
        prices=check.prices,
        epochs=epochs,
    )


def _cost(bucket: TokenBucket, prompt_tokens: int, max_output_tokens: int) -> int:
    """Tokens to take from a bucket. Raises `RateLimited` for a prompt that can never fit."""
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
    check: LimitCheck, costs: Sequence[int], levels: list[float], wait: float, index: int
) -> RateLimited:
    bucket, cost = check.buckets[index], costs[index]
    remaining = max(0, int(levels[index]))
    error = RateLimited(
        f"Rate limit of this {bucket.owner} reached for {check.model[:200]}: {bucket.capacity} "
        f"{bucket.kind} a minute, {remaining} left, {cost} needed. Try again in {wait:.2f} s.",
        retry_after=max(wait, 0.001),
    )
    error.headers = rate_limit_headers(_admission(check.buckets, levels))
    return error


def _too_many(limit: ConcurrencyLimit) -> RateLimited:
    return RateLimited(
        f"Concurrency limit reached for this {limit.owner}: {limit.max_running} running requests. "
        "Try again later.",
        retry_after=RUNNING_RETRY_S,
    )


def _budget_exceeded(check: LimitCheck, limit: BudgetLimit, wait: float) -> BudgetSpent:
    amounts = []
    if limit.tokens >= 0:
        amounts.append(f"{limit.tokens} tokens")
    if limit.nanos >= 0:
        amounts.append(amount_text(limit.nanos).rstrip("0").rstrip("."))
    return BudgetSpent(
        f"This {limit.owner} of {' and '.join(amounts)} a {limit.period} has too little left for a "
        f"prompt of {check.prompt_tokens} tokens. It resets at "
        f"{moment_of(limit.end):%Y-%m-%d %H:%M} UTC.",
        retry_after=max(wait, 1.0),
    )


def _admission(buckets: Sequence[TokenBucket], levels: list[float]) -> Admission:
    values: dict[str, float] = {}
    for kind in ("requests", "tokens"):
        pairs = [(lvl, b) for b, lvl in zip(buckets, levels, strict=True) if b.kind == kind]
        if pairs:
            level, bucket = min(pairs, key=lambda pair: pair[0])
            values[f"limit_{kind}"] = bucket.capacity
            values[f"remaining_{kind}"] = max(0, int(level))
            values[f"reset_{kind}_s"] = (bucket.capacity - level) * 60 / bucket.capacity
    return Admission(**values)  # type: ignore[arg-type]


def rate_limit_headers(admission: Admission) -> dict[str, str]:
    """`x-ratelimit-limit-requests` and similar headers, for existing limits only."""
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
