"""Which of a tenant's prompts goes first: whichever is due first, and short ones are due soon."""

from __future__ import annotations

import random
import statistics

import pytest

from engine.scheduler.request import Sequence
from tests.engine.helpers import Driver


def one_seat(**settings: object) -> Driver:
    """A driver that runs one sequence at a time, so that the order of starts is the queue's."""
    return Driver(num_blocks=2000, max_num_seqs=1, **settings)


def prompt(tokens: int, first: int = 0) -> list[int]:
    """Tokens that no other prompt with another `first` begins with."""
    return [first, *range(tokens - 1)]


def run_first(driver: Driver) -> Sequence:
    """Run whoever is first to its end."""
    driver.step()
    (sequence,) = driver.scheduler.running
    driver.scheduler.finish(sequence, "length")
    return sequence


def test_the_shortest_of_prompts_that_came_together_goes_first() -> None:
    driver = one_seat()
    waiting = [driver.add(prompt(tokens, tokens)) for tokens in (40, 10, 30, 20)]
    order = [run_first(driver) for _ in waiting]
    assert [one.num_prompt_tokens for one in order] == [10, 20, 30, 40]


def test_prompts_of_one_length_go_by_arrival() -> None:
    driver = one_seat()
    waiting = [driver.add(prompt(16, i)) for i in range(5)]
    assert [run_first(driver) for _ in waiting] == waiting


def test_zero_goes_by_arrival_whatever_the_lengths_are() -> None:
    driver = one_seat(prompt_overtaking=0.0)
    waiting = [driver.add(prompt(tokens, tokens)) for tokens in (40, 10, 30, 20)]
    assert [run_first(driver) for _ in waiting] == waiting


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_other_policies_go_by_arrival(policy: str) -> None:
    driver = one_seat(scheduling_policy=policy)
    waiting = [driver.add(prompt(tokens, tokens)) for tokens in (40, 10, 30)]
    assert [run_first(driver) for _ in waiting] == waiting


@pytest.mark.parametrize("overtaking", [1.0, 4.0])
def test_a_long_prompt_is_passed_only_until_its_own_tokens_were_served_so_many_times(
    overtaking: float,
) -> None:
    driver = one_seat(prompt_overtaking=overtaking, enable_prefix_caching=False)
    long = driver.add(prompt(100))
    served = 0
    while True:  # each comes when the one before it has gone
        driver.add(prompt(10))
        first = run_first(driver)
        if first is long:
            break
        served += first.num_tokens
    # Then one that comes is due, by its own 10 tokens, no earlier than the long one.
    assert overtaking * (100 - 10) <= served < overtaking * (100 - 10) + 11


def test_output_of_others_brings_a_long_prompt_closer_too() -> None:
    driver = one_seat(prompt_overtaking=1.0, enable_prefix_caching=False)
    running = driver.add(prompt(10))
    driver.step()
    long = driver.add(prompt(100))
    for _ in range(95):  # the seat is taken: nobody's prompt starts
        driver.step()
    late = driver.add(prompt(10))
    driver.scheduler.finish(running, "length")
    assert [run_first(driver), run_first(driver)] == [long, late]


def test_what_the_prefix_cache_holds_does_not_count() -> None:
    driver = one_seat()
    run_first_twice = driver.add(prompt(80))
    assert run_first(driver) is run_first_twice
    unseen, seen = driver.add(prompt(20, first=7)), driver.add(prompt(80))
    assert run_first(driver) is seen
    assert run_first(driver) is unseen


def test_priorities_come_before_lengths() -> None:
    driver = one_seat()
    later, urgent = driver.add(prompt(10, 1)), driver.add(prompt(40, 2), priority=-1)
    assert run_first(driver) is urgent
    assert run_first(driver) is later


def test_what_was_preempted_goes_before_shorter_prompts() -> None:
    driver = one_seat()
    long = driver.add(prompt(40, 1))
    driver.step()
    driver.scheduler.preempt(long)
    driver.add(prompt(10, 2))
    assert run_first(driver) is long


def test_a_tenants_short_prompts_take_nothing_from_another_tenant() -> None:
    driver = one_seat(enable_prefix_caching=False)
    for _ in range(8):
        driver.add(prompt(10), tenant="short")
    long = driver.add(prompt(40), tenant="long")
    order = [run_first(driver) for _ in range(9)]
    # Whoever got least goes first: at the latest after as much service as the long one takes.
    assert order.index(long) <= 1


def mean_wait(overtaking: float) -> tuple[float, int]:
    """Mean and longest wait, in tokens, of prompts that come at random at 0.9 of the capacity."""
    driver = one_seat(prompt_overtaking=overtaking, enable_prefix_caching=False)
    rng = random.Random(5)
    clock, arrives_at, came, waits = 0, 0.0, {}, []
    for _ in range(300):
        arrives_at += rng.expovariate(0.9 / 110)
        while len(driver.scheduler.waiting) and clock < arrives_at:
            clock = _run(driver, clock, came, waits)
        clock = max(clock, int(arrives_at))
        came[driver.add(prompt(rng.choice([20, 200]))).seq_id] = arrives_at
    while len(driver.scheduler.waiting):
        clock = _run(driver, clock, came, waits)
    return statistics.mean(waits), max(waits)


def _run(driver: Driver, clock: int, came: dict[int, float], waits: list[float]) -> int:
    done = run_first(driver)
    waits.append(clock - came[done.seq_id])
    return clock + done.num_prompt_tokens


def test_the_mean_wait_falls_and_the_longest_stays_bounded() -> None:
    by_arrival, longest_by_arrival = mean_wait(0.0)
    by_due, longest = mean_wait(4.0)
    assert by_due < 0.75 * by_arrival
    assert longest < longest_by_arrival + 4 * 200
