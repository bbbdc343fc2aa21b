"""Fair shares between tenants, shown by simulation: the test plays the model's part."""

from __future__ import annotations

import random

import pytest

from engine.scheduler.fair_queue import FORGET_AFTER_S, OUTPUT_COST, PROMPT_COST, FairQueue
from engine.scheduler.request import Sequence
from tests.engine.helpers import Driver

PROMPT, OUTPUT, SEATS = 12, 10, 4
#: Service that a tenant may be ahead of another: the published bound, with the tokens that all
#: running sequences can hold as the size of the pool.
BOUND = 2 * max(PROMPT_COST * PROMPT, OUTPUT_COST * SEATS * OUTPUT)


class Simulation:
    """Tenants keep so many requests queued each; every request runs OUTPUT tokens."""

    def __init__(self, demand: dict[str, int], weights: dict[str, float] | None = None) -> None:
        self.driver = Driver(num_blocks=400, max_num_seqs=SEATS, enable_prefix_caching=False)
        self.demand, self.weights = demand, weights or {}
        self.service = dict.fromkeys(demand, 0.0)
        self.waiting_since: dict[int, int] = {}
        self.waits: dict[str, list[int]] = {name: [] for name in demand}
        self.now = 0
        self._live: list[Sequence] = []
        self._rng = random.Random(3)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._arrive()
            self._step()
            self.now += 1

    def _arrive(self) -> None:
        for tenant, num_wanted_requests in self.demand.items():
            queued = sum(s.request.message.tenant == tenant for s in self._live)
            for _ in range(num_wanted_requests - queued):
                prompt = [self._rng.randrange(100) for _ in range(PROMPT)]
                weight = self.weights.get(tenant, 1.0)
                sequence = self.driver.add(prompt, tenant=tenant, weight=weight)
                self._live.append(sequence)
                self.waiting_since[sequence.seq_id] = self.now

    def _step(self) -> None:
        plan = self.driver.step(check=self.now % 20 == 0)
        for sequence in list(self._live):
            if sequence.seq_id not in plan.seq_ids:
                continue
            tenant = sequence.request.message.tenant
            if sequence.num_output_tokens == 1:
                self.service[tenant] += PROMPT_COST * PROMPT
                self.waits[tenant].append(self.now - self.waiting_since[sequence.seq_id])
            self.service[tenant] += OUTPUT_COST
            if sequence.num_output_tokens == OUTPUT:
                self.driver.scheduler.finish(sequence, "length")
                self._live.remove(sequence)


def test_a_tenant_that_sends_ten_times_as_much_gets_no_more() -> None:
    simulation = Simulation({"greedy": 40, "modest": 4})
    for _ in range(20):
        simulation.run(50)
        assert abs(simulation.service["greedy"] - simulation.service["modest"]) <= BOUND
    assert min(simulation.service.values()) > 10 * BOUND


def test_first_come_first_served_would_give_it_nearly_all() -> None:
    simulation = Simulation({"greedy": 40, "modest": 4})
    simulation.driver = Driver(
        num_blocks=400, max_num_seqs=SEATS, scheduling_policy="fcfs", enable_prefix_caching=False
    )
    simulation.run(1000)
    assert simulation.service["greedy"] > 5 * simulation.service["modest"]


@pytest.mark.parametrize("weight", [2.0, 3.0])
def test_service_follows_the_weights(weight: float) -> None:
    simulation = Simulation({"small": 20, "large": 20}, {"large": weight})
    simulation.run(2000)
    difference = simulation.service["large"] / weight - simulation.service["small"]
    assert abs(difference) <= BOUND
    assert simulation.service["small"] > 10 * BOUND


def test_an_idle_share_goes_to_whoever_is_there() -> None:
    shared = Simulation({"busy": 20, "idle": 0})
    shared.run(500)
    isolated_simulation = Simulation({"busy": 20})
    isolated_simulation.run(500)
    assert shared.service["busy"] == isolated_simulation.service["busy"]


