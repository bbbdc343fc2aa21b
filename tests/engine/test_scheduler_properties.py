"""Whatever comes, goes, forks or fails: the books balance and nobody reads another's KV."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.kv_cache import ContentKey
from engine.scheduler import Sequence, SequenceStatus
from engine.scheduler.plan import StepPlan
from engine.scheduler.prefill_budget import PrefillLimits
from engine.worker.input_batch import InputBatch
from engine.worker.step_inputs import StepInputs
from tests.engine.helpers import Driver
from tests.engine.paged_memory import PagedMemory

BLOCK = 4
QUOTAS = {"a": (0.0, 1.0), "b": (0.3, 1.0), "c": (0.0, 0.5)}


class Chaos:
    """Random requests against a scheduler, with a memory that checks what each step reads."""

    #: Tenant -> its reserve and its maximum, as fractions of the pool.
    shares = QUOTAS

    def __init__(self, seed: int, windows: tuple[int, ...], quotas: bool, **settings: Any) -> None:
        self.rng = random.Random(seed)
        self.quotas = quotas
        sizes = {
            "num_blocks": self.rng.randint(12, 40) * max(1, len(windows)),
            "token_budget": self.rng.randint(2, 24),
            "max_num_seqs": self.rng.randint(1, 8),
        }
        self.driver = Driver(windows=windows, **{**sizes, **settings})
        scheduler = self.driver.scheduler
        groups = getattr(scheduler.kv, "windows", (0,))
        self.memory = PagedMemory(groups, BLOCK)
        self.live: list[Sequence] = []
        self.max_sequence_tokens = min(60, scheduler.capacity_tokens // (2 if quotas else 1))
        for tenant, (reserved, maximum) in self.shares.items() if quotas else ():
            scheduler.kv.quotas.record_request(tenant, 1.0, reserved, maximum)
        self.stems = [[self.rng.randint(0, 2) for _ in range(60)] for _ in range(2)]

    def round(self) -> None:
        """Something happens, then a step."""
        action = self.rng.random()
        if action < 0.35:
            self._arrive()
        elif action < 0.45 and self.live:
            self._end(self.rng.choice(self.live), "abort")
        elif action < 0.55:
            self._fork()
        self._step(fails=self.rng.random() < 0.05)

    def drain(self) -> None:
        """Let what is left run to its end; nothing may hang."""
        for _ in range(3000):
            if not self.live:
                break
            self._step()
        assert not self.live, "it goes round in circles"
        self._step()
        pool = self.driver.scheduler.kv.pool
        assert pool.num_free_blocks == pool.num_blocks
        assert not self.driver.scheduler.has_work

    def _arrive(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.stems)[: rng.randint(1, self.max_sequence_tokens - 2)]
        prompt += [
            rng.randint(0, 2)
            for _ in range(rng.randint(0, self.max_sequence_tokens - 1 - len(prompt)))
        ]
        tenant = rng.choice("abc")
        reserved, maximum = self.shares[tenant] if self.quotas else (0.0, 1.0)
        content = ()
        if rng.random() < 0.3:  # an image, say, of which there are two
            position = rng.randrange(len(prompt))
            content = (ContentKey(position, rng.choice((b"cat", b"dog"))),)
        for _ in range(rng.choice((1, 1, 3))):
            self.live.append(
                self.driver.add(
                    prompt,
                    priority=rng.randint(0, 2),
                    # Quotas are exact where tenants share no blocks, as in production.
                    namespace=tenant if self.quotas else rng.choice(("", tenant)),
                    tenant=tenant,
                    reserved=reserved,
                    maximum=maximum,
                    content=content,
                )
            )

    def _fork(self) -> None:
        """A sequence goes on from another one's tokens, as beams do."""
        running = self.driver.scheduler.running
        if len(running) < 2:
            return
        parent, child = self.rng.sample(running, 2)
        ours, theirs = parent.block_hashes, child.block_hashes
        same = (ours.scope, ours.content) == (theirs.scope, theirs.content)
        if same and parent.num_prompt_tokens < parent.num_tokens:
            child.token_ids = [*parent.token_ids[:-1], self.rng.randint(0, 2)]
            child.num_prompt_tokens = parent.num_prompt_tokens
            child.block_hashes = parent.block_hashes.copy()
            del child.block_hashes.values[(len(child.token_ids) - 1) // BLOCK :]
            self.driver.scheduler.requeue(child)

    def _step(self, *, fails: bool = False) -> None:
        scheduler = self.driver.scheduler
        plan, scheduled = scheduler.schedule()
        self._check_quotas()
        for sequence, _ in scheduler.pop_rejected():
            self.live.remove(sequence)
        self.memory.run(plan, scheduled, fails=fails)
        if fails:
            scheduler.roll_back((plan, scheduled))
        else:
            for sequence, samples in zip(scheduled, plan.num_samples, strict=True):
                sequence.isolated = sequence.isolated and not samples
                if sequence.num_computed_tokens == sequence.num_tokens:
                    self._token(sequence)
        scheduler.check_integrity()

    def _token(self, sequence: Sequence) -> None:
        sequence.token_ids.append(self.rng.randint(0, 2))
        self.driver.scheduler.waiting.charge_output(sequence)
        if sequence.num_tokens >= self.max_sequence_tokens or self.rng.random() < 0.05:
            self._end(sequence, "stop")

    def _end(self, sequence: Sequence, reason: str) -> None:
        self.driver.scheduler.finish(sequence, reason)
        self.live.remove(sequence)

    def _check_quotas(self) -> None:
        scheduler = self.driver.scheduler
        tenants = scheduler.kv.quotas
        assert scheduler.kv.pool.num_free_blocks >= sum(a.unused_reserve for a in tenants)
        for quota in tenants:
            assert quota.used <= quota.maximum
            running = [s for s in scheduler.running if s.request.message.tenant == quota.name]
            assert quota.running == len(running)
            assert quota.sequences == sum(
                s.request.message.tenant == quota.name for s in self.live if not s.finished
            )


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    windows=st.sampled_from([(), (6,), (0, 5), (0, 9, 9), (3, 8)]),
    quotas=st.booleans(),
    policy=st.sampled_from(["fair", "fcfs", "priority"]),
    caching=st.booleans(),
    chunked=st.booleans(),
    short=st.booleans(),
)
# One that gave its blocks and was started again in the same step was dealt tokens twice.
@example(100001, (0, 5), True, "fair", True, True, False)
@example(100317, (), True, "fair", True, True, False)
# One was taken out of a step in which another one, just started, read what it was to compute.
@example(100305, (0, 5), False, "fair", True, True, False)
# Those that started and were preempted again left the first that runs no tokens, for ever.
@example(600886, (), True, "fair", True, True, False)
@example(500482, (0, 5), True, "fair", True, False, False)
def test_nobody_reads_anothers_kv_and_all_blocks_come_back(
    seed: int,
    windows: tuple[int, ...],
    quotas: bool,
    policy: str,
    caching: bool,
    chunked: bool,
    short: bool,
) -> None:
    chaos = Chaos(
        seed,
        windows,
        quotas,
        scheduling_policy=policy,
        enable_prefix_caching=caching,
        long_prefill_token_threshold=5 if chunked else 0,
        # Where one tenant has the most, rows take turns.
        prefill_limits=PrefillLimits(
            8, saturation_decodes=2, min_step_tokens=4, target_step_tokens=4
        )
        if short
        else None,
    )
    for _ in range(50):
        chaos.round()
    chaos.drain()


