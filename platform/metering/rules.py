"""Prices, budgets and limits of a request, cached for two seconds per tenant."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from django.conf import settings
from django.db import DatabaseError, InterfaceError

from common.cached_lookup import AsyncTTLCache
from common.db import in_admission_thread
from common.errors import ServiceUnavailable
from metering.models import Budget, Price
from metering.money import FREE, Rates, nanos_of, period_of
from metering.redis_scripts import redis_key
from metering.signals import rules_changed
from tenants.authentication import Caller
from tenants.models import ApiKey, Tenant
from tenants.signals import api_key_changed, tenant_changed


@dataclass(frozen=True)
class AdapterUse:
    """A request's adapter.

    Attributes:
        name: its name within its base model.
        digest: sha256 of its content.
        prices: names under which it may have its own price; the first that has one applies.
    """

    name: str
    digest: str
    prices: tuple[str, ...] = ()


@dataclass(frozen=True)
class TokenBucket:
    """A rate limit: a bucket that holds a minute's amount and refills at a constant rate.

    `kind`: "tokens" or "requests". `owner`: "tenant" or "key"; never "user", as sessions share the
    tenant's. `capacity`: per minute, > 0.
    """

    kind: str
    owner: str
    owner_id: int
    capacity: int

    @property
    def redis_key(self) -> str:
        return redis_key(f"limit:{self.kind}:{self.owner}:{self.owner_id}")


def get_buckets(caller: Caller) -> list[TokenBucket]:
    """The caller's limits, tokens first. 0 means no limit; None (tenants only) the default."""
    quotas = settings.QUIRE.tenant_quotas
    limits = [
        ("tokens", "tenant", caller.tokens_per_minute, quotas.tokens_per_minute),
        ("tokens", "key", caller.key_tokens_per_minute, 0),
        ("requests", "tenant", caller.requests_per_minute, quotas.requests_per_minute),
        ("requests", "key", caller.key_requests_per_minute, 0),
    ]
    # Keys that replaced each other by rotation share the first one's buckets.
    ids = {"tenant": caller.tenant_id, "key": caller.key_family or caller.key_id}
    buckets = []
    for kind, owner, limit, default in limits:
        capacity, owner_id = default if limit is None else limit, ids[owner]
        if capacity and owner_id is not None:
            buckets.append(TokenBucket(kind, owner, owner_id, capacity))
    return buckets


@dataclass(frozen=True)
class ConcurrencyLimit:
    """Maximum number of running requests of a tenant or key: `max_running`, > 0."""

    owner: str
    owner_id: int
    max_running: int

    @property
    def redis_key(self) -> str:
        """Redis key of the running requests' ids."""
        return redis_key(f"running:{self.owner}:{self.owner_id}")


def get_concurrency_limits(caller: Caller) -> list[ConcurrencyLimit]:
    """The caller's limits, the tenant's first."""
    limits = [
        ("tenant", caller.tenant_id, caller.max_running_requests),
        ("key", caller.key_family or caller.key_id, caller.key_max_running_requests),
    ]
    return [
        ConcurrencyLimit(owner, owner_id, max_running)
        for owner, owner_id, max_running in limits
        if owner_id and max_running
    ]


#: Endpoint of benchmark requests in the ledger: they cost nothing.
BENCHMARK = "benchmark"
TTL_S = 2.0
#: While the database is down, cached rules remain valid.
STALE_S = 60.0


@dataclass(frozen=True)
class BudgetLimit:
    """A budget at one moment: its limits and period.

    `key_ids`, `model`: what it applies to; () and "" for all. `key_ids` includes the keys that
    replaced the budget's key by rotation. `tokens`, `nanos`: -1 for no limit. `start`, `end`: the
    period, seconds since 1970; `zone`: the time zone that defines it.
    """

    budget_id: int
    tenant_id: int
    key_ids: tuple[int, ...]
    model: str
    period: str
    tokens: int
    nanos: int
    start: int
    end: int
    zone: str = "UTC"

    def counts(self, key_id: int | None, models: Collection[str]) -> bool:
        """Whether a request counts. `models`: its `billing_names`."""
        of_key = not self.key_ids or key_id in self.key_ids
        return of_key and (not self.model or self.model in models)

    @property
    def redis_key(self) -> str:
        """Redis key of this period's counters."""
        return redis_key(f"budget:{self.budget_id}:{self.start}")

    @property
    def owner(self) -> str:
        """The limit's owner, for error messages."""
        whose = "key" if self.key_ids else "tenant"
        return f"{whose}'s budget for {self.model}" if self.model else f"{whose}'s budget"


