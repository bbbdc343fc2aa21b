"""Benchmarks of models: operators start and stop them, workers run them, results are stored."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from catalog.models import DesiredState, ServedModel
from common.errors import Conflict, NotFound
from common.files import new_id
from engine.contract.errors import InvalidRequest
from history.models import OPEN_BENCHMARKS, BenchmarkRun, BenchmarkStatus
from storage.access import lease_is_free
from tenants.actions import create_tenant
from tenants.actors import SYSTEM_ACTOR, Actor, require_operator
from tenants.audit import log_action
from tenants.models import Tenant, User

#: Tenant of all benchmarks, so that they affect no other tenant's bill or cache.
TENANT = "quire-benchmarks"
MAX_LEVELS, MAX_CONCURRENCY = 8, 256
MAX_REQUESTS, MAX_TOKENS = 1000, 100_000
#: Maximum number of runs stored per model; older ones are removed.
MAX_RUNS = 50


def access_benchmarks(user: Actor | User, model: ServedModel) -> QuerySet[BenchmarkRun]:
    """A model's benchmarks, newest first. Raises `PermissionDenied` for non-operators."""
    require_operator(user)
    return BenchmarkRun.objects.filter(served_model=model)


def access_benchmark(user: Actor | User, model: ServedModel, public_id: str) -> BenchmarkRun:
    """Return a benchmark. Raises `PermissionDenied`, `NotFound`."""
    run = access_benchmarks(user, model).filter(public_id=public_id).first()
    if run is None:
        raise NotFound("Benchmark not found.")
    return run


@transaction.atomic
def start_benchmark(
    *,
    actor: Actor | User,
    model: ServedModel,
    levels: Sequence[int],
    input_tokens: int,
    output_tokens: int,
    num_requests: int,
) -> BenchmarkRun:
    """Queue a benchmark. Its requests belong to a dedicated tenant and cost nothing.

    Raises: `PermissionDenied`; `InvalidRequest` with `param`; `Conflict` for a model that isn't
    loaded or that already has an open benchmark.
    """
    actor = require_operator(actor)
    _check_levels(levels)
    for name, value, high in (
        ("input_tokens", input_tokens, MAX_TOKENS),
        ("output_tokens", output_tokens, MAX_TOKENS),
        ("num_requests", num_requests, MAX_REQUESTS),
    ):
        if not 1 <= value <= high:
            raise InvalidRequest(f"{name} must be from 1 to {high}; got {value}.", param=name)
    if model.max_model_len and input_tokens + output_tokens > model.max_model_len:
        raise InvalidRequest(
            f"Prompt and output of {input_tokens + output_tokens} tokens don't fit the model's "
            f"context of {model.max_model_len}.",
            param="input_tokens",
        )
    model = ServedModel.objects.select_for_update().get(pk=model.pk)
    if model.desired_state != DesiredState.LOADED:
        raise Conflict(f"{model.name} is not loaded.")
    if BenchmarkRun.objects.filter(served_model=model, status__in=OPEN_BENCHMARKS).exists():
        raise Conflict(f"A benchmark of {model.name} runs already. Stop it first.")
    _share_with_benchmarks(model)
    run = BenchmarkRun.objects.create(
        public_id=new_id("bench-"),
        served_model=model,
        levels=list(levels),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        num_requests=num_requests,
        created_by=actor.label,
    )
    outdated = BenchmarkRun.objects.filter(served_model=model).values_list("pk", flat=True)
    BenchmarkRun.objects.filter(pk__in=list(outdated[MAX_RUNS:])).delete()
    log_action(actor, "benchmark.start", run, levels=list(levels))
    return run


def _check_levels(levels: Sequence[int]) -> None:
    is_rising = list(levels) == sorted(set(levels))
    if not 1 <= len(levels) <= MAX_LEVELS or not is_rising:
        raise InvalidRequest(f"levels must be 1 to {MAX_LEVELS} rising numbers.", param="levels")
    if levels[0] < 1 or levels[-1] > MAX_CONCURRENCY:
        raise InvalidRequest(f"levels must be from 1 to {MAX_CONCURRENCY}.", param="levels")


def _share_with_benchmarks(model: ServedModel) -> None:
    """Let the benchmarks' tenant use a model that isn't public; create the tenant if needed."""
    tenant = Tenant.objects.filter(slug=TENANT).first()
    if tenant is None:
        tenant = create_tenant(actor=SYSTEM_ACTOR, name="Benchmarks", slug=TENANT)
    if not model.public:
        model.tenants.add(tenant)


@transaction.atomic
def stop_benchmark(*, actor: Actor | User, run: BenchmarkRun) -> BenchmarkRun:
    """Stop a benchmark; results so far remain. Raises `PermissionDenied`, `Conflict`."""
    actor = require_operator(actor)
    if not finish_benchmark(run, BenchmarkStatus.STOPPED):
        raise Conflict("This benchmark has ended.")
    log_action(actor, "benchmark.stop", run)
    run.refresh_from_db()
    return run


# The following functions are for workers.


def waiting_benchmarks() -> list[str]:
    """Open benchmarks that no worker is running, oldest first."""
    rows = BenchmarkRun.objects.filter(lease_is_free(), status__in=OPEN_BENCHMARKS)
    return list(rows.order_by("pk").values_list("public_id", flat=True)[:100])


def claim_benchmark(*, public_id: str, owner: str, seconds: float) -> BenchmarkRun | None:
    """Claim a benchmark; return None if it has finished or another worker is running it."""
    rows = BenchmarkRun.objects.filter(public_id=public_id, status__in=OPEN_BENCHMARKS)
    until = timezone.now() + timedelta(seconds=seconds)
    claimed = rows.filter(lease_is_free()).update(
        lease_owner=owner, lease_until=until, status=BenchmarkStatus.RUNNING
    )
    if not claimed:
        return None
    return BenchmarkRun.objects.select_related("served_model").get(public_id=public_id)


def is_benchmark_open(run: BenchmarkRun) -> bool:
    """Return whether it hasn't been stopped and its model still exists."""
    return BenchmarkRun.objects.filter(pk=run.pk, status__in=OPEN_BENCHMARKS).exists()


def save_results(run: BenchmarkRun, results: list[dict[str, Any]]) -> None:
    """Store the results of the levels completed so far."""
    BenchmarkRun.objects.filter(pk=run.pk, status__in=OPEN_BENCHMARKS).update(results=results)


def complete_benchmark(run: BenchmarkRun, error: str = "") -> None:
    """Finish it: completed, or failed if there is an error."""
    finish_benchmark(run, BenchmarkStatus.FAILED if error else BenchmarkStatus.COMPLETED, error)


def finish_benchmark(run: BenchmarkRun, status: BenchmarkStatus, error: str = "") -> bool:
    """Finish it with a status; return False if it had already finished."""
    rows = BenchmarkRun.objects.filter(pk=run.pk, status__in=OPEN_BENCHMARKS)
    return bool(rows.update(status=status, error=error[:1000], finished_at=timezone.now()))
