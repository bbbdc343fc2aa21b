"""The scheduler: budget, chunks, order, preemption, abort."""

from __future__ import annotations

import gc
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.lazy_heap import LazyHeap
from engine.scheduler import Sequence, SequenceStatus
from engine.scheduler.request_queue import RequestQueue
from tests.engine.helpers import Driver


def test_a_long_prompt_is_split_over_steps() -> None:
    driver = Driver(num_blocks=100, token_budget=16)
    sequence = driver.add(list(range(40)))
    assert [driver.step().num_scheduled for _ in range(4)] == [[16], [16], [8], [1]]
    assert sequence.num_output_tokens == 2
    assert sequence.timeline.prefill_chunks == 3


def test_decodes_come_first_and_prompts_take_the_rest_of_the_budget() -> None:
    driver = Driver(num_blocks=100, token_budget=16)
    driver.add([1, 2, 3])
    driver.step()
    driver.add(list(range(50, 90)))
    assert driver.step().num_scheduled == [1, 15]


def test_a_device_that_does_not_mix_alternates_prompts_and_decodes() -> None:
    driver = Driver(num_blocks=100, token_budget=16, mixes=False)
    driver.add([1, 2, 3])
    assert driver.step().num_scheduled == [3]
    driver.add(list(range(50, 83)))
    # Chunks of 16, 16 and 1 tokens; the last one isn't a decode although it has one token.
    steps = [driver.step().num_scheduled for _ in range(7)]
    assert steps == [[1], [16], [1], [16], [1], [1], [1, 1]]


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("num_blocks", [14, 60])
def test_without_mixing_every_sequence_ends(chunked: bool, num_blocks: int) -> None:
    driver = Driver(
        num_blocks=num_blocks, token_budget=48, mixes=False, enable_chunked_prefill=chunked
    )
    rng = random.Random(3)
    waiting = [[rng.randrange(50) for _ in range(rng.randrange(1, 30))] for _ in range(12)]
    sequences: list[Sequence] = []
    for _ in range(2_000):
        if waiting:
            sequences.append(driver.add(waiting.pop()))
        computed = {sequence.seq_id: sequence.num_tokens for sequence in sequences}
        plan = driver.step()
        decodes = {
            seq_id
            for seq_id, count in zip(plan.seq_ids, plan.num_scheduled, strict=True)
            if count == 1 and computed[seq_id] > sequences[seq_id].num_prompt_tokens
        }
        started = {new.seq_id for new in plan.new}
        assert decodes - started == set() or not started
        for sequence in sequences:
            if not sequence.finished and sequence.num_output_tokens >= 10:
                driver.scheduler.finish(sequence, "length")
        if not waiting and all(sequence.finished for sequence in sequences):
            break
    assert [sequence for sequence in sequences if not sequence.finished] == []


def test_without_chunked_prefill_a_prompt_waits_for_a_whole_budget() -> None:
    driver = Driver(num_blocks=100, token_budget=16, enable_chunked_prefill=False)
    driver.add(list(range(10)))
    driver.add(list(range(100, 110)))
    assert driver.step().num_scheduled == [10]
    assert driver.step().num_scheduled == [1, 10]


def test_long_prefill_token_threshold_leaves_room_for_others() -> None:
    driver = Driver(num_blocks=100, token_budget=64, long_prefill_token_threshold=8)
    driver.add(list(range(30)))
    driver.add(list(range(100, 130)))
    assert driver.step().num_scheduled == [8, 8]


def test_prompts_leave_room_for_decodes_and_take_all_when_nobody_decodes() -> None:
    driver = Driver(num_blocks=100, token_budget=64, prefill_limit=8)
    driver.add(list(range(30)))
    assert driver.step().num_scheduled == [30]
    late = driver.add(list(range(100, 130)))
    later = driver.add(list(range(200, 230)))
    assert driver.step().num_scheduled == [1, 8]
    for _ in range(3):
        driver.step()
    assert late.num_output_tokens == 1
    # The last chunk of one prompt and the first of the next share a step's allowance.
    assert later.num_computed_tokens == 2
    assert driver.step().num_scheduled == [1, 1, 8]


