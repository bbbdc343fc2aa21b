"""How many prompt tokens a step holds in which others decode."""

from __future__ import annotations

import random

import pytest

from engine.scheduler.prefill_budget import PrefillBudget, PrefillLimits
from engine.scheduler.step_builder import StepBuilder
from tests.engine.helpers import Driver


def decoding(driver: Driver, count: int) -> None:
    """`count` sequences that decode."""
    for index in range(count):
        driver.add([1000 + index], max_tokens=500)
    driver.step()


def test_a_step_holds_more_prompt_tokens_the_more_sequences_decode() -> None:
    share = PrefillLimits(max_prompt_tokens=320, saturation_decodes=32)
    assert [share.prompt_tokens(decodes, 100) for decodes in (12, 20, 32, 40)] == [
        120,
        200,
        320,
        320,
    ]


def test_few_that_decode_wait_for_a_third_of_the_most() -> None:
    share = PrefillLimits(max_prompt_tokens=320, saturation_decodes=32)
    assert {share.prompt_tokens(decodes, 100) for decodes in range(1, 11)} == {100}


def test_many_waiting_prompts_get_a_larger_share_up_to_the_most() -> None:
    share = PrefillLimits(max_prompt_tokens=320, saturation_decodes=32)
    assert [share.prompt_tokens(1, tokens) for tokens in (0, 1000, 6400, 100_000)] == [
        100,
        100,
        200,
        320,
    ]


def test_few_that_decode_leave_prompts_the_least_or_the_most() -> None:
    assert [
        PrefillLimits(max_tokens, saturation_decodes=32).prompt_tokens(1, 0)
        for max_tokens in (8, 63, 192)
    ] == [8, 63, 71]
    assert PrefillLimits(384, saturation_decodes=32, min_step_tokens=160).prompt_tokens(8, 0) == 152


@pytest.mark.parametrize("max_tokens", [40, 180])
def test_prompts_get_tokens_for_each_sequence_that_decodes_however_long_it_takes(
    max_tokens: int,
) -> None:
    share = PrefillLimits(max_tokens, saturation_decodes=2000, min_step_tokens=72)
    assert [share.prompt_tokens(decodes, 0) for decodes in (9, 18, 32, 200)] == [63, 126, 224, 1400]
    assert (
        PrefillLimits(max_tokens, saturation_decodes=20, min_step_tokens=9).prompt_tokens(10, 0)
        == max_tokens // 2
    )  # their part of the most


def served(share: PrefillLimits, streams: int, per_token: float) -> tuple[float, float]:
    """Mean wait for the first token and longest step, in seconds, by a closed loop of requests.

    320 prompt and 96 output tokens each; a step takes 20 ms, 1 ms for each decode and `per_token`
    seconds for each prompt token: two cores without wide vectors.
    """
    clock, waits, longest = 0.0, [], 0.0
    waiting, decoding = [(320, 0.0)] * streams, [0] * 0
    while len(waits) < 6 * streams:
        budget = (
            2048 if not decoding else share.prompt_tokens(len(decoding), sum(w for w, _ in waiting))
        )
        used, done = 0, 0
        for index, (tokens, came) in enumerate(waiting):
            part = min(tokens, budget - used)
            used += part
            waiting[index] = (tokens - part, came)
        step = 0.02 + 0.001 * len(decoding) + per_token * used
        clock, longest = clock + step, max(longest, step if decoding else 0.0)
        waits += [clock - came for tokens, came in waiting if not tokens]
        done = sum(not tokens for tokens, _ in waiting)
        remaining_tokens = [tokens - 1 for tokens in decoding]
        waiting = [w for w in waiting if w[0]] + [(320, clock)] * remaining_tokens.count(0)
        decoding = [tokens for tokens in remaining_tokens if tokens] + [95] * done
    return sum(waits) / len(waits), longest


def test_prompts_do_not_starve_on_a_slow_machine() -> None:
    per_token = 0.00144
    max_tokens = int(0.09 / per_token)
    # As before, when nothing went beyond the 0.09 s: their part of the most alone.
    starved, _ = served(
        PrefillLimits(max_tokens, saturation_decodes=64, min_step_tokens=1), 32, per_token
    )
    wait, step = served(PrefillLimits(max_tokens, saturation_decodes=64), 32, per_token)
    full, stalled = served(PrefillLimits(10**6), 32, per_token)
    assert wait < 0.4 * starved
    assert wait < 1.2 * full
    assert step < 0.5 * stalled


def test_without_a_number_of_decodes_the_share_is_always_the_most() -> None:
    assert PrefillLimits(max_prompt_tokens=112).prompt_tokens(1, 1) == 112


def test_prompts_beside_decodes_are_dealt_the_share() -> None:
    driver = Driver(1000, 512, prefill_limits=PrefillLimits(320, saturation_decodes=32))
    decoding(driver, 12)
    driver.add(list(range(2000, 2480)))
    assert driver.step().num_scheduled == [1] * 12 + [120]


def test_a_prompt_goes_in_parts_of_one_size_that_are_an_eighth_larger_at_most() -> None:
    share = PrefillLimits(320, saturation_decodes=32)
    assert [share.chunk(num_tokens, 96) for num_tokens in (96, 108, 109, 300, 320, 2000)] == [
        96,
        108,
        55,
        100,
        80,
        96,
    ]
    for expected_index in range(1, 2000):
        assert 0 < share.chunk(expected_index, 96) <= min(expected_index, 108)


