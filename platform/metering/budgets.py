"""Initializing a budget's counters from the ledger: for a new period, or after Redis lost them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import msgspec
import redis
from django.db import DatabaseError, InterfaceError, connections, router, transaction
from django.db.models import Q, QuerySet, Sum

from common.errors import NotFound, ServiceUnavailable
from metering.models import Budget, Price, UsageDay, UsageEntry, UsageHour, Webhook, WebhookDelivery
from metering.money import MAX_NANOS, Rates
from metering.open_requests import (
    GATEWAY,
    RESERVATION_TTL_S,
    OpenRequest,
    gateways_key,
    open_key,
    reservation_key,
)
from metering.redis_scripts import load_script, redis_key, sync_client
from metering.rules import BudgetLimit, billing_names, budget_limit, key_families, moment_of
from metering.usage_record import UsageRecord, decode_record
from tenants.access import access_role
from tenants.actors import Actor, require_operator, require_role, to_actor
from tenants.models import Role, Tenant, User

#: Counters outlive their period by this much: for requests that end late and clocks that are off.
COUNTER_GRACE = timedelta(days=2)
MAX_TRIES = 100
#: Maximum number of ids per query: a spool may hold a million records while the database is down.
PART = 1000


def rebuild_counters(limit: BudgetLimit) -> None:
    """Make sure that the counters exist. May block.

    They start from the usage of the period in the ledger and the spool, plus the reservations of
    running requests: those may have been admitted before the budget was set, or before a change of
    the tenant's time zone moved its period. If a request is settled meanwhile, it is unknown
    whether the data just read include it, so everything is read again.

    Raises: `ServiceUnavailable` without the database; RedisError.
    """
    client = sync_client()
    try:
        for _ in range(MAX_TRIES):
            last_id, waiting = _spooled(client)
            tokens, nanos = spent_from_ledger(limit, waiting)
            forget_at = int((moment_of(limit.end) + COUNTER_GRACE).timestamp())
            running = msgspec.json.encode(_running(client, limit))
            values: list[Any] = [
                last_id,
                tokens,
                nanos,
                uuid.uuid4().hex,
                forget_at,
                COUNTER_GRACE.days * 86400,
            ]
            values += [running, RESERVATION_TTL_S, limit.zone]
            names = [limit.redis_key, redis_key("usage"), redis_key(f"counters:{limit.budget_id}")]
            text, _ = load_script("seed")
            if client.eval(text, len(names), *names, *values):
                return
    except (DatabaseError, InterfaceError) as error:
        raise ServiceUnavailable("Budgets are unavailable. Try again later.") from error
    finally:
        client.close()
    raise ServiceUnavailable("Budget counters are being rebuilt. Try again in a moment.")


def spent_from_ledger(limit: BudgetLimit, waiting: dict[str, UsageRecord]) -> tuple[int, int]:
    """Tokens and nanos of the period, in the ledger and in records that wait in the spool."""
    start, end = moment_of(limit.start), moment_of(limit.end)
    using = router.db_for_read(UsageEntry)
    tokens = nanos = 0
    with transaction.atomic(using):
        if connections[using].vendor == "postgresql":
            with connections[using].cursor() as cursor:  # one snapshot for all queries
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        for sums in _sums(limit, start, end):
            tokens += (sums["prompt"] or 0) + (sums["completion"] or 0)
            nanos += sums["cost"] or 0
        ours = [record for record in waiting.values() if _counts(record, limit, start, end)]
        written: set[str] = set()
        for start_index in range(0, len(ours), PART):
            ids = [record.request_id for record in ours[start_index : start_index + PART]]
            rows = UsageEntry.objects.filter(request_id__in=ids)
            written.update(rows.values_list("request_id", flat=True))
    for record in ours:
        if record.request_id not in written:
            tokens += record.total_tokens
            nanos += record.cost_nanos
    return tokens, nanos


def _counts(
    request: UsageRecord | OpenRequest, limit: BudgetLimit, start: datetime, end: datetime
) -> bool:
    """Whether a request counts against the budget in its period."""
    started_at = request.started_at
    moment = started_at if isinstance(started_at, datetime) else moment_of(started_at)
    return (
        request.tenant_id == limit.tenant_id
        and limit.counts(request.key_id, billing_names(request.model, request.adapter))
        and start <= moment < end
    )


def _running(client: redis.Redis, limit: BudgetLimit) -> list[list[Any]]:
    """Open requests in the form that `rebuild_counters.lua` reads.

    One entry a request: its gateway, id and reservation, its prompt tokens and maximum output
    tokens, picos per prompt token and per output token, nanos for its media.
    """
    start, end = moment_of(limit.start), moment_of(limit.end)
    requests: list[list[Any]] = []
    gateways = cast("list[bytes]", client.zrange(gateways_key(), 0, -1))
    for gateway in {GATEWAY.encode(), *gateways}:
        name = open_key(gateway.decode())
        for data in cast("list[bytes]", client.hvals(name)):
            try:
                request = OpenRequest.decode(data)
            except (msgspec.DecodeError, msgspec.ValidationError):
                continue  # the gateway's recovery thread logs it
            if _counts(request, limit, start, end):
                rates, prompt = Rates(*request.rates), sum(request.prompts)
                where = [name, request.request_id, reservation_key(request.request_id)]
                prices = (rates.prompt, rates.output, min(request.media_nanos, MAX_NANOS))
                requests.append([*where, prompt, request.most, *prices])
    return requests


def _of_model(name: str) -> Q:
    """Rows of the ledger, or of its sums, that match one of the budget's `billing_names`."""
    base, _, adapter = name.rpartition(":")
    return Q(model=name) | Q(adapter=name) | Q(model=base, adapter=adapter)


