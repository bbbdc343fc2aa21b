"""Filling a budget's counters from the ledger: for a new period, or when Redis lost them."""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta
from typing import Any

import msgspec
import redis
from django.db import DatabaseError, InterfaceError, connections, router, transaction
from django.db.models import Q, Sum

from metering.gateways import (
    GATEWAY,
    HELD_TTL_S,
    OpenRequest,
    gateways_key,
    open_key,
    reservation_key,
)
from metering.models import UsageDay, UsageEntry, UsageHour
from metering.money import Rates
from metering.records import UsageRecord, decode_record
from metering.redis_clients import key, sync_client
from metering.rules import Limit, moment_of, names_of
from metering.scripts import source
from tenants.errors import ServiceUnavailable

#: A counter stays so long beyond its period: for requests that end late and clocks that go wrong.
KEEP_AFTER = timedelta(days=2)
MAX_TRIES = 100
#: Ids of one query: a spool that waits for a database holds a million records.
PART = 1000


def seed(limit: Limit) -> None:
    """Make sure that the counters are there. May block.

    They begin as what ledger and spool say of the period, and as what requests hold that run: these
    were let in before the budget was set, or before the tenant's time zone moved its period. When a
    request was settled meanwhile, which may or may not be in what was read, all is read again.

    Raises: `ServiceUnavailable` without the database; RedisError.
    """
    client = sync_client()
    try:
        for _ in range(MAX_TRIES):
            last_id, waiting = _spooled(client)
            tokens, nanos = spent(limit, waiting)
            forget_at = int((moment_of(limit.end) + KEEP_AFTER).timestamp())
            running = msgspec.json.encode(_running(client, limit))
            values = [last_id, tokens, nanos, uuid.uuid4().hex, forget_at, KEEP_AFTER.days * 86400]
            values += [running, HELD_TTL_S, limit.zone]
            names = [limit.redis_key, key("usage"), key(f"counters:{limit.budget_id}")]
            text, _ = source("seed")
            if client.eval(text, len(names), *names, *values):
                return
    except (DatabaseError, InterfaceError) as error:
        raise ServiceUnavailable("Budgets are unavailable. Try again later.") from error
    finally:
        client.close()
    raise ServiceUnavailable("Budget counters are being rebuilt. Try again in a moment.")


def spent(limit: Limit, waiting: dict[str, UsageRecord]) -> tuple[int, int]:
    """Tokens and nanos of the period in the ledger and in records that wait for it."""
    start, end = moment_of(limit.start), moment_of(limit.end)
    using = router.db_for_read(UsageEntry)
    tokens = nanos = 0
    with transaction.atomic(using):
        if connections[using].vendor == "postgresql":
            with connections[using].cursor() as cursor:  # one picture of the ledger for all of it
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        for sums in _sums(limit, start, end):
            tokens += (sums["prompt"] or 0) + (sums["completion"] or 0)
            nanos += sums["cost"] or 0
        ours = [record for record in waiting.values() if _counts(record, limit, start, end)]
        written: set[str] = set()
        for at in range(0, len(ours), PART):
            ids = [record.request_id for record in ours[at : at + PART]]
            rows = UsageEntry.objects.filter(request_id__in=ids)
            written.update(rows.values_list("request_id", flat=True))
    for record in ours:
        if record.request_id not in written:
            tokens += record.total_tokens
            nanos += record.cost_nanos
    return tokens, nanos


def _counts(
    request: UsageRecord | OpenRequest, limit: Limit, start: datetime, end: datetime
) -> bool:
    """Whether a request is of the budget and of its period."""
    at = request.started_at
    moment = at if isinstance(at, datetime) else moment_of(at)
    return (
        request.tenant_id == limit.tenant_id
        and limit.counts(request.key_id, names_of(request.model, request.adapter))
        and start <= moment < end
    )