def test_a_prompt_never_takes_more_than_a_share_that_was_told() -> None:
    assert [PrefillLimits(96).chunk(num_tokens, 96) for num_tokens in (95, 97, 120)] == [95, 96, 96]


@pytest.mark.parametrize("num_remaining", [0, -24])
def test_nothing_is_left_of_a_share_that_is_used_up(num_remaining: int) -> None:
    assert PrefillLimits(320, saturation_decodes=32).chunk(50, num_remaining) == 0


def test_a_prompts_last_tokens_need_no_step_of_their_own() -> None:
    driver = Driver(
        1000, 512, prefill_limits=PrefillLimits(320, saturation_decodes=32, min_step_tokens=96)
    )
    decoding(driver, 2)
    driver.add(list(range(2000, 2104)))
    driver.add(list(range(3000, 3104)))
    assert driver.step().num_scheduled == [1, 1, 104]
    assert driver.step().num_scheduled == [1, 1, 1, 104]


def test_a_backlog_of_prompts_raises_the_share() -> None:
    driver = Driver(4000, 512, prefill_limits=PrefillLimits(320, saturation_decodes=32))
    decoding(driver, 2)
    for index in range(10):
        driver.add([3000 + index] * 480)
    assert sum(driver.step().num_scheduled) == 2 + 4800 // 32


@pytest.mark.parametrize("policy", ["fair", "fcfs", "priority"])
def test_the_queue_knows_how_many_tokens_wait(policy: str) -> None:
    driver = Driver(60, 40, scheduling_policy=policy, max_num_seqs=6)
    rng, alive = random.Random(3), []
    for index in range(60):
        alive.append(driver.add([index] * rng.randint(1, 40), max_tokens=rng.randint(1, 9)))
        driver.step()
        if rng.random() < 0.3:
            driver.scheduler.finish(rng.choice(alive), "abort")
        waiting = [one for one in alive if one.status.name in ("WAITING", "PREEMPTED")]
        assert driver.scheduler.waiting.num_tokens == sum(one.num_tokens for one in waiting)
    while driver.scheduler.has_work:
        driver.step(check=False)
    driver.scheduler.check_integrity()
    assert driver.scheduler.waiting.num_tokens == 0


@pytest.mark.parametrize("remaining_to_compute", [1, 4])
def test_prompts_that_were_cached_start_a_few_a_step_beside_decodes(
    remaining_to_compute: int,
) -> None:
    driver = Driver(
        4000, 512, prefill_limits=PrefillLimits(80, saturation_decodes=32), max_num_seqs=300
    )
    prompt = list(range(40 + remaining_to_compute))
    first = driver.add(prompt)
    driver.step()
    driver.scheduler.finish(first, "stop")
    decoding(driver, 1)
    for _ in range(64):
        driver.add(prompt, max_tokens=1)
    # 71 tokens go beside one decode, and a start counts as 8 of them; with more that decode, more.
    assert [len(driver.step().new) for _ in range(5)] == [9, 9, 17, 29, 0]


def test_prompts_that_were_cached_start_at_once_where_nobody_decodes() -> None:
    driver = Driver(
        4000, 512, prefill_limits=PrefillLimits(80, saturation_decodes=32), max_num_seqs=300
    )
    first = driver.add(list(range(41)))
    driver.step()
    driver.scheduler.finish(first, "stop")
    for _ in range(64):
        driver.add(list(range(41)))
    assert len(driver.step().new) == 64


def test_a_start_that_is_taken_back_leaves_its_share_to_others() -> None:
    driver = Driver(100, 512)
    draft = StepBuilder(1, 512, PrefillBudget(64, min_tokens_per_start=8))
    sequence = driver.add([1])
    draft.start(sequence, [])
    draft.add(sequence, 1)
    assert draft.prefill.remaining == 56
    draft.remove(sequence)
    assert draft.prefill.remaining == 64
    assert not draft.is_new(sequence)
    assert (draft.prefill.load.tokens, draft.prefill.load.context_reads) == (0, 0)


@pytest.mark.parametrize("context", [0, 100, 3000])
def test_tokens_behind_a_context_take_more_of_the_room(context: int) -> None:
    budget = PrefillBudget(400, context_tokens_per_token=250)
    count = budget.tokens(context)
    assert 0 < count <= 400 / (1 + context / 250)
    budget.consume(count, context, starts=False)
    # One token more would have been too much.
    assert 0 <= budget.remaining < 1 + (context + 400) / 250
    budget.refund(count, context, starts=False)
    assert budget.remaining == 400


def test_some_tokens_fit_whatever_they_take() -> None:
    budget = PrefillBudget(100, min_tokens=60, context_tokens_per_token=10)
    assert budget.tokens(5000) == 60
    budget.consume(50, 5000, starts=False)
    assert budget.remaining < 0
    assert (budget.tokens(5000), budget.tokens(0)) == (10, 10)


def test_cached_prompts_that_start_are_fewer_the_more_they_read() -> None:
    started = []
    for cached in (64, 1600):
        share = PrefillLimits(
            320, saturation_decodes=32, min_step_tokens=16, context_cost_tokens=100
        )
        driver = Driver(4000, 512, prefill_limits=share, max_num_seqs=300)
        prompt = list(range(cached + 8))
        first = driver.add(prompt)
        while not first.num_output_tokens:
            driver.step()
        driver.scheduler.finish(first, "stop")
        decoding(driver, 1)
        for _ in range(200):
            driver.add([*prompt, 1, 2, 3, 4, 5, 6, 7, 8], max_tokens=1)
        started.append(len(driver.step().new))
    few, fewest = started
    assert 1 <= fewest < few