def _sums(limit: BudgetLimit, start: datetime, end: datetime) -> list[dict[str, Any]]:
    """Sum whole days and hours from the roll-ups, partial hours at both ends from the ledger."""
    first_hour, last_hour = _ceil(start, timedelta(hours=1)), _floor(end, timedelta(hours=1))
    first_day, last_day = _ceil(start, timedelta(days=1)), _floor(end, timedelta(days=1))
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
        hours = [(first_hour, first_day), (last_day, last_hour)]
    else:
        hours = [(first_hour, last_hour)] if first_hour < last_hour else []
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


def _floor(moment: datetime, step: timedelta) -> datetime:
    seconds = int(moment.timestamp())
    return moment_of(seconds - seconds % int(step.total_seconds()))


def _ceil(moment: datetime, step: timedelta) -> datetime:
    down = _floor(moment, step)
    return down if down == moment else down + step


def _spooled(client: redis.Redis) -> tuple[str, dict[str, UsageRecord]]:
    """The spool's last id and its pending records."""
    name = redis_key("usage")
    try:
        info: Any = client.xinfo_stream(name)
    except redis.ResponseError:  # the stream doesn't exist: nothing was ever settled
        return "0-0", {}
    last_id = info["last-generated-id"]
    last_id = last_id.decode() if isinstance(last_id, bytes) else last_id
    records: dict[str, UsageRecord] = {}
    after = "-"
    while entries := client.xrange(name, min=after, max=last_id, count=1000):
        for entry_id, fields in cast("list[tuple[bytes, dict[bytes, bytes]]]", entries):
            after = f"({entry_id.decode()}"
            try:
                record = decode_record(fields[b"r"])
            except (msgspec.DecodeError, msgspec.ValidationError, KeyError):
                continue  # the drainer moves it to the dead letters
            records.setdefault(record.request_id, record)
    return last_id, records


@dataclass(frozen=True)
class BudgetState:
    """A budget's current state.

    `tokens`, `nanos`: spent in this period; `held_*`: reserved by running requests. `start`,
    `end`: the period.
    """

    budget: Budget
    start: datetime
    end: datetime
    tokens: int
    nanos: int
    reserved_tokens: int
    reserved_nanos: int

    @property
    def percent(self) -> float:
        """The spent percentage, of tokens or of money, whichever is higher."""
        parts = [0.0]
        if self.budget.tokens is not None:
            parts.append(self.tokens / self.budget.tokens if self.budget.tokens else 1.0)
        if self.budget.amount is not None:
            max_amount = float(self.budget.amount)
            parts.append(self.nanos / 1e9 / max_amount if max_amount else 1.0)
        return 100 * max(parts)


def access_budgets(user: Actor | User, tenant: Tenant) -> QuerySet[Budget]:
    """A tenant's budgets: all for admins; the tenant's and their own keys' for other members.

    Raises `NotFound` for users who aren't members.
    """
    role = access_role(user, tenant)
    budgets = Budget.objects.filter(tenant=tenant).select_related("tenant", "api_key")
    if role.rank >= Role.ADMIN.rank:
        return budgets
    tenant_budgets = budgets.filter(api_key=None)
    person = to_actor(user).user
    return (
        tenant_budgets
        if person is None
        else tenant_budgets | budgets.filter(api_key__created_by=person)
    )


