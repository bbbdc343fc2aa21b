"""A tenant that sends ten times its share does not make others wait (`docs/scheduler.md`)."""

from __future__ import annotations

import pytest

from engine.scheduler.fair_queue import OUTPUT_COST, PROMPT_COST
from tests.engine.helpers import Driver
from tests.engine.simulation import Simulation, Tenant

#: Requests a second that the machine serves when it's full.
CAPACITY, SEATS = 120.0, 64
#: Requests of the modest tenant in a run: so many are needed to tell of one in a hundred.
MODEST = 360
LONGEST_PROMPT, LONGEST_OUTPUT = 120, 60


def machine(policy: str = "fair", reserved_fraction: float = 1 / 16) -> Driver:
    return Driver(
        num_blocks=2000,
        block_size=16,
        token_budget=512,
        max_num_seqs=SEATS,
        enable_prefix_caching=False,
        scheduling_policy=policy,
        kept_seats_fraction=reserved_fraction,
    )


def seconds(load: float) -> float:
    """How long a tenant that sends this part of its share, half of the machine, takes for its."""
    return MODEST / (load * CAPACITY / 2)


def modest(load: float) -> Tenant:
    """One that sends this part of its share."""
    return Tenant(rate=load * CAPACITY / 2, until=seconds(load))


def greedy(until: float) -> Tenant:
    """One that sends ten times its share."""
    return Tenant(rate=10 * CAPACITY / 2, until=until)


def run_with_flood(
    load: float, policy: str = "fair", reserved_fraction: float = 1 / 16
) -> dict[str, Tenant]:
    """A modest tenant beside a greedy one on a whole machine."""
    tenants = {"modest": modest(load), "greedy": greedy(seconds(load))}
    Simulation(machine(policy, reserved_fraction), tenants).run_until(seconds(load))
    return tenants


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_p99_of_the_first_token_is_within_a_quarter_of_running_alone_at_the_same_share(
    load: float,
) -> None:
    isolated = {"modest": modest(load)}
    Simulation(machine(), isolated, speed=0.5).run_until(seconds(load))
    tenants = run_with_flood(load)
    assert len(tenants["modest"].ttft) > 300
    assert tenants["modest"].p99 <= 1.25 * isolated["modest"].p99
    # The machine wasn't idle meanwhile: the greedy one got what the modest one left.
    assert tenants["greedy"].service > tenants["modest"].service


def test_first_come_first_served_would_make_it_wait_for_seconds() -> None:
    tenants = run_with_flood(0.6, "fcfs")
    assert tenants["modest"].p99 > 5.0


def test_both_over_their_shares_stay_within_the_published_bound() -> None:
    tenants = {"greedy": greedy(14.0), "modest": Tenant(rate=CAPACITY, until=14.0)}
    simulation = Simulation(machine(), tenants)
    bound = 2 * max(PROMPT_COST * LONGEST_PROMPT, OUTPUT_COST * SEATS * LONGEST_OUTPUT)
    for second in range(2, 14):
        simulation.run_until(float(second))
        assert min(simulation.backlog.values()) > 0
        if second == 2:
            # From here on both have requests waiting all the time.
            start = {name: tenant.service for name, tenant in tenants.items()}
        got = {name: tenant.service - start[name] for name, tenant in tenants.items()}
        assert abs(got["greedy"] - got["modest"]) <= bound
    assert min(got.values()) > 4 * bound


def test_seats_are_kept_only_while_others_have_been_here() -> None:
    driver = machine()
    for index in range(SEATS + 5):
        driver.add([index, 1], tenant="only")
    driver.step()
    assert len(driver.scheduler.running) == SEATS
    driver = machine()
    driver.scheduler.finish(driver.add([7], tenant="other"), "abort")
    for index in range(SEATS + 5):
        driver.add([index, 1], tenant="only")
    driver.step()
    assert len(driver.scheduler.running) == SEATS - 4
    late = driver.add([8, 9], tenant="other")
    driver.step()
    assert late.num_output_tokens == 1
