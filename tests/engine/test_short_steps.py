"""Steps are held short while others are about beside a tenant that holds most of the machine."""

from __future__ import annotations

import functools
import time
from itertools import pairwise

import pytest

from engine.kv_cache.tenant_quotas import LATELY_S
from engine.scheduler import Sequence, StepPlan
from engine.scheduler.prefill_budget import PrefillLimits
from tests.engine.helpers import Driver
from tests.engine.simulation import Costs, Simulation, Tenant

SECONDS = 60.0
#: A hundred million parameters on two cores: a row costs what a prompt's token does.
COSTS = Costs(step=0.004, prefill=0.0005, decode=0.0005)
#: Tokens that take 0.08 s, and the requests a second that the machine serves when it's full.
PROMPT_TOKENS, CAPACITY = 160, 14.0


def machine(full: int = PROMPT_TOKENS, **settings: object) -> Driver:
    return Driver(
        num_blocks=4000,
        block_size=16,
        token_budget=512,
        max_num_seqs=256,
        enable_prefix_caching=False,
        prefill_limits=PrefillLimits(160, saturation_decodes=64, target_step_tokens=full),
        **settings,
    )


def modest(load: float) -> Tenant:
    """One that sends this part of its share, half of the machine."""
    return Tenant(rate=load * CAPACITY / 2, until=SECONDS)


@functools.cache
def run_with_flood(load: float, full: int = PROMPT_TOKENS) -> dict[str, Tenant]:
    """A modest tenant beside one that keeps 250 requests open."""
    tenants = {"modest": modest(load), "greedy": Tenant(0.0, SECONDS, at_once=250)}
    Simulation(machine(full), tenants, costs=COSTS).run_until(SECONDS)
    return tenants


def flood(driver: Driver, count: int, tenant: str = "greedy", **options: int) -> list[Sequence]:
    """So many of a tenant's that decode."""
    rows = [driver.add([index], tenant=tenant, **options) for index in range(count)]
    for _ in range(100):
        driver.step()
        if all(sequence.num_output_tokens for sequence in rows):
            return rows
    raise RuntimeError("Some don't begin.")


def visit(driver: Driver) -> None:
    """Somebody else has been here lately."""
    driver.scheduler.finish(driver.add([1], tenant="modest"), "abort")


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_p99_of_the_first_token_beside_hundreds_of_streams_is_within_a_quarter_of_alone(
    load: float,
) -> None:
    isolated = {"modest": modest(load)}
    Simulation(machine(), isolated, speed=0.5, costs=COSTS).run_until(SECONDS)
    assert run_with_flood(load)["modest"].p99 <= 1.25 * isolated["modest"].p99
    assert run_with_flood(load, full=0)["modest"].p99 > 2 * isolated["modest"].p99


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_the_greedy_one_pays_a_tenth_at_most(load: float) -> None:
    assert (
        run_with_flood(load)["greedy"].service
        > 0.9 * run_with_flood(load, full=0)["greedy"].service
    )


def run(tenants: dict[str, Tenant], full: int) -> list[StepPlan]:
    """The plans of some seconds."""
    driver, plans = machine(full), list[StepPlan]()
    inner = driver.step
    driver.step = lambda *args, **options: plans.append(inner(*args, **options)) or plans[-1]
    Simulation(driver, tenants, costs=COSTS).run_until(10.0)
    return plans


def test_a_tenant_that_is_alone_sees_no_change() -> None:
    assert run({"only": Tenant(0.0, 10.0, at_once=250)}, PROMPT_TOKENS) == run(
        {"only": Tenant(0.0, 10.0, at_once=250)}, 0
    )


def test_where_all_flood_steps_stay_long() -> None:
    def tenants() -> dict[str, Tenant]:
        return {name: Tenant(0.0, 10.0, at_once=125) for name in ("one", "other")}

    assert run(tenants(), PROMPT_TOKENS) == run(tenants(), 0)


def rotate(driver: Driver, rows: list[Sequence]) -> None:
    """240 rows, 160 a step: each sits out every third step, never two in a row."""
    initial_num_output_tokens = [sequence.num_output_tokens for sequence in rows]
    dealt = [driver.step().seq_ids for _ in range(12)]
    assert [len(seq_ids) for seq_ids in dealt] == [PROMPT_TOKENS] * 12
    gained = [
        row.num_output_tokens - had
        for row, had in zip(rows, initial_num_output_tokens, strict=True)
    ]
    assert set(gained) == {8}
    ids = {sequence.seq_id for sequence in rows}
    assert all({*one, *other} == ids for one, other in pairwise(dealt))


def test_rows_take_turns() -> None:
    driver = machine()
    rows = flood(driver, 240)
    visit(driver)
    rotate(driver, rows)


def test_steps_are_long_again_once_nobody_else_came_for_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, now = machine(), time.monotonic()
    flood(driver, 240)
    visit(driver)
    assert driver.step().num_tokens == PROMPT_TOKENS
    monkeypatch.setattr(driver.scheduler.kv.quotas, "_clock", lambda: now + LATELY_S + 60)
    assert driver.step().num_tokens == 240
    visit(driver)
    assert driver.step().num_tokens == PROMPT_TOKENS