def access_budget(user: Actor | User, tenant: Tenant, pk: int) -> Budget:
    """Raises `NotFound`."""
    budget = access_budgets(user, tenant).filter(pk=pk).first()
    if budget is None:
        raise NotFound("Budget not found.")
    return budget


def require_webhook_manager(actor: Actor, tenant: Tenant | None) -> None:
    """Require an admin of the tenant, or an operator if `tenant` is None.

    Raises `NotFound`, `PermissionDenied`.
    """
    if tenant is None:
        require_operator(actor)
    else:
        require_role(actor, tenant, Role.ADMIN)


def access_webhooks(user: Actor | User, tenant: Tenant | None) -> QuerySet[Webhook]:
    """The tenant's webhook, or the operators' if `tenant` is None; None if there isn't one.

    Raises as `require_webhook_manager`.
    """
    require_webhook_manager(to_actor(user), tenant)
    return Webhook.objects.filter(tenant=tenant).select_related("tenant")


def access_deliveries(user: Actor | User, tenant: Tenant | None) -> QuerySet[WebhookDelivery]:
    """Deliveries to the webhook, newest first. Raises as `access_webhooks`."""
    require_webhook_manager(to_actor(user), tenant)
    return WebhookDelivery.objects.filter(tenant=tenant).select_related("tenant")


def access_delivery(user: Actor | User, tenant: Tenant | None, pk: int) -> WebhookDelivery:
    """Raises `NotFound`, `PermissionDenied`."""
    delivery = access_deliveries(user, tenant).filter(pk=pk).first()
    if delivery is None:
        raise NotFound("Delivery not found.")
    return delivery


def access_prices() -> QuerySet[Price]:
    """All prices of all models and tenants with their history, for operators and billing."""
    return Price.objects.all()


def is_price_billed(price: Price) -> bool:
    """Whether any billed request may have used this price."""
    base, _, adapter = price.model.partition("#")[0].rpartition(":")
    name = Q(model=adapter) | Q(adapter=adapter)  # a bare name may be a model or an adapter
    if base:
        name = Q(model=base, adapter=adapter) | Q(model=f"{base}:{adapter}")
    entries = UsageEntry.objects.filter(name, started_at__gte=price.valid_from, cost_nanos__gt=0)
    return entries.exists()


def states_of(budgets: Sequence[Budget], moment: datetime | None = None) -> list[BudgetState]:
    """Current states of budgets, read in one round trip. May block.

    Counters that Redis lacks are rebuilt from the ledger, one budget at a time. Raises
    `ServiceUnavailable` without the database.
    """
    if not budgets:
        return []
    moment = moment or datetime.now(UTC)
    try:
        limits = _limits(budgets, moment)
        return [
            _state(budget, limit, counters)
            for budget, limit, counters in zip(budgets, limits, _counters(limits), strict=True)
        ]
    except (DatabaseError, InterfaceError) as error:
        raise ServiceUnavailable("Budgets are unavailable. Try again later.") from error


def _limits(budgets: Sequence[Budget], moment: datetime) -> list[BudgetLimit]:
    keys = {budget.api_key_id for budget in budgets if budget.api_key_id is not None}
    families = key_families(keys)
    tenants = Tenant.objects.filter(pk__in={budget.tenant_id for budget in budgets})
    zones = dict(tenants.values_list("pk", "time_zone"))
    return [
        budget_limit(
            budget,
            () if budget.api_key_id is None else families[budget.api_key_id],
            zones.get(budget.tenant_id) or "UTC",
            moment,
        )
        for budget in budgets
    ]


def _counters(limits: Sequence[BudgetLimit]) -> list[list[int]]:
    """Spent and reserved tokens and nanos per budget; [] for those that Redis lacks."""
    names = ("tokens", "nanos", "held_tokens", "held_nanos")
    client = sync_client()
    try:
        with client.pipeline(transaction=False) as asked:
            for limit in limits:
                asked.hmget(limit.redis_key, names)
            replies = asked.execute()
    except redis.RedisError:
        return [[] for _ in limits]
    finally:
        client.close()
    return [
        [] if values[0] is None else [0 if value is None else int(value) for value in values]
        for values in replies
    ]


def _state(budget: Budget, limit: BudgetLimit, counters: list[int]) -> BudgetState:
    return BudgetState(
        budget,
        datetime.fromtimestamp(limit.start, UTC),
        datetime.fromtimestamp(limit.end, UTC),
        *(max(0, value) for value in counters or [*spent_from_ledger(limit, {}), 0, 0]),
    )
