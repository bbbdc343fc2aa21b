"""The scheduler: one token budget a step, dealt to running sequences first, then to waiting ones.

There is no prefill phase and no decode phase (after vLLM's V1 scheduler): a sequence has
`num_computed_tokens` and `num_tokens`, and every step deals out a budget so that the first catches
up with the second. Chunked prefill, mixed batches, prefix hits, resumption: all that one rule.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import KVPoolTooSmall
from engine.contract.messages import MOST_NAMED, EngineRequest
from engine.kv_cache import KVCacheConfig, KVCacheCoordinator, TenantQuota, make_coordinator
from engine.scheduler.decode_rotation import DecodeRotation, ShortStep, StepDemand
from engine.scheduler.fair_queue import make_request_queue
from engine.scheduler.plan import StepPlan, is_decode
from engine.scheduler.prefill_budget import (
    LEAST_OF_A_START,
    PrefillBudget,
    PrefillLimits,
    PrefillLoad,
    StepLimits,
)
from engine.scheduler.request import Sequence, SequenceStatus
from engine.scheduler.request_queue import RequestQueue
from engine.scheduler.running_queue import RunningQueue
from engine.scheduler.step_builder import StepBuilder

# -- Who gets a step's prompt tokens: prompts that have begun, and those that wait to begin.


#: Steps with preemptions that the first that runs may be left out of before it goes ahead of all.
MAX_STARVED_STEPS = 8


class Admitter:
    """Deals prompt tokens, of a scheduler whose parts it's given."""

    def __init__(
        self,
        config: EngineConfig,
        kv: KVCacheCoordinator,
        waiting: RequestQueue,
        runs: RunningQueue,
        limits: StepLimits,
    ) -> None:
        self._config, self._kv, self._waiting, self._runs = config, kv, waiting, runs
        self._running, self._limits = runs.sequences, limits
        #: Seats that tenants over their share leave to others.
        self.reserved_seats = config.reserved_seats
        #: Blocks that the last sequence would have taken that had to wait for blocks.
        self.num_missing_blocks = 0
        #: Whether nothing more may begin in this step.
        self.admission_closed = False
        #: Steps with preemptions that the first that runs got no tokens of, since it last did.
        self.num_starved_steps = 0

    def deal_prompts(self, builder: StepBuilder, begun: list[Sequence]) -> None:
        """Prompt tokens while they last, to whoever's turn it is, begun or not.

        Waiting sequences start while seats and blocks last; never past one that can't go. Except
        that a tenant is passed over which is at its own maximum, or takes more than its share of
        seats when few are left (though not for urgent requests); and that a full pool stops nobody
        from using blocks that are reserved for him, or, of those that hold more than their share,
        from getting what is his.

        After a preemption nothing new starts: it would take the blocks that were just freed for
        those who have waited longer. Except for a tenant within its share that gave nothing.

        Where others keep being started and preempted, the first that runs gets its turn after a
        while: it ends one day, and so does the going round.

        Args:
            builder: the step.
            begun: running sequences with prompt left, in the order of `running`; it's used up.
        """
        self.admission_closed = False
        waiting = self._waiting
        if self.num_starved_steps >= MAX_STARVED_STEPS and begun and begun[0] is self._running[0]:
            self.go_on(builder, begun.pop(0))
        while builder.budget > 0:
            head = self._startable(builder)
            if begun:
                at = waiting.next_partial_prefill(begun)
                if head is None or not waiting.precedes(head, begun[at]):
                    self.go_on(builder, begun.pop(at))
                    continue
            if head is None:
                break
            self.admission_closed = not self._start(builder, head)
        waiting.clear_skipped()
        self._note_progress(builder)

    def _note_progress(self, builder: StepBuilder) -> None:
        """Count the steps in which others are preempted and the first that runs gets nothing."""
        if not builder.preempted and not self.num_starved_steps:
            return
        if not self._running or builder.num_scheduled_tokens(self._running[0]):
            self.num_starved_steps = 0
        elif builder.preempted:
            self.num_starved_steps += 1

    def go_on(self, builder: StepBuilder, sequence: Sequence) -> None:
        """Deal to a prompt that has begun what there is room for, unless it gave its blocks.

        One that gave them and was started again has its tokens of this step already.
        """
        if sequence.status is not SequenceStatus.RUNNING or sequence in builder:
            return
        pending = sequence.num_tokens + sequence.num_placeholders - sequence.num_computed_tokens
        count = builder.prompt_chunk(self._limits, sequence, pending, sequence.num_computed_tokens)
        if count:
            self._runs.allocate_or_preempt(builder, self._running.index(sequence), count)

    def _startable(self, builder: StepBuilder) -> Sequence | None:
        """The waiting sequence that is next, if anything may start."""
        waiting = self._waiting
        while (
            not self.admission_closed and (head := waiting.peek()) is not None and not head.isolated
        ):
            quota = self._runs.quota_of(head)
            if builder.preempted and not self._is_unaffected(builder, quota):
                return None
            if builder.tenant_budgets and not builder.prompt_budget(head, 0):
                waiting.skip_tenant(quota.name)
                continue
            if not self.is_full or self._claim_seat(builder, head, quota):
                return head
            if waiting.num_tenants == 1:
                return None
            waiting.skip_tenant(quota.name)
        return None

    def _is_unaffected(self, builder: StepBuilder, quota: TenantQuota) -> bool:
        """Whether this step's preemptions concern others than a tenant that is within its share."""
        if not self._waiting.fair or quota.name in builder.preempted:
            return False
        return self._kv.quotas.usage_ratio(quota, quota.used) < 1

    def _claim_seat(self, builder: StepBuilder, head: Sequence, quota: TenantQuota) -> bool:
        """Preempt one of those who sit on more than their share, for one who has but few seats.

        They took them while nobody else was there; from then on `_must_leave_seats` sees to it.
        """
        quotas, seats = self._kv.quotas, self._config.max_num_seqs
        few = min(self.reserved_seats, seats * quotas.weight_fraction(quota))
        if not self._waiting.fair or quota.running >= few:
            return False
        for victim in reversed(self._running[1:]):
            other = self._runs.quota_of(victim)
            if victim.request.priority < head.request.priority:
                return False
            if self._runs.has_shared_blocks_this_step(builder, victim):
                continue
            if other.running > seats * quotas.weight_fraction(other):
                self._runs.preempt_in_step(builder, victim)
                return True
        return False

    def _start(self, builder: StepBuilder, head: Sequence) -> bool:
        """Start the queue's head or pass over its tenant; False: nothing more may start."""
        quota = self._runs.quota_of(head)
        if head.request.priority >= 0 and self._must_leave_seats(quota):
            self._waiting.skip_tenant(quota.name)
            return True
        if self.admit(builder, head) or head.finished:
            return True
        if not self.num_missing_blocks:
            return False
        if quota.used + self.num_missing_blocks > quota.maximum:
            self._waiting.skip_tenant(quota.name)
            return True
        if self._waiting.fair and self._claim_share(builder, head, quota):
            self.admit(builder, head)
        else:
            self._admit_reserved(builder)
        return False

    def _claim_share(self, builder: StepBuilder, head: Sequence, quota: TenantQuota) -> bool:
        """Preempt those who hold more than their share of the pool for one who stays within his.

        False when that doesn't make room. Whoever is more urgent gives nothing.
        """
        quotas = self._kv.quotas
        if quotas.usage_ratio(quota, quota.used + self.num_missing_blocks) > 1:
            return False
        while self._is_short_of_blocks(head, quota):
            victim = self._runs.victim(quota, builder, over_share=True, spares_first=True)
            if victim is None or victim.request.priority < head.request.priority:
                return False
            self._runs.preempt_in_step(builder, victim)
        return True

    def _is_short_of_blocks(self, head: Sequence, quota: TenantQuota) -> bool:
        """Whether there aren't enough blocks for the head's first piece."""
        kv = self._kv
        prefix = self._runs.find_cached_prefix(head)
        computed = len(prefix[0]) * kv.block_size
        count = min(head.num_tokens - computed, self._limits.max_tokens_per_sequence)
        return not kv.can_allocate(head.seq_id, quota, computed, count, prefix)

    @property
    def is_full(self) -> bool:
        """Whether all seats are taken."""
        return len(self._running) >= self._config.max_num_seqs

    def _must_leave_seats(self, quota: TenantQuota) -> bool:
        """Whether the last free seats are for others, who have been here lately."""
        if len(self._running) < self._config.max_num_seqs - self.reserved_seats:
            return False
        return quota.running >= self._config.max_num_seqs * self._kv.quotas.weight_fraction(quota)

    def _admit_reserved(self, builder: StepBuilder) -> None:
        """Sequences that fit into what is reserved for their tenants, when the pool is full."""
        for quota in list(self._kv.quotas.tenants_with_reserve):
            head = self._waiting.peek_tenant(quota.name)
            full = self.is_full or builder.budget <= 0
            if head is not None and not head.isolated and not full:
                self.admit(builder, head)

    def claim_reserves(self) -> None:
        """Preempt those over their share for a tenant whose reserve they came to use.

        They did so before it was reserved: no allocation dips into a reserve.
        """
        kv = self._kv
        for quota in kv.quotas.uncovered_reserves(kv.pool.num_free_blocks):
            head = self._waiting.peek_tenant(quota.name)
            if head is None:
                continue
            prefix = self._runs.find_cached_prefix(head)
            computed = len(prefix[0]) * kv.block_size
            count = min(head.num_tokens - computed, self._limits.max_tokens_per_sequence)
            if kv.needed(head.seq_id, computed, count, prefix) > quota.unused_reserve:
                continue
            while not kv.can_allocate(head.seq_id, quota, computed, count, prefix):
                victim = self._runs.victim(quota, over_share=True)
                if victim is None:
                    break
                self._runs.preempt(victim)

    def admit(self, builder: StepBuilder, sequence: Sequence) -> int:
        """Start the head of a tenant's line; the tokens dealt to it, 0 if it can't start."""
        self.num_missing_blocks = 0
        kv, seq_id = self._kv, sequence.seq_id
        if sequence.num_placeholders:
            # Preempted while a step runs that samples its next token: it must come first.
            return 0
        prefix = self._runs.find_cached_prefix(sequence)
        computed = len(prefix[0]) * kv.block_size
        wanted = sequence.num_tokens - computed
        count = builder.prompt_chunk(self._limits, sequence, wanted, computed)
        if count == 0 or (count < wanted and not self._config.enable_chunked_prefill):
            return 0
        quota = self._runs.quota_of(sequence)
        if not kv.can_allocate(seq_id, quota, computed, count, prefix):
            if not self._runs.reject_oversized(sequence, count, prefix):
                self.num_missing_blocks = kv.needed(seq_id, computed, count, prefix)
            return 0
        tokens, hashes = sequence.token_ids, sequence.block_hashes
        if not computed and sequence.status is SequenceStatus.WAITING:
            reads = sequence.reads_cache
            sequence.timeline.cold_reason = kv.miss_reason(tokens, hashes, reads_cache=reads)
        self._waiting.pop(sequence)
        kv.allocate(seq_id, quota, computed, count, prefix)
        kv.cache_full_blocks(seq_id, tokens, hashes, computed + count)
        self._note_start(sequence, computed)
        builder.start(sequence, kv.get_block_tables(seq_id))
        builder.add(sequence, count)
        self._waiting.charge_prompt(sequence, count)
        return count

    def _note_start(self, sequence: Sequence, computed: int) -> None:
        """Record a (re)start: status, prefix hit, times."""
        if sequence.status is SequenceStatus.WAITING:
            sequence.first_scheduled_at = time.time()
            sequence.num_cached_tokens = min(computed, sequence.num_prompt_tokens)
            sequence.timeline.num_cached_tokens = sequence.num_cached_tokens
            sequence.num_prompt_counted = sequence.num_cached_tokens
            self._kv.num_query_tokens += sequence.num_tokens
            self._kv.num_hit_tokens += computed
        sequence.num_computed_tokens = computed
        self._runs.add(sequence)