@pytest.mark.parametrize("policy", ["fair", "fcfs", "priority"])
def test_fault_54_what_is_aborted_behind_a_head_that_cannot_start_is_not_kept(policy: str) -> None:
    driver = Driver(num_blocks=100, max_num_seqs=1, scheduling_policy=policy)
    running, waiting = driver.add([1], tenant="a"), driver.add([2], tenant="a")
    driver.step()
    for number in range(3_000):
        gone = driver.add([3, 4], tenant=f"t{number % 2}")
        driver.scheduler.finish(gone, "abort")
    gc.collect()
    retained_total = sum(type(tracked) is Sequence for tracked in gc.get_objects())
    assert retained_total < 100
    assert len(driver.scheduler.waiting) == 1
    assert driver.scheduler.waiting.num_tokens == waiting.num_tokens
    driver.scheduler.finish(running, "stop")
    assert driver.step().seq_ids == [waiting.seq_id]


def test_no_more_sequences_than_max_num_seqs_run() -> None:
    driver = Driver(num_blocks=100, max_num_seqs=2)
    for start in (0, 10, 20):
        driver.add([start, start + 1])
    assert len(driver.step().seq_ids) == 2
    assert len(driver.scheduler.waiting) == 1


def test_priority_runs_first_and_fcfs_breaks_ties() -> None:
    driver = Driver(num_blocks=100, max_num_seqs=1, scheduling_policy="priority")
    driver.add([1], priority=5)
    urgent = driver.add([2], priority=-1)
    driver.add([3], priority=-1)
    assert driver.step().seq_ids == [urgent.seq_id]


def test_the_youngest_is_preempted_and_resumes_with_all_its_tokens() -> None:
    driver = Driver(num_blocks=4, enable_prefix_caching=False)
    old = driver.add([1, 2, 3, 4, 5, 6, 7])
    young = driver.add([11, 12, 13, 14, 15, 16, 17])
    driver.step()
    driver.step()
    # Both need a third block now; there is none, so the young one gives its two back.
    plan = driver.step()
    assert plan.seq_ids == [old.seq_id]
    assert plan.removed == [young.seq_id]
    assert young.status is SequenceStatus.PREEMPTED
    assert young.timeline.num_preemptions == 1
    assert young.num_output_tokens == 2
    driver.scheduler.finish(old, "stop")
    plan = driver.step()
    assert plan.seq_ids == [young.seq_id]
    assert plan.new[0].token_ids[:7] == [11, 12, 13, 14, 15, 16, 17]
    assert plan.num_scheduled == [9]


def test_a_preemption_is_told_with_its_remedy_and_the_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = Driver(num_blocks=4, enable_prefix_caching=False)
    driver.add([1, 2, 3, 4, 5, 6, 7])
    young = driver.add([11, 12, 13, 14, 15, 16, 17])
    with caplog.at_level("WARNING"):
        for _ in range(3):
            driver.step()
    (message,) = caplog.messages
    assert f"Request {young.request.request_id} is preempted" in message
    assert "Increase gpu_memory_utilization" in message
    assert message.endswith("total_cumulative_preemption_cnt=1")


def test_the_lowest_priority_is_preempted() -> None:
    driver = Driver(num_blocks=4, enable_prefix_caching=False, scheduling_policy="priority")
    low = driver.add([1, 2, 3, 4, 5, 6, 7], priority=9)
    high = driver.add([11, 12, 13, 14, 15, 16, 17], priority=0)
    driver.step()
    driver.step()
    assert driver.step().removed == [low.seq_id]
    assert high.status is SequenceStatus.RUNNING


