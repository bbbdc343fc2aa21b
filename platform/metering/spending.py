"""Reading budgets: what they allow and what is spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import redis
from django.db import DatabaseError, InterfaceError
from django.db.models import QuerySet

from metering.models import Budget, Price, Webhook, WebhookDelivery
from metering.redis_clients import sync_client
from metering.rules import Limit, families_of, limit_of
from metering.seeding import spent
from tenants.access import access_role
from tenants.actors import Actor, as_actor, require_role
from tenants.errors import NotFound, ServiceUnavailable
from tenants.models import Role, Tenant, User


@dataclass(frozen=True)
class BudgetState:
    """A budget now.

    `tokens`, `nanos`: spent in this period; `held_*`: reserved by requests that run. `start`,
    `end`: the period.
    """

    budget: Budget
    start: datetime
    end: datetime
    tokens: int
    nanos: int
    held_tokens: int
    held_nanos: int

    @property
    def percent(self) -> float:
        """How much is spent, of tokens or of money, whichever is more."""
        parts = [0.0]
        if self.budget.tokens is not None:
            parts.append(self.tokens / self.budget.tokens if self.budget.tokens else 1.0)
        if self.budget.amount is not None:
            most = float(self.budget.amount)
            parts.append(self.nanos / 1e9 / most if most else 1.0)
        return 100 * max(parts)


def access_budgets(user: Actor | User, tenant: Tenant) -> QuerySet[Budget]:
    """All budgets of a tenant for its admins; for other members the tenant's and their own keys'.

    Raises `NotFound` for a stranger.
    """
    role = access_role(user, tenant)
    found = Budget.objects.filter(tenant=tenant).select_related("tenant", "api_key")
    if role.rank >= Role.ADMIN.rank:
        return found
    own = found.filter(api_key=None)
    person = as_actor(user).user
    return own if person is None else own | found.filter(api_key__created_by=person)


def access_budget(user: Actor | User, tenant: Tenant, pk: int) -> Budget:
    """Raises `NotFound`."""
    budget = access_budgets(user, tenant).filter(pk=pk).first()
    if budget is None:
        raise NotFound("Budget not found.")
    return budget


def access_webhooks(user: Actor | User, tenant: Tenant) -> QuerySet[Webhook]:
    """Where the tenant is told (none or one), for its admins.

    Raises `NotFound`, `PermissionDenied`.
    """
    require_role(as_actor(user), tenant, Role.ADMIN)
    return Webhook.objects.filter(tenant=tenant).select_related("tenant")


def access_deliveries(user: Actor | User, tenant: Tenant) -> QuerySet[WebhookDelivery]:
    """What its webhook was told, newest first, for admins. Raises as `access_webhooks`."""
    require_role(as_actor(user), tenant, Role.ADMIN)
    return WebhookDelivery.objects.filter(tenant=tenant).select_related("tenant")


def access_delivery(user: Actor | User, tenant: Tenant, pk: int) -> WebhookDelivery:
    """Raises `NotFound`, `PermissionDenied`."""
    found = access_deliveries(user, tenant).filter(pk=pk).first()
    if found is None:
        raise NotFound("Delivery not found.")
    return found


def access_prices() -> QuerySet[Price]:
    """All prices with their history, of all models and tenants: for operators and for billing."""
    return Price.objects.all()


def states_of(budgets: Sequence[Budget], moment: datetime | None = None) -> list[BudgetState]:
    """How budgets stand, of one tenant or of many, read together. May block.

    What Redis doesn't know the ledger tells, for one budget at a time. Raises
    `ServiceUnavailable` without the database.
    """
    if not budgets:
        return []
    moment = moment or datetime.now(UTC)
    try:
        limits = _limits(budgets, moment)
        return [
            _state(budget, limit, found)
            for budget, limit, found in zip(budgets, limits, _counters(limits), strict=True)
        ]
    except (DatabaseError, InterfaceError) as error:
        raise ServiceUnavailable("Budgets are unavailable. Try again later.") from error


def _limits(budgets: Sequence[Budget], moment: datetime) -> list[Limit]:
    keys = {budget.api_key_id for budget in budgets if budget.api_key_id is not None}
    families = families_of(keys)
    tenants = Tenant.objects.filter(pk__in={budget.tenant_id for budget in budgets})
    zones = dict(tenants.values_list("pk", "time_zone"))
    return [
        limit_of(
            budget,
            () if budget.api_key_id is None else families[budget.api_key_id],
            zones.get(budget.tenant_id) or "UTC",
            moment,
        )
        for budget in budgets
    ]


def _counters(limits: Sequence[Limit]) -> list[list[int]]:
    """Of each: tokens and nanos spent, and held; [] where Redis doesn't know."""
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


def _state(budget: Budget, limit: Limit, found: list[int]) -> BudgetState:
    return BudgetState(
        budget,
        datetime.fromtimestamp(limit.start, UTC),
        datetime.fromtimestamp(limit.end, UTC),
        *(max(0, value) for value in found or [*spent(limit, {}), 0, 0]),
    )