class Phased(Chaos):
    """On a device whose steps hold prompts or decodes."""

    def _step(self, *, fails: bool = False) -> None:
        scheduler = self.driver.scheduler
        decodes = {
            sequence.seq_id
            for sequence in scheduler.running
            if sequence.num_computed_tokens >= sequence.num_prompt_tokens
            and sequence.num_tokens - sequence.num_computed_tokens == 1
        }
        super()._step(fails=fails)
        plan = scheduler._plan
        decodes -= {new.seq_id for new in plan.new}  # preempted and started again
        assert len({seq_id in decodes for seq_id in plan.seq_ids}) <= 1


@pytest.mark.parametrize("seed", [20, 27, 35])
def test_short_steps_hold_prompts_or_decodes_where_a_device_does_not_mix(seed: int) -> None:
    share = PrefillLimits(8, saturation_decodes=2, min_step_tokens=4, target_step_tokens=4)
    chaos = Phased(seed, (), False, mixes=False, prefill_limits=share)
    for _ in range(50):
        chaos.round()
    chaos.drain()


@pytest.mark.parametrize("windows", [(), (0, 8, 8)])
@pytest.mark.parametrize("budget", [1000, 8])
def test_one_shared_prompts_blocks_serve_all_outputs(windows: tuple[int, ...], budget: int) -> None:
    driver = Driver(num_blocks=200, token_budget=budget, windows=windows)
    prompt = list(range(30))
    outputs = [driver.add(prompt) for _ in range(8)]
    for token in range(12):
        driver.step(next_token=token)
    assert all(sequence.status is SequenceStatus.RUNNING for sequence in outputs)
    groups = max(1, len(windows))
    pool = driver.scheduler.kv.pool
    shared = driver.table(outputs[0])[:7]
    assert all(driver.table(sequence)[:7] == shared for sequence in outputs)
    if groups == 1:
        # 30 tokens fill seven blocks, which all share; each has its own from the eighth on.
        local_total = sum(len(driver.table(sequence)) - 7 for sequence in outputs)
        assert pool.num_blocks - pool.num_free_blocks == 7 + local_total
    assert all(sequence.num_cached_tokens == 28 for sequence in outputs[1:])