def test_nothing_waiting_overtakes_a_preempted_sequence() -> None:
    driver = Driver(num_blocks=4, enable_prefix_caching=False)
    old = driver.add([1, 2, 3, 4, 5, 6, 7])
    young = driver.add([11, 12, 13, 14, 15, 16, 17])
    driver.step()
    small = driver.add([21])
    driver.step()
    driver.step()
    driver.scheduler.finish(old, "stop")
    assert driver.step().seq_ids == [young.seq_id, small.seq_id]


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode", "preempted"])
def test_an_abort_frees_everything_at_any_moment(when: str) -> None:
    driver = Driver(num_blocks=5, token_budget=8, enable_prefix_caching=False)
    sequence = driver.add(list(range(10)))
    if when == "waiting":
        driver.scheduler.finish(sequence, "abort")
    elif when == "prefill":
        driver.step()
        driver.scheduler.finish(sequence, "abort")
    elif when == "decode":
        driver.step()
        driver.step()
        driver.scheduler.finish(sequence, "abort")
    else:
        driver.scheduler.finish(sequence, "abort")
        old = driver.add(list(range(7)))
        driver.step()
        sequence = driver.add(list(range(20, 27)))
        for _ in range(20):
            driver.step()
            if sequence.status is SequenceStatus.PREEMPTED:
                break
        assert sequence.status is SequenceStatus.PREEMPTED
        driver.scheduler.finish(sequence, "abort")
        driver.scheduler.finish(old, "abort")
    driver.step()
    assert driver.scheduler.kv.pool.num_free_blocks == 5
    assert not driver.scheduler.has_work
    driver.scheduler.check_integrity()


def test_a_sequence_that_finishes_in_the_queue_is_skipped() -> None:
    driver = Driver(num_blocks=50)
    gone = driver.add([1])
    retained_sequence = driver.add([2])
    driver.scheduler.finish(gone, "abort")
    assert len(driver.scheduler.waiting) == 1
    assert driver.step().seq_ids == [retained_sequence.seq_id]


def test_a_failed_step_leaves_nothing_cached_and_its_sequences_run_alone() -> None:
    driver = Driver(num_blocks=50)
    first, second = driver.add(list(range(9))), driver.add(list(range(20, 29)))
    plan, scheduled = driver.scheduler.schedule()
    driver.scheduler.roll_back((plan, scheduled))
    assert driver.scheduler.kv.pool.num_cached == 0
    assert driver.scheduler.kv.pool.num_free_blocks == 50
    driver.scheduler.check_integrity()
    plan, scheduled = driver.scheduler.schedule()
    assert plan.seq_ids == [first.seq_id]
    assert plan.removed == [second.seq_id, first.seq_id]
    first.isolated = False
    first.token_ids.append(7)
    assert driver.step().seq_ids == [first.seq_id], "others have every second step"
    assert driver.step().seq_ids == [second.seq_id]


def test_an_isolated_prompt_shares_none_of_its_steps() -> None:
    driver = Driver(num_blocks=50, token_budget=8)
    isolated_sequence = driver.add(list(range(20)))
    isolated_sequence.isolated = True
    rows = []
    for _ in range(3):
        assert driver.scheduler.has_isolated_step
        plan = driver.step()
        rows.append((plan.seq_ids, plan.num_scheduled))
        driver.add([4, 5, 6])
    assert rows == [([isolated_sequence.seq_id], [count]) for count in (8, 8, 4)]
    isolated_sequence.isolated = False  # as it brings a token
    assert not driver.scheduler.has_isolated_step
    assert isolated_sequence.seq_id in (shared := driver.step().seq_ids)
    assert len(shared) > 1


def test_who_runs_beside_an_isolated_prompt_has_every_second_step() -> None:
    driver = Driver(num_blocks=50, token_budget=8)
    other = driver.add([1, 2, 3])
    driver.step()  # it decodes
    isolated_sequence = driver.add(list(range(20)))
    isolated_sequence.isolated = True
    rows = [driver.step().seq_ids for _ in range(6)]
    assert rows == [[isolated_sequence.seq_id], [other.seq_id]] * 3