@dataclass(frozen=True)
class PricingRules:
    """A tenant's budgets and time zone, and the prices of all models, newest first.

    `families`: a budget's key -> that key and its replacements by rotation.
    """

    zone: str
    budgets: Sequence[Budget]
    families: Mapping[int, tuple[int, ...]]
    prices: dict[str, Sequence[tuple[datetime, Rates]]]

    def rates(self, names: Sequence[str], moment: datetime) -> Rates:
        """The price of the first of these models that has one; without any the request is free."""
        for name in names:
            for valid_from, rates in self.prices.get(name, ()):
                if valid_from <= moment:
                    return rates
        return FREE

    def limits(
        self, key_id: int | None, models: Collection[str], moment: datetime
    ) -> list[BudgetLimit]:
        """The budgets that a request counts against, the tenant's first.

        `models`: its `billing_names`.
        """
        return [
            self.limit(budget, moment)
            for budget in self.budgets
            if (budget.api_key_id is None or key_id in self._keys(budget))
            and (not budget.model or budget.model in models)
        ]

    def limit(self, budget: Budget, moment: datetime) -> BudgetLimit:
        """A budget in the period around a moment."""
        return budget_limit(budget, self._keys(budget), self.zone, moment)

    def _keys(self, budget: Budget) -> tuple[int, ...]:
        if budget.api_key_id is None:
            return ()
        return self.families.get(budget.api_key_id, (budget.api_key_id,))


def billing_names(model: str, adapter: str) -> tuple[str, ...]:
    """Names under which a budget matches a model, or a model's adapter ("" for none)."""
    return (model, adapter, f"{model}:{adapter}") if adapter else (model,)


def budget_limit(
    budget: Budget, key_ids: tuple[int, ...], zone: str, moment: datetime
) -> BudgetLimit:
    """A budget in the period around a moment."""
    start, end = period_of(budget.period, moment, ZoneInfo(zone))
    return BudgetLimit(
        budget_id=budget.pk,
        tenant_id=budget.tenant_id,
        key_ids=key_ids,
        model=budget.model,
        period=budget.period,
        tokens=-1 if budget.tokens is None else budget.tokens,
        nanos=-1 if budget.amount is None else nanos_of(budget.amount),
        start=int(start.timestamp()),
        end=int(end.timestamp()),
        zone=zone,
    )


_rules: AsyncTTLCache[int, PricingRules] = AsyncTTLCache(ttl=TTL_S, size=10_000)
_prices: AsyncTTLCache[str, dict[str, list[tuple[datetime, Rates]]]] = AsyncTTLCache(
    ttl=TTL_S, size=1
)


async def get_rules(caller: Caller) -> PricingRules:
    """Raises `ServiceUnavailable` when the database is down and nothing usable is cached."""
    tenant_id = caller.tenant_id
    try:
        return await _rules.get(tenant_id, lambda: in_admission_thread(load_rules, tenant_id))
    except ServiceUnavailable:
        stale = _rules.get_if_younger(tenant_id, STALE_S)
        if stale is None:
            raise
        return stale


def load_rules(tenant_id: int) -> PricingRules:
    """Query the database."""
    try:
        zone = Tenant.objects.filter(pk=tenant_id).values_list("time_zone", flat=True).first()
        budgets = list(Budget.objects.filter(tenant_id=tenant_id).order_by("api_key", "pk"))
        narrowed = {budget.api_key_id for budget in budgets if budget.api_key_id is not None}
        prices = _prices.peek("all")
        if prices is None:
            prices = _read_prices()
            _prices.store("all", prices)
        return PricingRules(zone or "UTC", budgets, key_families(narrowed), dict(prices))
    except (DatabaseError, InterfaceError) as error:
        raise ServiceUnavailable("Budgets are unavailable. Try again later.") from error


def key_families(key_ids: Collection[int]) -> dict[int, tuple[int, ...]]:
    """Return {key id: ids of the key and of those that replaced it by rotation}."""
    if not key_ids:
        return {}
    by_first = {key_id: [key_id] for key_id in key_ids}
    for key in ApiKey.objects.filter(first__in=key_ids).only("first"):
        if key.first_id is not None:
            by_first[key.first_id].append(key.pk)
    return {first: tuple(pks) for first, pks in by_first.items()}


def _read_prices() -> dict[str, list[tuple[datetime, Rates]]]:
    prices: dict[str, list[tuple[datetime, Rates]]] = {}
    for price in Price.objects.order_by("model", "-valid_from"):
        prices.setdefault(price.model, []).append((price.valid_from, price.rates))
    return prices


def moment_of(seconds: float) -> datetime:
    """Convert seconds since 1970 to an aware datetime."""
    return datetime.fromtimestamp(seconds, UTC)


def forget(**_: object) -> None:
    """Clear this process's cache: a price or a budget has changed."""
    _rules.clear()
    _prices.clear()


rules_changed.connect(forget, dispatch_uid="metering.rules")
api_key_changed.connect(forget, dispatch_uid="metering.rules")
tenant_changed.connect(forget, dispatch_uid="metering.rules")
