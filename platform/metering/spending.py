"""Reading budgets: what they allow and what is spent."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import redis
from django.db.models import QuerySet

from metering.models import Budget, Price, Webhook, WebhookDelivery
from metering.redis_clients import sync_client
from metering.rules import Limit, read_rules
from metering.seeding import spent
from tenants.access import access_role
from tenants.actors import Actor, as_actor, require_role
from tenants.errors import NotFound
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
        raise NotFound("There is no such budget.")
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
        raise NotFound("There is no such delivery.")
    return found


def access_prices() -> QuerySet[Price]:
    """All prices with their history, of all models and tenants: for operators and for billing."""
    return Price.objects.all()


def states_of(budgets: list[Budget], moment: datetime | None = None) -> list[BudgetState]:
    """How budgets of one tenant stand. May block; without Redis the ledger tells."""
    if not budgets:
        return []
    moment = moment or datetime.now(UTC)
    rules = read_rules(budgets[0].tenant_id)
    client = sync_client()
    try:
        return [_state(client, budget, rules.limit(budget, moment)) for budget in budgets]
    finally:
        client.close()


def _state(client: redis.Redis, budget: Budget, limit: Limit) -> BudgetState:
    names = ("tokens", "nanos", "held_tokens", "held_nanos")
    try:
        values = client.hmget(limit.redis_key, names)
        found = [-1 if value is None else int(value) for value in values]
    except redis.RedisError:
        found = [-1]
    if found[0] < 0:
        found = [*spent(limit, {}), 0, 0]
    return BudgetState(
        budget,
        datetime.fromtimestamp(limit.start, UTC),
        datetime.fromtimestamp(limit.end, UTC),
        *(max(0, value) for value in found),
    )