def test_an_isolated_prompt_waits_for_a_seat_and_takes_the_next_one() -> None:
    driver = Driver(num_blocks=50, max_num_seqs=1)
    seated = driver.add([1, 2])
    driver.step()
    isolated_sequence = driver.add([3, 4])
    isolated_sequence.isolated = True
    for _ in range(3):
        assert driver.step().seq_ids == [seated.seq_id]
    driver.scheduler.finish(seated, "stop")
    assert driver.step().seq_ids == [isolated_sequence.seq_id]


def test_an_isolated_prompt_that_ends_lets_the_others_go_on() -> None:
    driver = Driver(num_blocks=50, token_budget=8)
    isolated_sequence = driver.add(list(range(20)))
    isolated_sequence.isolated = True
    assert driver.step().seq_ids == [isolated_sequence.seq_id]
    other = driver.add([4, 5, 6])
    driver.scheduler.finish(isolated_sequence, "abort")
    assert driver.step().seq_ids == [other.seq_id]


@pytest.mark.parametrize("policy", ["fair", "fcfs", "priority"])
def test_a_step_does_the_same_work_however_many_requests_wait(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in looks at queued sequences and at tenants; no list of them is walked."""
    counts: Counter[str] = Counter()
    for owner, name in ((RequestQueue, "peek_tenant"), (LazyHeap, "first"), (LazyHeap, "put")):
        counted(monkeypatch, owner, name, counts)
    work = []
    for waiting in (50, 5000):
        driver = Driver(num_blocks=50, max_num_seqs=4, scheduling_policy=policy)
        sequences = [driver.add([i % 97, 1], tenant=f"t{i % 10}") for i in range(waiting)]
        for sequence in sequences[10 : waiting // 2]:
            driver.scheduler.finish(sequence, "abort")
        driver.step()
        driver.scheduler.finish(driver.scheduler.running[0], "stop")
        counts.clear()
        driver.step()
        work.append(dict(counts))
        assert len(driver.scheduler.running) == 4
        assert len(driver.scheduler.waiting) == waiting - (waiting // 2 - 10) - 5
    assert work[0] == work[1]


def counted(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, counts: Counter[str]) -> None:
    """Count the calls of a method."""
    method = getattr(owner, name)

    def counting(*args: Any) -> Any:
        counts[name] += 1
        return method(*args)

    monkeypatch.setattr(owner, name, counting)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(4, 40),
    budget=st.integers(1, 40),
    policy=st.sampled_from(["fair", "fcfs", "priority"]),
    caching=st.booleans(),
)
def test_any_mix_of_arrivals_aborts_and_preemptions_keeps_the_books_balanced(
    seed: int, num_blocks: int, budget: int, policy: str, caching: bool
) -> None:
    rng = random.Random(seed)
    driver = Driver(
        num_blocks=num_blocks,
        token_budget=budget,
        max_num_seqs=rng.randint(1, 8),
        scheduling_policy=policy,
        enable_prefix_caching=caching,
    )
    live = []
    capacity = num_blocks * 4
    stems = [[rng.randint(0, 3) for _ in range(40)] for _ in range(2)]
    for _ in range(60):
        action = rng.random()
        if action < 0.3:
            prompt = rng.choice(stems)[: rng.randint(1, min(40, capacity - 1))]
            tenant = rng.choice("abc")
            live.append(driver.add(prompt, priority=rng.randint(0, 3), tenant=tenant))
        elif action < 0.4 and live:
            driver.scheduler.finish(live.pop(rng.randrange(len(live))), "abort")
        driver.step(next_token=rng.randint(0, 3))
        for sequence in list(live):
            if sequence.num_tokens >= capacity or rng.random() < 0.05:
                driver.scheduler.finish(sequence, "stop")
                live.remove(sequence)
        driver.scheduler.check_integrity()
    for sequence in live:
        driver.scheduler.finish(sequence, "abort")
    driver.step()
    assert driver.scheduler.kv.pool.num_free_blocks == num_blocks
    driver.scheduler.check_integrity()
