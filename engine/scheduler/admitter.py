"""From the waiting queue into the running list."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from engine.kv_cache import TenantQuota
from engine.scheduler.sequence import Sequence, Status
from engine.scheduler.step_builder import StepBuilder

if TYPE_CHECKING:
    from engine.scheduler.scheduler import Scheduler


class Admitter:
    """Starts waiting sequences, for a scheduler whose queue, running list and pool it shares."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._kv, self._waiting = scheduler.kv, scheduler.waiting
        self._running = scheduler.running
        self._config = scheduler.config
        #: Seats that tenants over their share leave to others.
        self._kept = scheduler.config.kept_seats
        #: Blocks that the last sequence would have taken that had to wait for blocks.
        self._lacking = 0

    def admit_waiting(self, draft: StepBuilder) -> None:
        """Waiting sequences while budget, seats and blocks last; never past one that can't go.

        Except that a tenant is passed over which is at its own maximum, or takes more than its
        share of seats when few are left (though not for urgent requests); and that a full pool
        stops nobody from using blocks that are reserved for him.
        """
        while draft.budget > 0 and not self._full:
            head = self._waiting.peek()
            if head is None or head.isolated:
                break
            quota = self._scheduler.quota_of(head)
            if head.request.priority >= 0 and self._leaves_seats(quota):
                self._waiting.hold(quota.name)
                continue
            if self.admit(draft, head) or head.finished:
                continue
            if not self._lacking:
                break
            if quota.used + self._lacking <= quota.maximum:
                self._admit_reserved(draft)
                break
            self._waiting.hold(quota.name)
        self._waiting.release()

    @property
    def _full(self) -> bool:
        """Whether all seats are taken."""
        return len(self._running) >= self._config.max_num_seqs

    def _leaves_seats(self, quota: TenantQuota) -> bool:
        """Whether the last free seats are for others, who have been here lately."""
        if len(self._running) < self._config.max_num_seqs - self._kept:
            return False
        return quota.running >= self._config.max_num_seqs * self._kv.quotas.fraction(quota)

    def _admit_reserved(self, draft: StepBuilder) -> None:
        """Sequences that fit into what is reserved for their tenants, when the pool is full."""
        for quota in list(self._kv.quotas.reserving):
            head = self._waiting.head_of(quota.name)
            full = self._full or draft.budget <= 0
            if head is not None and not head.isolated and not full:
                self.admit(draft, head)

    def claim_reserves(self) -> None:
        """Preempt those over their share for a tenant whose reserve they came to use.

        They did so before it was reserved: no allocation dips into a reserve.
        """
        kv, scheduler = self._kv, self._scheduler
        for quota in kv.quotas.unbacked(kv.pool.num_free):
            head = self._waiting.head_of(quota.name)
            if head is None:
                continue
            prefix = scheduler.find_cached_prefix(head)
            computed = len(prefix[0]) * kv.block_size
            count = min(head.num_tokens - computed, scheduler.most_at_once)
            if kv.needed(head.seq_id, computed, count, prefix) > quota.unused_reserve:
                continue
            while not kv.can_allocate(head.seq_id, quota, computed, count, prefix):
                victim = scheduler.victim(quota, over_share=True)
                if victim is None:
                    break
                scheduler.preempt(victim)

    def admit(self, draft: StepBuilder, sequence: Sequence) -> int:
        """Start the head of a tenant's line; the tokens dealt to it, 0 if it can't start."""
        self._lacking = 0
        kv, seq_id = self._kv, sequence.seq_id
        if sequence.num_placeholders:
            # Preempted while a step runs that samples its next token: it must come first.
            return 0
        prefix = self._scheduler.find_cached_prefix(sequence)
        computed = len(prefix[0]) * kv.block_size
        wanted = sequence.num_tokens - computed
        count = self._scheduler.prefill_share(draft, wanted)
        if count == 0 or (count < wanted and not self._config.enable_chunked_prefill):
            return 0
        quota = self._scheduler.quota_of(sequence)
        if not kv.can_allocate(seq_id, quota, computed, count, prefix):
            if not self._scheduler.refuse_for_good(sequence, count, prefix):
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
        draft.start(sequence, kv.tables(seq_id))
        draft.deal(sequence, count)
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
            self._waiting.charge_prompt(sequence, sequence.num_tokens - computed)
        sequence.status = Status.RUNNING
        sequence.num_computed_tokens = computed
        self._scheduler.quota_of(sequence).running += 1
        self._running.append(sequence)
