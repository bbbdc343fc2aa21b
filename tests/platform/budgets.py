"""What the tests of budgets share: callers, budgets, requests that are let in and settled."""

from __future__ import annotations

import time
import uuid
from typing import Any

from common.db import run_in_db_thread
from metering import actions, admission
from metering.access import Admission, AdmissionRequest, UsageRecord, admit
from metering.budgets import BudgetState, states_of
from metering.drain import drain_once
from metering.models import Budget
from metering.redis_scripts import redis_key, sync_client
from metering.settlement import spool_key
from metering.usage_record import encode_record
from tenants.actors import SYSTEM_ACTOR
from tenants.authentication import Caller
from tests.platform.conftest import World


def caller(world: World, **values: Any) -> Caller:
    baseline: dict[str, Any] = {
        "tenant_id": world.acme.pk,
        "tenant": "acme",
        "key_id": world.key.pk,
        "user_id": None,
        "cache_namespace": "",
        "weight": 1.0,
        "max_priority": 0,
        "scopes": frozenset(),
        "requests_per_minute": None,
        "tokens_per_minute": None,
    }
    return Caller(**{**baseline, **values})


def budget(world: World, period: str = "day", **values: Any) -> Budget:
    return actions.set_budget(actor=SYSTEM_ACTOR, tenant=world.acme, period=period, **values)


def price(model: str = "m", **values: Any) -> None:
    baseline = {"input_per_million": "1", "output_per_million": "2", "cached_per_million": "0.5"}
    actions.set_price(actor=SYSTEM_ACTOR, model=model, **{**baseline, **values})


async def enter(
    who: Caller, prompt: int = 10, output: int = 10, request_id: str = "", **values: Any
) -> Admission:
    asking = AdmissionRequest(
        request_id=request_id or uuid.uuid4().hex,
        endpoint="chat",
        model=values.pop("model", "m"),
        prompt_tokens=prompt,
        max_output_tokens=output,
        **values,
    )
    return await admit(who, asking)


def used(
    world: World, request_id: str, got: Admission, prompt: int, output: int, **values: Any
) -> UsageRecord:
    baseline: dict[str, Any] = {
        "request_id": request_id,
        "tenant_id": world.acme.pk,
        "key_id": world.key.pk,
        "endpoint": "chat",
        "model": "m",
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "cost_nanos": got.prices.cost_nanos(prompt, 0, output),
        "status": 200,
        "started_at": time.time(),
        "duration_ms": 1.0,
    }
    return UsageRecord(**{**baseline, **values})


async def state(of: Budget) -> BudgetState:
    (budget_state,) = await run_in_db_thread(states_of, [of])
    return budget_state


def spend(world: World, of: Budget, tokens: int) -> None:
    """Settle so many tokens."""
    record = used(world, uuid.uuid4().hex, admission.UNLIMITED, tokens, 0)
    sync_client().xadd(spool_key(), {"r": encode_record(record)})
    drain_once(sync_client())
    sync_client().delete(*sync_client().keys(redis_key("budget:*")) or ["none"])