class Crowd(Chaos):
    """A tenant with a reserve sends many short prompts, others a few long ones, in short steps.

    Everything is drawn from the seed. A worker's batch follows the plans, and its books are
    compared with the scheduler's. In a fifth of the runs a step is planned while the one before
    it is under way.
    """

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        windows = draw.choice([(), (), (0, 5)])
        settings: dict[str, Any] = {
            "token_budget": draw.randint(16, 80),
            "max_num_seqs": draw.randint(4, 24),
            "scheduling_policy": draw.choice(["fair", "fair", "fair", "priority", "fcfs"]),
            "enable_prefix_caching": draw.random() < 0.8,
            "long_prefill_token_threshold": draw.choice([0, 0, 5]),
            "kept_seats_fraction": draw.choice([1 / 16, 0.2, 0.5]),
            "prefill_limits": PrefillLimits(
                draw.randint(8, 40),
                saturation_decodes=draw.randint(1, 3),
                min_step_tokens=draw.randint(2, 12),
                target_step_tokens=draw.randint(4, 16),
            ),
        }
        self.shares = {
            "a": (0.0, 1.0),
            "b": (draw.choice([0.3, 0.6]), 1.0),
            "c": (draw.choice([0.0, 0.1]), draw.choice([0.3, 0.6, 1.0])),
        }
        super().__init__(seed, windows, True, **settings)
        self.max_sequence_tokens = min(60, self.driver.scheduler.capacity_tokens // 2)
        self.plans_ahead = draw.random() < 0.2
        self.batch = InputBatch(settings["max_num_seqs"], 64, BLOCK, self.driver.layout)
        self.in_flight: deque[tuple[StepPlan, list[Sequence], StepInputs | None]] = deque()

    def round(self) -> None:
        action = self.rng.random()
        if action < 0.35:
            self._arrive()
        elif action < 0.42 and self.live:
            self._end(self.rng.choice(self.live), "abort")
        self._step(fails=self.rng.random() < 0.05)

    def _arrive(self) -> None:
        rng = self.rng
        tenant = rng.choice("bbbabc")
        greedy, longest = tenant == "b", self.max_sequence_tokens - 2
        length = rng.randint(1, min(6, longest)) if greedy else rng.randint(longest // 2, longest)
        prompt = [rng.randint(0, 2) for _ in range(length)]
        reserved, maximum = self.shares[tenant]
        for _ in range(rng.choice((1, 1, 3)) * (4 if greedy else 1)):
            sequence = self.driver.add(
                prompt,
                priority=rng.choice((0, 0, 0, 1, -1)),
                namespace=tenant,
                max_tokens=self.max_sequence_tokens - length,
                tenant=tenant,
                reserved=reserved,
                maximum=maximum,
            )
            sequence.counts_placeholders = self.plans_ahead
            self.live.append(sequence)

    def _step(self, *, fails: bool = False) -> None:
        scheduler = self.driver.scheduler
        if scheduler.has_isolated_step:
            self._complete_down_to(0)
        plan, scheduled = scheduler.schedule()
        self._check_quotas()
        for sequence, _ in scheduler.pop_rejected():
            self.live.remove(sequence)
        self.batch.apply_plan(plan)
        inputs = self.batch.prepare_inputs(plan) if scheduled else None
        self._compare_books(plan)
        self.in_flight.append((plan, scheduled, inputs))
        if fails:
            for item, sequences, _ in self.in_flight:
                self.memory.run(item, sequences, fails=True)
            scheduler.roll_back(*((plan, sequences) for plan, sequences, _ in self.in_flight))
            self.in_flight.clear()
        self._complete_down_to(int(self.plans_ahead and bool(scheduled)))
        scheduler.check_integrity()

    def _complete_down_to(self, count: int) -> None:
        while len(self.in_flight) > count:
            plan, scheduled, inputs = self.in_flight.popleft()
            self.memory.run(plan, scheduled)
            if inputs is None:
                continue
            token_ids = [self.rng.randint(0, 2) for _ in inputs.sampled]
            if token_ids:
                self.batch.append_sampled(inputs, token_ids)
            for index, token_id in zip(inputs.sampled, token_ids, strict=True):
                if not scheduled[index].finished:
                    self._sampled(scheduled[index], token_id)

    def _sampled(self, sequence: Sequence, token_id: int) -> None:
        sequence.isolated = False
        sequence.num_placeholders -= self.plans_ahead
        sequence.token_ids.append(token_id)
        self.driver.scheduler.waiting.charge_output(sequence)
        if sequence.num_tokens >= self.max_sequence_tokens or self.rng.random() < 0.05:
            self._end(sequence, "stop")

    def _compare_books(self, plan: StepPlan) -> None:
        """The worker holds the same sequences, blocks, tokens and counts, the step included."""
        batch, scheduler = self.batch, self.driver.scheduler
        samples = dict(zip(plan.seq_ids, plan.num_samples, strict=True))
        assert batch.row_of.keys() == {sequence.seq_id for sequence in scheduler.running}
        for sequence in scheduler.running:
            row, registered_num_tokens = batch.row_of[sequence.seq_id], sequence.num_tokens
            ahead = sequence.num_placeholders or samples.get(sequence.seq_id, 0)
            assert batch.num_computed[row] == sequence.num_computed_tokens
            assert batch.num_tokens[row] == registered_num_tokens + ahead
            assert batch.tokens[row, :registered_num_tokens].tolist() == sequence.token_ids
            tables = zip(
                batch.block_tables, batch.num_blocks, self.driver.tables(sequence), strict=True
            )
            for table, num_blocks, block_ids in tables:
                assert num_blocks[row] == len(block_ids)
                blocks = zip(table[row, : len(block_ids)].tolist(), block_ids, strict=True)
                assert all(block_id == block for block_id, block in blocks if block is not None)


def run_crowd(seed: int) -> None:
    crowd = Crowd(seed)
    for _ in range(100):
        crowd.round()
    crowd.drain()


@pytest.mark.parametrize("seed", range(24))
def test_fault_63_a_row_comes_once_into_a_step_and_the_worker_keeps_the_same_books(
    seed: int,
) -> None:
    run_crowd(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 500, 50))
def test_fault_63_five_hundred_seeds(first: int) -> None:
    for seed in range(first, first + 50):
        run_crowd(seed)


def test_fault_63_a_plan_that_names_a_sequence_twice_fails_the_integrity_check() -> None:
    driver = Driver(num_blocks=10)
    driver.add([1, 2, 3])
    plan = driver.step()
    plan.seq_ids.append(plan.seq_ids[0])
    with pytest.raises(RuntimeError, match="twice"):
        driver.scheduler.check_integrity()