def _running(client: redis.Redis, limit: Limit) -> list[list[Any]]:
    """As `seed.lua` has them: the gateway's open requests, the request's id and reservation, its
    prompt's tokens and the most that it may generate, picos of a prompt's and of an output token.
    """
    start, end = moment_of(limit.start), moment_of(limit.end)
    found: list[list[Any]] = []
    for gateway in {GATEWAY.encode(), *client.zrange(gateways_key(), 0, -1)}:
        name = open_key(gateway.decode())
        for data in client.hvals(name):
            try:
                request = OpenRequest.decode(data)
            except (msgspec.DecodeError, msgspec.ValidationError):
                continue  # the keeper says so
            if _counts(request, limit, start, end):
                rates, prompt = Rates(*request.rates), sum(request.prompts)
                where = [name, request.request_id, reservation_key(request.request_id)]
                found.append([*where, prompt, request.most, rates.prompt, rates.output])
    return found


def _of_model(name: str) -> Q:
    """Rows of the ledger, or of its sums, that `names_of` calls so."""
    base, _, adapter = name.rpartition(":")
    return Q(model=name) | Q(adapter=name) | Q(model=base, adapter=adapter)


def _sums(limit: Limit, start: datetime, end: datetime) -> list[dict[str, Any]]:
    """Whole days and hours from the roll-ups, what sticks out at both ends from the ledger."""
    first_hour, last_hour = _up(start, timedelta(hours=1)), _down(end, timedelta(hours=1))
    first_day, last_day = _up(start, timedelta(days=1)), _down(end, timedelta(days=1))
    of = Q(tenant_id=limit.tenant_id)
    if limit.model:
        of &= _of_model(limit.model)
    by_key = Q(key_id__in=limit.key_ids) if limit.key_ids else Q()
    amounts = {
        "prompt": Sum("prompt_tokens"),
        "completion": Sum("completion_tokens"),
        "cost": Sum("cost_nanos"),
    }
    parts: list[Any] = []
    if first_day < last_day:
        parts.append(UsageDay.objects.filter(by_key, start__gte=first_day, start__lt=last_day))
        hours = ((first_hour, first_day), (last_day, last_hour))
    else:
        hours = ((first_hour, last_hour),) if first_hour < last_hour else ()
    for begin, until in hours:
        parts.append(UsageHour.objects.filter(by_key, start__gte=begin, start__lt=until))
    edges = ((start, first_hour), (last_hour, end)) if hours else ((start, end),)
    by_key = Q(api_key_id__in=limit.key_ids) if limit.key_ids else Q()
    for begin, until in edges:
        if begin < until:
            parts.append(
                UsageEntry.objects.filter(by_key, started_at__gte=begin, started_at__lt=until)
            )
    return [part.filter(of).order_by().aggregate(**amounts) for part in parts]


def _down(moment: datetime, step: timedelta) -> datetime:
    seconds = int(moment.timestamp())
    return moment_of(seconds - seconds % int(step.total_seconds()))


def _up(moment: datetime, step: timedelta) -> datetime:
    down = _down(moment, step)
    return down if down == moment else down + step


def _spooled(client: redis.Redis) -> tuple[str, dict[str, UsageRecord]]:
    """The spool's last id, and what waits in it."""
    name = key("usage")
    try:
        info: Any = client.xinfo_stream(name)
    except redis.ResponseError:  # nothing was ever settled
        return "0-0", {}
    last_id = info["last-generated-id"]
    last_id = last_id.decode() if isinstance(last_id, bytes) else last_id
    found: dict[str, UsageRecord] = {}
    after = "-"
    while entries := client.xrange(name, min=after, max=last_id, count=1000):
        for entry_id, fields in entries:
            after = f"({entry_id.decode()}"
            try:
                record = decode_record(fields[b"r"])
            except (msgspec.DecodeError, msgspec.ValidationError, KeyError):
                continue  # the drainer sets it apart
            found.setdefault(record.request_id, record)
    return last_id, found