def test_streams_come_nearly_as_fast_as_in_long_steps() -> None:
    mean: dict[int, float] = {}
    longest: dict[int, float] = {}
    for full in (0, PROMPT_TOKENS):
        driver = machine(full)
        visit(driver)
        tenants = {"modest": modest(0.6), "greedy": Tenant(0.0, 20.0, at_once=250)}
        simulation, last, gaps = Simulation(driver, tenants, costs=COSTS), dict[int, float](), [0.0]
        while simulation.now < 20.0:
            simulation.run_until(simulation.now + 1e-9)
            for sequence in driver.sampled:
                if sequence.seq_id in last:
                    gaps.append(simulation.now - last[sequence.seq_id])
                last[sequence.seq_id] = simulation.now
        mean[full] = sum(gaps) / len(gaps)
        longest[full] = sorted(gaps)[int(0.99 * len(gaps))]
    assert mean[PROMPT_TOKENS] < 1.2 * mean[0]
    # While others' prompts come one after another they're served first, up to a bound.
    assert longest[PROMPT_TOKENS] < 2.5 * longest[0]


def test_others_rows_and_prompts_come_at_once_and_the_greedy_ones_get_the_rest() -> None:
    driver = machine()
    flood(driver, 200)
    theirs = flood(driver, 10, tenant="modest")
    late = driver.add(list(range(100)), tenant="modest")
    plan = driver.step()
    counts = dict(zip(plan.seq_ids, plan.num_scheduled, strict=True))
    assert counts[late.seq_id] == 100
    assert all(counts[sequence.seq_id] == 1 for sequence in theirs)
    # An eighth of a short step: a quarter of their share.
    assert len(counts) == 1 + 10 + PROMPT_TOKENS // 8
    # And of the next one, in which no prompt waits, all that others leave.
    assert driver.step().num_tokens == PROMPT_TOKENS


def test_prompts_of_the_greedy_one_go_on_beside_its_rows() -> None:
    driver = machine()
    flood(driver, 200)
    flood(driver, 2, tenant="modest")
    long = driver.add(list(range(3000)), tenant="greedy")
    steps = 0
    while not long.num_output_tokens:
        driver.step()
        steps += 1
    # As it would be: 512 a step, 202 of which decode. In short steps it takes the same time.
    assert 0.8 * 3000 / 310 * 512 / PROMPT_TOKENS < steps < 1.3 * 3000 / 310 * 512 / PROMPT_TOKENS


def test_others_that_stay_ahead_for_long_get_their_share() -> None:
    driver = machine()
    flood(driver, 200)
    for index in range(20):
        driver.add([index] * 1650, tenant="other")
    driver.step()
    tokens = {"greedy": 0, "other": 0}
    for step in range(60):
        plan = driver.step()
        for seq_id, count in zip(plan.seq_ids, plan.num_scheduled, strict=True):
            if step >= 20:
                tokens["greedy" if seq_id < 200 else "other"] += count
    assert 0.9 < tokens["greedy"] / tokens["other"] < 1.1


def test_others_whose_prompts_cannot_start_leave_the_step_to_the_greedy_one() -> None:
    driver = machine()
    flood(driver, 200)
    # Room for one of them.
    first, second = (
        driver.add([index] * 100, tenant="modest", maximum=10 / 4000) for index in range(2)
    )
    assert driver.step().num_tokens == 100 + PROMPT_TOKENS // 8
    assert driver.step().num_tokens == 1 + PROMPT_TOKENS // 8
    assert [driver.step().num_tokens for _ in range(4)] == [PROMPT_TOKENS] * 4
    driver.scheduler.finish(first, "stop")
    driver.step()
    assert (first.num_output_tokens, second.num_output_tokens) == (6, 1)


def test_an_urgent_row_never_sits_out() -> None:
    driver = machine()
    flood(driver, 200)
    urgent = flood(driver, 5, priority=-1)
    visit(driver)
    assert PROMPT_TOKENS <= driver.step().num_tokens <= PROMPT_TOKENS + len(urgent)
    for _ in range(6):
        assert {sequence.seq_id for sequence in urgent} <= set(driver.step().seq_ids)


def test_a_short_step_holds_no_drafts_beyond_its_length() -> None:
    class Source:
        budget = -1

        def untracked_sequences(self, plan: StepPlan, scheduled: list[Sequence]) -> list[int]:
            return []

        def propose(
            self, decoding: list[Sequence], budget: int, extra: int = 0
        ) -> dict[int, list[int]]:
            self.budget = budget
            return {}

        def record_outcome(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
            raise AssertionError

    driver = machine()
    flood(driver, 200)
    source = driver.scheduler.drafts.source = Source()
    driver.step()
    assert source.budget == 512 - 200
    late = driver.add(list(range(30)), tenant="modest")
    driver.step()
    assert late.num_output_tokens == 1
    assert source.budget == PROMPT_TOKENS - 30 - PROMPT_TOKENS // 8


def test_rows_get_what_prompts_leave_that_wait_for_seats() -> None:
    driver = machine()
    rows = flood(driver, 256 - 16)  # the others are kept for the modest one
    for index in range(20):
        driver.add([index] * 100, tenant="greedy")
    visit(driver)
    rotate(driver, rows)