def test_nobody_saves_up_service_while_away() -> None:
    simulation = Simulation({"steady": 10, "sleeper": 0})
    simulation.run(1000)
    simulation.demand["sleeper"] = 10
    initial = dict(simulation.service)
    simulation.run(500)
    got = {name: simulation.service[name] - initial[name] for name in initial}
    # The sleeper gets its share from now on, not the thousand steps that it slept.
    assert abs(got["sleeper"] - got["steady"]) <= BOUND


def test_a_tenant_that_was_away_for_an_hour_is_forgotten_and_one_that_runs_or_waits_is_not() -> (
    None
):
    now = 0.0
    driver = Driver(num_blocks=50, max_num_seqs=1)
    queue = FairQueue(clock=lambda: now)
    driver.scheduler.waiting = queue
    driver.scheduler._runs._waiting = queue
    for number in range(1000):
        passing = driver.add([number], tenant=f"t{number}")
        driver.step()
        driver.scheduler.finish(passing, "stop")
    driver.add([1], tenant="runs")
    driver.step()
    driver.add([2], tenant="waits")
    for _ in range(3):
        now += FORGET_AFTER_S
        driver.step()
        driver.scheduler.finish(driver.add([3], tenant="new"), "abort")
    assert set(queue.counters) == {"runs", "waits", "new"}


def test_a_tenant_that_is_forgotten_begins_where_the_others_are() -> None:
    now = 0.0
    queue = FairQueue(clock=lambda: now)
    driver = Driver(num_blocks=50)
    away, local = (
        driver.add([number], tenant=name) for number, name in enumerate(("away", "there"))
    )
    queue.charge_prompt(away, 500)
    for _ in range(3):
        queue.push(local)
        queue.pop(local)
        queue.charge_prompt(local, 100)
        now += FORGET_AFTER_S
    assert "away" not in queue.counters
    queue.push(local)
    queue.push(away)
    assert queue.counters["away"] == queue.counters["there"]


def test_a_modest_tenant_waits_no_longer_than_for_the_next_free_seats() -> None:
    simulation = Simulation({"greedy": 60, "modest": 1})
    simulation.run(1000)
    assert max(simulation.waits["modest"][1:]) <= OUTPUT


def test_within_a_tenant_requests_run_in_the_order_they_came() -> None:
    driver = Driver(num_blocks=50, max_num_seqs=1)
    first = driver.add([1], tenant="a")
    second = driver.add([2], tenant="a")
    assert driver.step().seq_ids == [first.seq_id]
    driver.scheduler.finish(first, "stop")
    assert driver.step().seq_ids == [second.seq_id]


def test_priority_comes_before_shares() -> None:
    driver = Driver(num_blocks=50, max_num_seqs=1)
    driver.add([1, 2], tenant="a")
    urgent = driver.add([3] * 30, tenant="b", priority=-1)
    assert driver.step().seq_ids == [urgent.seq_id]


def test_requests_that_ended_while_they_waited_are_skipped() -> None:
    driver = Driver(num_blocks=50)
    gone = [driver.add([1], tenant="a") for _ in range(5)]
    retained_sequence = driver.add([2], tenant="b")
    for sequence in gone:
        driver.scheduler.finish(sequence, "abort")
    queue = driver.scheduler.waiting
    assert isinstance(queue, FairQueue)
    assert len(queue) == 1
    assert driver.step().seq_ids == [retained_sequence.seq_id]
    assert queue.peek() is None
    with pytest.raises(RuntimeError):
        queue.pop(retained_sequence)


def test_many_idle_tenants_leave_no_lines_behind() -> None:
    driver = Driver(num_blocks=400, max_num_seqs=64)
    for index in range(200):
        sequence = driver.add([index % 90], tenant=f"t{index}")
        driver.step()
        driver.scheduler.finish(sequence, "stop")
    queue = driver.scheduler.waiting
    assert isinstance(queue, FairQueue)
    assert not queue._queues
    assert not queue._order