# -- What a new sequence finds before it, for its flight record.


def record_queue_position(
    sequence: Sequence, quota: TenantQuota, running: list[Sequence], waiting: RequestQueue
) -> None:
    """Record how many run or wait, and of the sequence's own tenant also who."""
    flight, own = sequence.timeline, quota.sequences
    flight.num_ahead, flight.num_ahead_own = len(running) + len(waiting), own
    if own:
        head = waiting.peek_tenant(quota.name)
        flight.behind = _named(quota.name, running, head, min(own, MOST_NAMED))


def _named(tenant: str, running: Iterable[Sequence], head: Sequence | None, most: int) -> list[str]:
    """Ids of the tenant's requests: of those that run, then of the one that is next."""
    found: list[str] = []
    for other in running:
        request = other.request
        if request.message.tenant == tenant and request.request_id not in found:
            found.append(request.request_id)
            if len(found) == most:
                return found
    if head is not None and head.request.request_id not in found:
        found.append(head.request.request_id)
    return found


# -- Rows of a step that have drafts: who guesses at tokens to come, and what becomes of it.


class DraftProposer(Protocol):
    """What the scheduler asks; `engine.speculative` answers."""

    def untracked_sequences(self, plan: StepPlan, scheduled: list[Sequence]) -> list[int]:
        """The sequences of a step that heads needn't follow from here on; it has no drafts yet."""

    def propose(self, decoding: list[Sequence], room: int, beside: int = 0) -> dict[int, list[int]]:
        """Drafts by sequence id, at most `room` in all, for sequences that decode in a step beside
        so many tokens of prompts.
        """

    def note(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """A row's drafts were checked: so many of the first ones held."""


class DraftRows:
    """Drafts of a scheduler's steps.

    Attributes:
        source: who guesses; None: nobody does.
    """

    def __init__(
        self,
        kv: KVCacheCoordinator,
        waiting: RequestQueue,
        quota_of: Callable[[Sequence], TenantQuota],
    ) -> None:
        self._kv, self._waiting, self._quota_of = kv, waiting, quota_of
        self.source: DraftProposer | None = None

    def add(self, builder: StepBuilder) -> None:
        """Give rows that decode drafts, from what is left of budget and pool."""
        plan = builder.plan
        if self.source is None:
            return
        plan.untracked = self.source.untracked_sequences(plan, builder.scheduled)
        if builder.budget <= 0:
            return
        decoding = [
            sequence
            for sequence, count in zip(builder.scheduled, plan.num_scheduled, strict=True)
            if is_decode(count) and len(sequence.token_ids) > sequence.num_prompt_tokens
        ]
        beside = plan.num_tokens - len(decoding)
        found = self.source.propose(decoding, builder.budget, beside)
        if not found:
            return
        for at, sequence in enumerate(builder.scheduled):
            drafts = found.get(sequence.seq_id)
            if not drafts:
                continue
            seq_id, quota = sequence.seq_id, self._quota_of(sequence)
            computed, count = sequence.num_computed_tokens - 1, 1 + len(drafts)
            if self._kv.can_allocate(seq_id, quota, computed, count):
                if fresh := self._kv.allocate(seq_id, quota, computed, count):
                    builder.add_blocks(sequence, fresh)
                builder.add_drafts(at, drafts)

    def process_accepted(
        self, plan: StepPlan, scheduled: list[Sequence], token_ids: list[list[int]]
    ) -> None:
        """A step with drafts was run, and its rows got these tokens: what a draft that didn't hold
        left in the cache is computed anew.
        """
        for sequence, found in zip(scheduled, token_ids, strict=True):
            drafts = plan.drafts.get(sequence.seq_id)
            if drafts is None:
                continue
            accepted = max(0, len(found) - 1)
            sequence.num_computed_tokens -= len(drafts) - accepted
            sequence.timeline.num_drafts += 1
            sequence.timeline.num_draft_tokens += len(drafts)
            sequence.timeline.num_accepted_tokens += accepted
            self._waiting.charge_rejected_drafts(sequence, len(drafts) - accepted)
            if self.source is not None:
                self.source.note(sequence, len(drafts), accepted)


class Scheduler:
    """Owns the waiting queue, the running list and the KV cache."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        token_budget: int,
        prefill_share: PrefillLimits | None = None,
        layout: KVCacheConfig | None = None,
        max_model_len: int = 0,
    ) -> None:
        """Settings that were resolved beside the model.

        `num_blocks`: the pool's size; `token_budget`: max_num_batched_tokens; `prefill_share`:
        prompt tokens of a step in which others decode, None for no limit; `layout`: the model's
        KV cache groups, None for full attention in all layers; `max_model_len`: its context, 0
        when nobody asks.
        """
        self.config = config
        self.max_num_seqs = config.max_num_seqs
        self.limits = StepLimits(
            token_budget,
            max_chunk_tokens=config.long_prefill_token_threshold or token_budget,
            chunked=config.enable_chunked_prefill,
            share=prefill_share or PrefillLimits(token_budget),
        )
        self.kv = make_coordinator(
            layout, num_blocks, config.block_size, config.enable_prefix_caching
        )
        #: The longest sequence that can ever run.
        self.capacity_tokens = self.kv.max_sequence_tokens(
            num_blocks, self.limits.max_tokens_per_sequence, max_model_len
        )
        if max_model_len:
            longest = self.kv.max_blocks_per_sequence(
                max_model_len, self.limits.max_tokens_per_sequence
            )
            self.kv.quotas.unreservable_blocks = min(num_blocks, longest)
        self.waiting = make_request_queue(config)
        by_priority = config.scheduling_policy != "fcfs"
        self._runs = RunningQueue(self.kv, self.waiting, by_priority)
        self.running = self._runs.sequences
        self.drafts = DraftRows(self.kv, self.waiting, self._runs.quota_of)
        self._admitter = Admitter(config, self.kv, self.waiting, self._runs, self.limits)
        self._turns = DecodeRotation(self.kv.quotas, self.waiting, self._runs, self.limits)
        #: What was scheduled last.
        self._plan = StepPlan(0)
        #: Set while the step that is being dealt is held short.
        self._short: ShortStep | None = None
        self._max_model_len = max_model_len
        #: Steps that were scheduled so far.
        self.num_steps = 0
        #: Work for prompts in the step that was scheduled last.
        self.prompt_load = PrefillLoad()
        self._appended: list[tuple[int, int]] = []
        #: Who has steps of its own until it brings a token, from its first one on.
        self.isolated: Sequence | None = None
        self.ran_isolated = False

    def max_concurrency(self, num_tokens: int) -> float:
        """How many sequences of so many tokens the pool holds at once."""
        return self.kv.pool.num_blocks / self.kv.max_blocks_per_sequence(
            num_tokens, self.limits.max_tokens_per_sequence
        )

    @property
    def num_preemptions(self) -> int:
        """How often a running sequence gave all of its blocks."""
        return self._runs.num_preemptions

    def reset_counts(self) -> None:
        """Count preemptions and prefix hits anew."""
        self._runs.num_preemptions = 0
        self.kv.num_query_tokens = self.kv.num_hit_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running or len(self.waiting) or self._runs.removed_ids)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        quota = self.record_tenant(sequence.request.message)
        if sequence.index == 0:
            record_queue_position(sequence, quota, self.running, self.waiting)
        quota.sequences += 1
        cached = len(self._runs.find_cached_prefix(sequence)[0]) * self.kv.block_size
        self.waiting.push(sequence, cached)

    def record_tenant(self, message: EngineRequest) -> TenantQuota:
        """Take over what a request says of its tenant's share of the pool."""
        return self.kv.quotas.record_request(
            message.tenant,
            message.weight,
            message.kv_reserved_fraction,
            message.kv_max_fraction,
        )

    def max_tokens_for(self, message: EngineRequest) -> int:
        """The longest sequence, in tokens, that the request's tenant can ever run as of now."""
        blocks = self.kv.quotas.limit(self.record_tenant(message))
        return self.kv.max_sequence_tokens(
            blocks, self.limits.max_tokens_per_sequence, self._max_model_len
        )

    def tenant_quota(self, sequence: Sequence) -> TenantQuota:
        """Who pays for the sequence's blocks."""
        return self._runs.quota_of(sequence)

    def schedule(self) -> tuple[StepPlan, list[Sequence]]:
        """Deal one step's budget.

        Returns the plan and its sequences in the plan's order. Their computed counts already
        include the step's tokens.
        """
        self.num_steps += 1
        if self.kv.quotas.tenants_with_reserve:
            self._admitter.claim_reserves()
        builder = StepBuilder(self.num_steps, self.limits.token_budget, self._prefill_room())
        if not self._schedule_isolated(builder):
            self._deal_shared(builder)
        self.prompt_load = builder.prefill.load
        builder.plan.removed = self._runs.pop_removed()
        self.drafts.add(builder)
        builder.plan.appended, self._appended = self._appended, []
        self._plan = builder.plan
        return builder.plan, builder.scheduled

    def _deal_shared(self, builder: StepBuilder) -> None:
        """Give the step to all, or, where it's held short, to those whose turn it is."""
        if self._short is not None:
            self._deal_short(builder, self._short)
        else:
            self._admitter.deal_prompts(builder, self._schedule_decodes(builder, set()))

    def _deal_short(self, builder: StepBuilder, short: ShortStep) -> None:
        """Give a short step to those whose turn it is. Prompts of theirs that can't start, for want
        of seats or blocks, leave tokens: rows that would sit out get these.
        """
        own = replace(
            builder.prefill,
            remaining=short.heavy_tenant_prompt_tokens,
            min_tokens=short.heavy_tenant_prompt_tokens,
        )
        builder.tenant_budgets = dict.fromkeys((quota.name for quota in short.heavy_tenants), own)
        resting = self._turns.skipped(short)
        self._admitter.deal_prompts(builder, self._schedule_decodes(builder, set(resting)))
        self._turns.note_prompts(short, builder.prefill.remaining)
        for sequence in resting[: max(0, int(own.remaining))]:
            self._deal_early(builder, sequence)
        # Drafts make a step longer, too.
        spare = max(0, short.target_tokens - builder.plan.num_tokens)
        builder.budget = min(builder.budget, spare)

    def _deal_early(self, builder: StepBuilder, sequence: Sequence) -> None:
        """Deal to a row that would sit out, unless another would have to give blocks for it.

        One that gave its blocks and was started again has its tokens of this step already.
        """
        ended = sequence.num_placeholders and sequence.ends_in_flight
        runs = (
            sequence.status is SequenceStatus.RUNNING and sequence is not self._isolated_running()
        )
        if not runs or ended or sequence in builder or builder.budget <= 0:
            return
        quota, computed = self._runs.quota_of(sequence), sequence.num_computed_tokens
        if self.kv.can_allocate(sequence.seq_id, quota, computed, 1):
            self._runs.allocate_or_preempt(builder, self.running.index(sequence), 1)
            self._turns.record_decode(sequence)

    @property
    def has_isolated_step(self) -> bool:
        """Whether a step is, or comes next, that nothing may run beside, no other step either."""
        head = self.waiting.peek()
        return self._isolated_running() is not None or (head is not None and head.isolated)

    def _isolated_running(self) -> Sequence | None:
        """Who has begun with steps of its own and hasn't brought a token."""
        lone = self.isolated
        if lone is not None and not (lone.isolated and lone.status is SequenceStatus.RUNNING):
            lone = self.isolated = None
        return lone

    def _schedule_isolated(self, builder: StepBuilder) -> bool:
        """Give the step to who must have steps of its own; False: to the others.

        They have every second one: of many such prompts none keeps them from their tokens.
        """
        lone = self._isolated_running()
        others = len(self.running) > (lone is not None)
        self.ran_isolated = not (self.ran_isolated and others) and self._go_alone(builder, lone)
        return self.ran_isolated

    def _go_alone(self, builder: StepBuilder, lone: Sequence | None) -> bool:
        """`lone`: who has begun so; None: the queue's head may. False: nobody may, or has room."""
        if lone is not None:
            builder.prefill = PrefillBudget(builder.budget)  # nobody decodes beside it
            self._admitter.go_on(builder, lone)
            return True
        head = self.waiting.peek()
        if head is None or not head.isolated or self._admitter.is_full:
            return False
        shared, builder.prefill = builder.prefill, PrefillBudget(builder.budget)
        if self._admitter.admit(builder, head):
            self.isolated = head
            return True
        builder.prefill = shared
        return False

    # -- beams --------------------------------------------------------------------------------

    def add_parked_beam(self, sequence: Sequence) -> None:
        """Take note of a sequence that will begin with `requeue`."""
        self.record_tenant(sequence.request.message).sequences += 1
        sequence.status = SequenceStatus.PARKED_BEAM

    def append_token(self, sequence: Sequence, token_id: int) -> None:
        """A sequence gets a token that wasn't sampled for it."""
        sequence.token_ids.append(token_id)
        if sequence.status is SequenceStatus.RUNNING:
            self._appended.append((sequence.seq_id, token_id))
        else:
            self.requeue(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """A sequence got other tokens altogether: it begins anew, ahead of those that never ran."""
        if sequence.status is SequenceStatus.RUNNING:
            self._runs.free_and_remove(sequence)
        if sequence.status is not SequenceStatus.PREEMPTED:
            sequence.status = SequenceStatus.PREEMPTED
            self.waiting.prepend(sequence)

    def park_beam(self, sequence: Sequence) -> None:
        """Take a sequence's blocks, if it runs, and leave it out until it's restarted.

        One that is queued stays so; it can be parked once it runs.
        """
        if sequence.status is SequenceStatus.RUNNING:
            self._runs.free_and_remove(sequence)
            sequence.status = SequenceStatus.PARKED_BEAM

    def park_idle_beam(self) -> bool:
        """When nothing could be scheduled: park a sequence that waits for others. False: none."""
        for sequence in reversed(self.running):
            idle = sequence.num_computed_tokens == len(sequence.token_ids)
            if idle and sequence.request.is_beam_search:
                self.park_beam(sequence)
                return True
        return False

    # -- ends and failures --------------------------------------------------------------------

    def finish(self, sequence: Sequence, reason: str, stop_reason: int | None = None) -> None:
        """Take a sequence out wherever it stands and free its blocks at once."""
        self._runs.finish(sequence, reason, stop_reason)

    def take_refused(self) -> list[tuple[Sequence, KVPoolTooSmall]]:
        """Sequences that ended because their tenant's limit can't hold them any more."""
        return self._runs.pop_rejected()

    def roll_back(self, *steps: tuple[StepPlan, list[Sequence]]) -> None:
        """Take back a step that failed, and those after it that were planned already: nothing that
        they computed counts or stays cached.

        All of their sequences go back to the queue and will each run in a step of their own, so
        that the one to blame fails alone.
        """
        counts: dict[Sequence, int] = {}
        for plan, scheduled in steps:
            for sequence, count in zip(scheduled, plan.num_scheduled, strict=True):
                counts[sequence] = counts.get(sequence, 0) + count
        for sequence, count in reversed(counts.items()):
            sequence.num_placeholders = 0
            if sequence.status is SequenceStatus.RUNNING:
                self._runs.uncache_from(sequence, sequence.num_computed_tokens - count)
                sequence.isolated = True
                self._runs.preempt(sequence)
            else:
                # It left while its step was being run, and its blocks may be anyone's by now.
                self.kv.uncache_all(sequence.block_hashes)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the pool's books balance, only what runs holds blocks, and no
        sequence stands twice in the plan that was made last.
        """
        seq_ids = self._plan.seq_ids
        if len(set(seq_ids)) != len(seq_ids):
            raise RuntimeError(f"A sequence stands twice in step {self._plan.step}: {seq_ids}.")
        self.kv.check_integrity(
            {sequence.seq_id: sequence.request.message.tenant for sequence in self.running}
        )

    def _schedule_decodes(self, builder: StepBuilder, resting: set[Sequence]) -> list[Sequence]:
        """Running sequences that decode, in order, but for those that rest; returns the others,
        which have prompt left.
        """
        begun: list[Sequence] = []
        lone = self._isolated_running()
        if self.config.scheduling_policy != "fcfs":
            # So that the lowest priority is always the last.
            self.running.sort(key=lambda sequence: (sequence.request.priority, sequence.seq_id))
        index = 0
        block_size = self.config.block_size
        edges = (0, block_size - 1)
        while index < len(self.running) and builder.budget > 0:
            sequence = self.running[index]
            computed = sequence.num_computed_tokens
            pending = len(sequence.token_ids) + sequence.num_placeholders - computed
            ended = sequence.num_placeholders and sequence.ends_in_flight
            if sequence is lone or ended or sequence in resting:
                index += 1
                continue
            decode = is_decode(pending)
            began = computed >= sequence.num_prompt_tokens
            if decode and began and computed % block_size not in edges:
                # The usual decode: it neither needs a block nor fills one.
                builder.add_decode(sequence)
                index += 1
                continue
            if not decode:
                if pending:
                    begun.append(sequence)
                index += 1
                continue
            index = self._runs.allocate_or_preempt(builder, index, 1)
        return begun

    def preempt(self, sequence: Sequence) -> None:
        """Free a running sequence's blocks and queue it again; its tokens are recomputed later."""
        self._runs.preempt(sequence)

    def preempt_all(self) -> None:
        """Free all blocks: what runs is queued again, in its order."""
        for sequence in reversed(list(self.running)):
            self._runs.preempt(sequence)

    def _prefill_room(self) -> PrefillBudget:
        """Prompt tokens that this step may hold: the budget, unless a sequence decodes in it."""
        share, budget = self.limits.share, self.limits.token_budget
        self._short = None
        if (
            not share.saturation_decodes and share.max_prompt_tokens >= budget
        ):  # no bound: nothing to count
            return PrefillBudget(budget)
        work = StepDemand.from_running(self.running)
        room = budget
        if work.rows:
            room = min(
                share.prompt_tokens(work.rows, work.pending + self.waiting.num_tokens), budget
            )
        self._short = self._turns.plan_short_step(work, room)
        if self._short is not None:
            # `PrefillLimits.target_step_tokens` is by what steps took, with all that attention
            # read.
            room = self._short.light_tenant_prompt_tokens
            return PrefillBudget(room, room, LEAST_OF_A_START, share.context_cost_tokens)
        if not work.rows:
            return PrefillBudget(budget)
        least = min(share.min_prompt_tokens(work.rows), budget)
        return PrefillBudget(room, least, LEAST_OF_A_START, share.context_cost_tokens)
