"""KV quotas: what a tenant may use, what is kept for it, and who gives first."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.contract.engine_config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.warmup import warm_up
from engine.kv_cache import BlockPool, TenantQuota
from engine.kv_cache.tenant_quotas import PRESENT_S
from engine.scheduler import Sequence, SequenceStatus
from tests.engine.helpers import Driver


def used(driver: Driver, tenant: str) -> int:
    return driver.scheduler.kv.quotas.get(tenant).used


def prompt(start: int, length: int) -> list[int]:
    return [(start * 1000 + index) for index in range(length)]


def running(driver: Driver, tenant: str) -> list[Sequence]:
    return [s for s in driver.scheduler.running if s.request.message.tenant == tenant]


# -- the maximum ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fair", "fcfs", "priority"])
def test_a_tenant_at_its_maximum_waits_without_blocking_others(policy: str) -> None:
    driver = Driver(num_blocks=20, scheduling_policy=policy)
    greedy = [driver.add(prompt(i, 10), tenant="greedy", maximum=0.5) for i in range(5)]
    other = driver.add(prompt(9, 10), tenant="other")
    driver.step()
    assert used(driver, "greedy") == 9
    assert [s.status for s in greedy] == [SequenceStatus.RUNNING] * 3 + [SequenceStatus.WAITING] * 2
    assert other.status is SequenceStatus.RUNNING
    driver.scheduler.finish(greedy[0], "stop")
    driver.step()
    assert greedy[3].status is SequenceStatus.RUNNING


def test_at_its_maximum_a_tenant_preempts_only_itself() -> None:
    driver = Driver(num_blocks=20, enable_prefix_caching=False)
    first = driver.add(prompt(0, 7), tenant="a", maximum=0.2)
    second = driver.add(prompt(1, 7), tenant="a", maximum=0.2)
    other = driver.add(prompt(2, 7), tenant="b")
    for _ in range(3):
        driver.step()
        assert used(driver, "a") <= 4
    assert second.status is SequenceStatus.PREEMPTED
    assert first.status is other.status is SequenceStatus.RUNNING


def test_free_blocks_do_not_help_who_is_at_his_maximum_and_others_are_not_preempted_for_him() -> (
    None
):
    driver = Driver(num_blocks=20, enable_prefix_caching=False)
    other = driver.add(prompt(2, 60), tenant="b")
    local_output = driver.add(prompt(0, 11), tenant="a", maximum=0.15)
    driver.step()
    driver.step()
    assert used(driver, "a") == 3
    # Its 13th token would need a fourth block; it alone has to wait for its own.
    driver.step()
    assert other.status is SequenceStatus.RUNNING
    assert local_output.timeline.num_preemptions == 0
    assert local_output.finish_reason == "error"


def test_what_a_tenants_maximum_can_never_hold_ends_with_a_typed_error_and_not_in_a_loop() -> None:
    driver = Driver(num_blocks=20)
    sequence = driver.add(prompt(0, 40), tenant="a", maximum=0.3)
    driver.step()
    refused = driver.scheduler.pop_rejected()
    assert [(gone, error.code) for gone, error in refused] == [(sequence, refused[0][1].code)]
    assert "6 KV blocks" in refused[0][1].message
    assert sequence.finished
    assert not driver.scheduler.has_work


def test_the_capacity_of_a_tenant_follows_its_maximum_and_others_reserves() -> None:
    driver = Driver(num_blocks=20)
    message = driver.add(prompt(0, 4), tenant="a", maximum=0.5).request.message
    assert driver.scheduler.max_tokens_for(message) == 10 * 4
    driver.add(prompt(1, 4), tenant="b", reserved=0.75)
    assert driver.scheduler.max_tokens_for(message) == 5 * 4


# -- reserves -------------------------------------------------------------------------------------


def test_reserved_blocks_are_never_taken_by_others_allocations() -> None:
    driver = Driver(num_blocks=20, enable_prefix_caching=False)
    reserved = driver.add(prompt(0, 4), tenant="kept", reserved=0.5)
    driver.step()
    other_sequences = [driver.add(prompt(1 + i, 8), tenant="other") for i in range(10)]
    for _ in range(30):
        driver.step()
        quotas = driver.scheduler.kv.quotas
        assert driver.scheduler.kv.pool.num_free_blocks >= quotas.get("kept").unused_reserve
        assert used(driver, "other") <= 10
    assert sum(s.timeline.num_preemptions for s in other_sequences) > 0
    assert reserved.timeline.num_preemptions == 0


def test_a_full_pool_lets_a_tenant_use_what_is_reserved_for_it() -> None:
    driver = Driver(num_blocks=20, scheduling_policy="fcfs")
    driver.add(prompt(0, 4), tenant="kept", reserved=0.5)
    driver.step()
    for i in range(5):
        driver.add(prompt(1 + i, 16), tenant="other")
    late = driver.add(prompt(8, 16), tenant="kept", reserved=0.5)
    driver.step()
    assert len(running(driver, "other")) == 2
    assert late.status is SequenceStatus.RUNNING


def test_what_was_used_before_it_was_reserved_is_given_back_by_who_is_over_his_share() -> None:
    driver = Driver(num_blocks=20, enable_prefix_caching=False)
    for i in range(5):
        driver.add(prompt(1 + i, 14), tenant="other")
    driver.step()
    assert used(driver, "other") == 20
    late = driver.add(prompt(8, 16), tenant="late", reserved=0.5)
    driver.step()
    assert late.status is SequenceStatus.RUNNING
    # Of a reserve of 10 blocks it uses 4 now: others keep their seats as long as there is room.
    assert used(driver, "other") <= 16


def test_reserves_beyond_the_pool_go_to_who_came_first() -> None:
    driver = Driver(num_blocks=20)
    driver.add(prompt(0, 4), tenant="a", reserved=0.75)
    driver.add(prompt(1, 4), tenant="b", reserved=0.75)
    quotas = driver.scheduler.kv.quotas
    assert (quotas.get("a").reserved, quotas.get("b").reserved) == (15, 5)
    driver.add(prompt(2, 4), tenant="a", reserved=0.0)
    driver.add(prompt(3, 4), tenant="b", reserved=0.75)
    assert (quotas.get("a").reserved, quotas.get("b").reserved) == (0, 15)


@pytest.mark.parametrize("reserves", [(1.0,), (0.8, 0.8)])
def test_fault_45_whatever_is_reserved_the_longest_request_of_another_tenant_runs(
    reserves: tuple[float, ...],
) -> None:
    driver = Driver(num_blocks=20, max_model_len=32, enable_prefix_caching=False)
    other_sequences = [
        driver.add(prompt(number, 4), tenant=f"t{number}", reserved=reserved)
        for number, reserved in enumerate(reserves)
    ]
    message = driver.add(prompt(9, 31), tenant="neighbour").request.message
    assert driver.scheduler.max_tokens_for(message) >= 32
    assert sum(a.reserved for a in driver.scheduler.kv.quotas) == 20 - 32 // 4
    driver.step()
    for sequence in other_sequences:
        driver.scheduler.finish(sequence, "stop")
    driver.step()
    assert len(running(driver, "neighbour")) == 1


def test_a_reserve_lapses_when_its_tenant_stays_away() -> None:
    now = 0.0
    pool = BlockPool(20, clock=lambda: now)
    pool.quotas.record_request("away", reserved_fraction=0.5)
    tenant = pool.quotas.record_request("here")
    assert pool.num_available_blocks(tenant) == 10
    now = PRESENT_S + 1
    tenant = pool.quotas.record_request("here")
    assert pool.num_available_blocks(tenant) == 20
    assert [quota.name for quota in pool.quotas] == ["here"]


def test_a_warm_up_leaves_no_tenant_behind(model_folder: Callable[[str], Path]) -> None:
    core = EngineCore(
        EngineConfig(model=str(model_folder("llama")), num_gpu_blocks_override=64, num_threads=1)
    )
    warm_up(core)
    assert len(core.scheduler.kv.quotas) == 0
    only = core.scheduler.kv.quotas.record_request("only")
    assert core.scheduler.kv.quotas.weight_fraction(only) == 1


# -- who gives first ------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [1.0, 9.0])
def test_preemption_takes_from_who_is_most_over_his_share(weight: float) -> None:
    driver = Driver(num_blocks=12, enable_prefix_caching=False)
    big = [driver.add(prompt(i, 10), tenant="big", weight=weight) for i in range(3)]
    small = driver.add(prompt(7, 10), tenant="small")
    driver.step()
    assert [s.status for s in [*big, small]] == [SequenceStatus.RUNNING] * 4
    for _ in range(3):
        driver.step()
    gone = [s for s in [*big, small] if s.timeline.num_preemptions]
    # At nine times the weight nine of the twelve blocks are within its share.
    assert gone == ([big[2]] if weight == 1.0 else [small])


def test_eviction_takes_the_cached_prefixes_of_who_is_most_over_his_share() -> None:
    driver = Driver(num_blocks=20)
    modest = driver.add(prompt(0, 8), tenant="modest")
    driver.step()
    driver.scheduler.finish(modest, "stop")
    for i in range(1, 30):
        driver.step()
        sequence = driver.add(prompt(i, 12), tenant="thrashing")
        driver.step()
        driver.scheduler.finish(sequence, "stop")
    driver.step()
    # Least recently used of all, and still there: the thrashing tenant evicts its own.
    again = driver.add(prompt(0, 8), tenant="modest")
    driver.step()
    assert again.num_cached_tokens == 4


def test_the_prefixes_of_who_has_been_away_for_long_go_first() -> None:
    now = 0.0
    pool = BlockPool(8, clock=lambda: now)
    tenant, away = pool.quotas.record_request("here"), pool.quotas.record_request("away")
    mine, theirs = pool.get_new_blocks(5, tenant), pool.get_new_blocks(2, away)
    pool.free_blocks(mine, tenant)
    pool.free_blocks(theirs, away)
    now = PRESENT_S + 1
    tenant = pool.quotas.record_request("here")
    assert [block.block_id for block in pool.get_new_blocks(4, tenant)] == [7, 6, 5, 4]


# -- blocks that several tenants share ------------------------------------------------------------


def test_a_shared_block_is_charged_once_and_inherited_when_its_owner_leaves() -> None:
    driver = Driver(num_blocks=20)
    owner = driver.add(prompt(0, 9), tenant="a")
    driver.step()
    guests = [driver.add(prompt(0, 9), tenant=tenant) for tenant in "bbc"]
    driver.step()
    assert [used(driver, tenant) for tenant in "abc"] == [3, 2, 1]
    driver.scheduler.finish(guests[0], "stop")
    driver.scheduler.finish(owner, "stop")
    driver.scheduler.check_integrity()
    assert [used(driver, tenant) for tenant in "abc"] == [0, 3, 1]
    driver.scheduler.finish(guests[1], "stop")
    driver.scheduler.check_integrity()
    assert [used(driver, tenant) for tenant in "abc"] == [0, 0, 3]
    driver.scheduler.finish(guests[2], "stop")
    driver.scheduler.check_integrity()
    assert driver.scheduler.kv.pool.num_free_blocks == 20


def test_shares_are_weights_among_those_present_and_at_least_the_reserve() -> None:
    pool = BlockPool(100)
    a = pool.quotas.record_request("a", weight=3)
    assert pool.quotas.fair_share_blocks(a) == 100
    b = pool.quotas.record_request("b", reserved_fraction=0.5)
    assert math.isclose(pool.quotas.fair_share_blocks(a), 75)
    assert pool.quotas.fair_share_blocks(b) == 50
    pool.quotas.record_request("a", weight=1)
    assert math.isclose(pool.quotas.fair_share_blocks(a), 50)


def test_choosing_whom_to_evict_does_not_walk_the_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    probes = []
    for tenants in (20, 400):
        pool = BlockPool(2 * tenants)
        quotas = [pool.quotas.record_request(f"t{index}") for index in range(tenants)]
        for quota in quotas:
            pool.free_blocks(pool.get_new_blocks(2, quota), quota)
        calls = 0
        rank = pool.quotas._rank

        def counting(quota: TenantQuota) -> tuple[float, float]:
            nonlocal calls
            calls += 1
            return rank(quota)  # noqa: B023

        monkeypatch.setattr(pool.quotas, "_rank", counting)
        for _ in range(10):
            pool.get_new_blocks(1, quotas[0])
        probes.append(calls)
    assert probes[0] == probes[1]


def test_eviction_follows_the_shares_as_tenants_and_weights_come_and_go() -> None:
    pool = BlockPool(30)
    a, b = pool.quotas.record_request("a"), pool.quotas.record_request("b")
    blocks = {quota.name: pool.get_new_blocks(15, quota) for quota in (a, b)}
    for quota in (a, b):
        pool.free_blocks(blocks[quota.name], quota)
    pool.quotas.record_request("a", weight=3)
    c = pool.quotas.record_request("c")
    pool.get_new_blocks(5, c)
    # At three times the weight a's 15 blocks are within its share: b's are evicted.
    assert (a.free.count, b.free.count) == (15, 10)
    pool.quotas.record_request("b", reserved_fraction=0.9)
    pool.get_new_blocks(3, c)
    assert (a.free.count, b.free.count) == (12, 10)
