"""Benchmarks that workers run: figures by level, stopping, failing, going on, and no bill."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asgiref.sync import sync_to_async

from catalog import access as catalog_access
from catalog.models import DesiredState, ServedModel
from common.errors import Conflict, PermissionDenied
from engine.contract.errors import InvalidRequest
from engine.contract.messages import AbortRequest, EngineRequest
from history.benchmarks import TENANT, start_benchmark, stop_benchmark, waiting_benchmarks
from history.models import BenchmarkRun
from inference.api.benchmarks import run_benchmark
from metering import actions as metering_actions
from metering.models import UsageEntry
from tenants.actors import SYSTEM_ACTOR
from tenants.models import Tenant, User
from tests.fakes.fake_replica import FakeReplica
from tests.inference.conftest import Gateway, until

SIZES: dict[str, Any] = {"input_tokens": 12, "output_tokens": 5, "num_requests": 3}


def started(levels: tuple[int, ...] = (1, 2), **sizes: int) -> BenchmarkRun:
    model = ServedModel.objects.get(name="fake")
    return start_benchmark(actor=SYSTEM_ACTOR, model=model, levels=levels, **(SIZES | sizes))


@pytest.fixture
async def model(gateway: Gateway) -> ServedModel:
    """The served model, for one tenant alone."""

    def change() -> ServedModel:
        row, _ = ServedModel.objects.get_or_create(name="fake", defaults={"source": "/models/fake"})
        row.public, row.desired_state = False, DesiredState.LOADED
        row.save()
        row.tenants.set([gateway.rows.tenant])
        return row

    return await sync_to_async(change)()


async def refreshed(run: BenchmarkRun) -> BenchmarkRun:
    await run.arefresh_from_db()
    return run


@pytest.mark.usefixtures("model")
async def test_each_level_is_measured_and_nobody_pays(gateway: Gateway) -> None:
    await sync_to_async(metering_actions.set_price)(
        actor=SYSTEM_ACTOR, model="fake", input_per_million="1", output_per_million="2"
    )
    run = await sync_to_async(started)()
    replica = gateway.fake()
    async with gateway.serving(replica):
        await run_benchmark(run.public_id, "worker-1")
    run = await refreshed(run)
    assert (run.status, run.error) == ("completed", "")
    assert [row["concurrency"] for row in run.results] == [1, 2]
    for row in run.results:
        assert (row["completed"], row["failed"], row["output_tokens"]) == (3, 0, 15)
        assert row["prompt_tokens"] == 36
        assert row["output_tok_s"] > 0
        assert row["e2e_p50_ms"] >= row["ttft_p50_ms"] > 0
    prompts = [tuple(request.prompt_token_ids) for request in replica.received]
    assert len(set(prompts)) == 6  # none from the prefix cache
    assert {request.tenant for request in replica.received} == {TENANT}
    records = await gateway.usage()
    tenant = await Tenant.objects.aget(slug=TENANT)
    assert {(record.endpoint, record.tenant_id) for record in records} == {("benchmark", tenant.pk)}
    assert sum(record.cost_nanos for record in records) == 0
    assert not await UsageEntry.objects.filter(tenant=gateway.rows.tenant).aexists()


@pytest.mark.usefixtures("model")
async def test_a_benchmark_is_stopped_with_what_it_has_measured(gateway: Gateway) -> None:
    run = await sync_to_async(started)(levels=(1, 2), output_tokens=1, num_requests=1)
    async with gateway.serving(gateway.fake()):
        work = asyncio.create_task(run_benchmark(run.public_id, "worker-1"))
        replica = gateway.fake(token_delay=0.5)
        await work
    assert (await refreshed(run)).results[0]["itl_p50_ms"] is None  # one token has no gap
    run = await sync_to_async(started)(levels=(1,), output_tokens=64)
    async with gateway.serving(replica):
        work = asyncio.create_task(run_benchmark(run.public_id, "worker-1"))
        await until(lambda: bool(replica.received))
        await sync_to_async(stop_benchmark)(actor=SYSTEM_ACTOR, run=run)
        await asyncio.wait_for(work, 60)
    run = await refreshed(run)
    assert (run.status, run.results, run.lease_until) == ("stopped", [], None)
    with pytest.raises(Conflict):
        await sync_to_async(stop_benchmark)(actor=SYSTEM_ACTOR, run=run)


@pytest.mark.usefixtures("model")
async def test_a_worker_that_ends_leaves_the_rest_to_another(gateway: Gateway) -> None:
    run = await sync_to_async(started)()
    await BenchmarkRun.objects.filter(pk=run.pk).aupdate(
        results=[{"concurrency": 1, "completed": 3}]
    )
    slow = gateway.fake(token_delay=600)
    async with gateway.serving(slow):
        work = asyncio.create_task(run_benchmark(run.public_id, "worker-1"))
        await until(lambda: bool(slow.received))
        await run_benchmark(run.public_id, "worker-2")  # it is another's
        assert await sync_to_async(waiting_benchmarks)() == []
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
    assert await sync_to_async(waiting_benchmarks)() == [run.public_id]
    replica = gateway.fake()
    async with gateway.serving(replica):
        await run_benchmark(run.public_id, "worker-2")
    assert [row["concurrency"] for row in (await refreshed(run)).results] == [1, 2]
    assert len(replica.received) == 3


@pytest.mark.usefixtures("model")
async def test_a_model_without_a_replica_fails_with_the_reason(gateway: Gateway) -> None:
    run = await sync_to_async(started)()
    await run_benchmark(run.public_id, "worker-1")
    run = await refreshed(run)
    assert run.status == "failed"
    assert "fake" in run.error


class AbortingReplica(FakeReplica):
    """An operator aborts each of its requests before the first token."""

    async def _start(self, entry_id: bytes, request: EngineRequest) -> None:
        await super()._start(entry_id, request)
        self.by_operator.add(request.request_id)
        self._abort(AbortRequest(request_id=request.request_id))


@pytest.mark.usefixtures("model")
async def test_aborted_requests_are_failures(gateway: Gateway) -> None:
    run = await sync_to_async(started)()
    replica = AbortingReplica(gateway.redis_url, **gateway._options())
    async with gateway.serving(replica):
        await run_benchmark(run.public_id, "worker-1")
    run = await refreshed(run)
    assert (run.status, run.error) == ("failed", "A request ended after 0 of 5 tokens.")


@pytest.mark.usefixtures("model")
async def test_no_two_runs_send_the_same_prompts(gateway: Gateway) -> None:
    """Whatever their numbers of levels: the second would be served from the prefix cache."""
    prompts = []
    for pk, levels in ((2, (1, 2, 3, 4)), (4, (1, 2))):
        run = await sync_to_async(started)(levels=levels, num_requests=1)
        await BenchmarkRun.objects.filter(pk=run.pk).aupdate(id=pk)
        run.pk = pk
        replica = gateway.fake()
        async with gateway.serving(replica):
            await run_benchmark(run.public_id, "worker-1")
        assert (await refreshed(run)).status == "completed"
        prompts += [tuple(request.prompt_token_ids) for request in replica.received]
    assert len(set(prompts)) == len(prompts) == 10 + 3


async def test_no_fallback_is_measured_in_place_of_a_model(
    gateway: Gateway, model: ServedModel
) -> None:
    await ServedModel.objects.acreate(
        name="spare", source="/models/spare", public=True, desired_state=DesiredState.LOADED
    )
    model.fallbacks = ["spare"]
    await model.asave()
    catalog_access.clear_cache()
    run = await sync_to_async(started)()
    replica = gateway.fake(replica_id="other", model_name="spare")
    async with gateway.serving(replica):
        await run_benchmark(run.public_id, "worker-1")
    run = await refreshed(run)
    assert (run.status, run.error) == ("failed", "No replica of fake is ready.")
    assert replica.received == []


@pytest.mark.usefixtures("model")
async def test_fields_rights_and_the_number_of_runs_are_checked(gateway: Gateway) -> None:
    def check() -> None:
        for fields, param in (
            ({"levels": ()}, "levels"),
            ({"levels": (2, 1)}, "levels"),
            ({"levels": (0,)}, "levels"),
            ({"levels": (257,)}, "levels"),
            ({"input_tokens": 0}, "input_tokens"),
            ({"output_tokens": 100_001}, "output_tokens"),
            ({"num_requests": 1001}, "num_requests"),
        ):
            with pytest.raises(InvalidRequest) as refused:
                started(**fields)  # type: ignore[arg-type]
            assert refused.value.param == param
        model = ServedModel.objects.get(name="fake")
        ServedModel.objects.update(max_model_len=16)
        with pytest.raises(InvalidRequest, match="context of 16"):
            started()
        ServedModel.objects.update(max_model_len=None)
        person = User.objects.create(username="mo")
        with pytest.raises(PermissionDenied):
            start_benchmark(actor=person, model=model, levels=[1], **SIZES)
        started()
        with pytest.raises(Conflict, match="runs already"):
            started()
        ServedModel.objects.update(desired_state=DesiredState.UNLOADED)
        with pytest.raises(Conflict, match="not loaded"):
            started()

    await sync_to_async(check)()
