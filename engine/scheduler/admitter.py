"""Who gets a step's prompt tokens: prompts that have begun, and those that wait to begin."""

from __future__ import annotations

import time

from engine.contract.config import EngineConfig
from engine.kv_cache import KVCacheCoordinator, TenantQuota
from engine.scheduler.limits import StepLimits
from engine.scheduler.queue import WaitingQueue
from engine.scheduler.running import RunningSet
from engine.scheduler.sequence import Sequence, Status
from engine.scheduler.step_builder import StepBuilder

#: Steps with preemptions that the first that runs may be left out of before it goes ahead of all.
_PATIENCE = 8


class Admitter:
    """Deals prompt tokens, of a scheduler whose parts it's given."""

    def __init__(
        self,
        config: EngineConfig,
        kv: KVCacheCoordinator,
        waiting: WaitingQueue,
        runs: RunningSet,
        limits: StepLimits,
    ) -> None:
        self._config, self._kv, self._waiting, self._runs = config, kv, waiting, runs
        self._running, self._limits = runs.sequences, limits
        #: Seats that tenants over their share leave to others.
        self._kept = config.kept_seats
        #: Blocks that the last sequence would have taken that had to wait for blocks.
        self._lacking = 0
        #: Whether nothing more may begin in this step.
        self._closed = False
        #: Steps with preemptions that the first that runs got no tokens of, since it last did.
        self._passed_over = 0

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
        self._closed = False
        waiting = self._waiting
        if self._passed_over >= _PATIENCE and begun and begun[0] is self._running[0]:
            self.go_on(builder, begun.pop(0))
        while builder.budget > 0:
            head = self._startable(builder)
            if begun:
                at = waiting.next_begun(begun)
                if head is None or not waiting.precedes(head, begun[at]):
                    self.go_on(builder, begun.pop(at))
                    continue
            if head is None:
                break
            self._closed = not self._start(builder, head)
        waiting.release()
        self._note_progress(builder)

    def _note_progress(self, builder: StepBuilder) -> None:
        """Count the steps in which others are preempted and the first that runs gets nothing."""
        if not builder.preempted and not self._passed_over:
            return
        if not self._running or builder.dealt(self._running[0]):
            self._passed_over = 0
        elif builder.preempted:
            self._passed_over += 1

    def go_on(self, builder: StepBuilder, sequence: Sequence) -> None:
        """Deal to a prompt that has begun what there is room for, unless it gave its blocks.

        One that gave them and was started again has its tokens of this step already.
        """
        if sequence.status is not Status.RUNNING or sequence in builder:
            return
        pending = sequence.num_tokens + sequence.num_placeholders - sequence.num_computed_tokens
        count = builder.prompt_chunk(self._limits, sequence, pending, sequence.num_computed_tokens)
        if count:
            self._runs.grow(builder, self._running.index(sequence), count)

    def _startable(self, builder: StepBuilder) -> Sequence | None:
        """The waiting sequence that is next, if anything may start."""
        waiting = self._waiting
        while not self._closed and (head := waiting.peek()) is not None and not head.isolated:
            quota = self._runs.quota_of(head)
            if builder.preempted and not self._gave_nothing(builder, quota):
                return None
            if builder.rooms and not builder.room_of(head, 0):
                waiting.hold(quota.name)
                continue
            if not self.full or self._claim_seat(builder, head, quota):
                return head
            if waiting.num_tenants == 1:
                return None
            waiting.hold(quota.name)
        return None

    def _gave_nothing(self, builder: StepBuilder, quota: TenantQuota) -> bool:
        """Whether this step's preemptions concern others than a tenant that is within its share."""
        if not self._waiting.fair or quota.name in builder.preempted:
            return False
        return self._kv.quotas.excess(quota, quota.used) < 1

    def _claim_seat(self, builder: StepBuilder, head: Sequence, quota: TenantQuota) -> bool:
        """Preempt one of those who sit on more than their share, for one who has but few seats.

        They took them while nobody else was there; from then on `_leaves_seats` sees to it.
        """
        quotas, seats = self._kv.quotas, self._config.max_num_seqs
        few = min(self._kept, seats * quotas.fraction(quota))
        if not self._waiting.fair or quota.running >= few:
            return False
        for victim in reversed(self._running[1:]):
            other = self._runs.quota_of(victim)
            if victim.request.priority < head.request.priority:
                return False
            if self._runs.lends(builder, victim):
                continue
            if other.running > seats * quotas.fraction(other):
                self._runs.take_from(builder, victim)
                return True
        return False

    def _start(self, builder: StepBuilder, head: Sequence) -> bool:
        """Start the queue's head or pass over its tenant; False: nothing more may start."""
        quota = self._runs.quota_of(head)
        if head.request.priority >= 0 and self._leaves_seats(quota):
            self._waiting.hold(quota.name)
            return True
        if self.admit(builder, head) or head.finished:
            return True
        if not self._lacking:
            return False
        if quota.used + self._lacking > quota.maximum:
            self._waiting.hold(quota.name)
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
        if quotas.excess(quota, quota.used + self._lacking) > 1:
            return False
        while self._lacks(head, quota):
            victim = self._runs.victim(quota, builder, over_share=True, spares_first=True)
            if victim is None or victim.request.priority < head.request.priority:
                return False
            self._runs.take_from(builder, victim)
        return True

    def _lacks(self, head: Sequence, quota: TenantQuota) -> bool:
        """Whether there aren't enough blocks for the head's first piece."""
        kv = self._kv
        prefix = self._runs.find_cached_prefix(head)
        computed = len(prefix[0]) * kv.block_size
        count = min(head.num_tokens - computed, self._limits.most_at_once)
        return not kv.can_allocate(head.seq_id, quota, computed, count, prefix)

    @property
    def full(self) -> bool:
        """Whether all seats are taken."""
        return len(self._running) >= self._config.max_num_seqs

    def _leaves_seats(self, quota: TenantQuota) -> bool:
        """Whether the last free seats are for others, who have been here lately."""
        if len(self._running) < self._config.max_num_seqs - self._kept:
            return False
        return quota.running >= self._config.max_num_seqs * self._kv.quotas.fraction(quota)

    def _admit_reserved(self, builder: StepBuilder) -> None:
        """Sequences that fit into what is reserved for their tenants, when the pool is full."""
        for quota in list(self._kv.quotas.reserving):
            head = self._waiting.head_of(quota.name)
            full = self.full or builder.budget <= 0
            if head is not None and not head.isolated and not full:
                self.admit(builder, head)

    def claim_reserves(self) -> None:
        """Preempt those over their share for a tenant whose reserve they came to use.

        They did so before it was reserved: no allocation dips into a reserve.
        """
        kv = self._kv
        for quota in kv.quotas.unbacked(kv.pool.num_free):
            head = self._waiting.head_of(quota.name)
            if head is None:
                continue
            prefix = self._runs.find_cached_prefix(head)
            computed = len(prefix[0]) * kv.block_size
            count = min(head.num_tokens - computed, self._limits.most_at_once)
            if kv.needed(head.seq_id, computed, count, prefix) > quota.unused_reserve:
                continue
            while not kv.can_allocate(head.seq_id, quota, computed, count, prefix):
                victim = self._runs.victim(quota, over_share=True)
                if victim is None:
                    break
                self._runs.preempt(victim)

    def admit(self, builder: StepBuilder, sequence: Sequence) -> int:
        """Start the head of a tenant's line; the tokens dealt to it, 0 if it can't start."""
        self._lacking = 0
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
            if not self._runs.refuse_for_good(sequence, count, prefix):
                self._lacking = kv.needed(seq_id, computed, count, prefix)
            return 0
        tokens, hashes = sequence.token_ids, sequence.block_hashes
        if not computed and sequence.status is Status.WAITING:
            reads = sequence.reads_cache
            sequence.flight.cold_reason = kv.why_cold(tokens, hashes, reads_cache=reads)
        self._waiting.take(sequence)
        kv.allocate(seq_id, quota, computed, count, prefix)
        kv.cache_full_blocks(seq_id, tokens, hashes, computed + count)
        self._note_start(sequence, computed)
        builder.start(sequence, kv.tables(seq_id))
        builder.deal(sequence, count)
        self._waiting.charge_prompt(sequence, count)
        return count

    def _note_start(self, sequence: Sequence, computed: int) -> None:
        """Record a (re)start: status, prefix hit, times."""
        if sequence.status is Status.WAITING:
            sequence.first_scheduled_at = time.time()
            sequence.num_cached_tokens = min(computed, sequence.num_prompt_tokens)
            sequence.flight.num_cached_tokens = sequence.num_cached_tokens
            sequence.num_prompt_counted = sequence.num_cached_tokens
            self._kv.num_query_tokens += sequence.num_tokens
            self._kv.num_hit_tokens += computed
        sequence.num_computed_tokens = computed
        self._runs.join(sequence)
