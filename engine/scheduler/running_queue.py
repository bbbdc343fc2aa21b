"""The running sequences, and the choice of which are preempted for blocks or seats."""

from __future__ import annotations

import logging

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import KVPoolTooSmall
from engine.contract.messages import MAX_RECORDED_CHUNKS
from engine.kv_cache import CachedPrefix, KVCacheCoordinator
from engine.kv_cache.block import TenantQuota
from engine.kv_transfer.base import KVConnectorBase
from engine.scheduler.encoder_cache import EncoderCacheManager
from engine.scheduler.kv_transfers import KVTransfers
from engine.scheduler.prefill_budget import StepLimits
from engine.scheduler.request import Sequence, SequenceStatus
from engine.scheduler.request_queue import RequestQueue
from engine.scheduler.step_builder import StepBuilder

log = logging.getLogger(__name__)
_PREEMPTIONS_PER_WARNING = 50


class RunningQueue:
    """The running sequences, and which of them are preempted when blocks or seats are short.

    Attributes:
        sequences: in scheduling order; the last is preempted first.
        tenants: tenants that have running sequences.
        num_preemptions: number of preemptions so far.
        kv_connector: saves the blocks of sequences that leave; None: blocks aren't saved.
        kv_transfers: blocks that it loads or sends while steps run.
        removed_ids: ids of sequences removed since the last step, not yet reported to the worker.
        reserved_seats: seats that tenants over their share must leave free.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv: KVCacheCoordinator,
        waiting: RequestQueue,
        limits: StepLimits,
        encoder_cache: EncoderCacheManager,
    ) -> None:
        self._kv, self._waiting, self._limits = kv, waiting, limits
        self._ordered_by_priority = config.scheduling_policy != "fcfs"
        self._max_num_seqs = config.max_num_seqs
        self.reserved_seats = config.reserved_seats
        self.sequences: list[Sequence] = []
        self.tenants: set[TenantQuota] = set()
        self.num_preemptions = 0
        self.removed_ids: list[int] = []
        self.kv_connector: KVConnectorBase | None = None
        self.kv_transfers = KVTransfers(kv, waiting)
        self._rejected: list[tuple[Sequence, KVPoolTooSmall]] = []
        self._encoder_cache = encoder_cache

    @property
    def is_full(self) -> bool:
        """Whether all seats are taken."""
        return len(self.sequences) >= self._max_num_seqs

    def sort(self) -> None:
        """Order by priority if the policy uses it, so that the lowest is always last."""
        if self._ordered_by_priority:
            self.sequences.sort(key=lambda sequence: (sequence.request.priority, sequence.seq_id))

    def quota_of(self, sequence: Sequence) -> TenantQuota:
        """The quota that a sequence's blocks are charged to."""
        return self._kv.quotas.get(sequence.request.message.tenant)

    def find_cached_prefix(self, sequence: Sequence) -> CachedPrefix:
        """The cached blocks that match a sequence's first tokens, if it may use the cache."""
        if not sequence.reads_cache:
            return self._kv.empty_prefix(sequence)
        return self._kv.get_computed_blocks(sequence)

    def can_allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether a running sequence's next tokens get their blocks without a preemption."""
        quota, num_computed = self.quota_of(sequence), sequence.num_computed_tokens
        return self._kv.can_allocate(sequence.seq_id, quota, num_computed, num_tokens)

    def add(self, sequence: Sequence) -> None:
        """Add a sequence whose first blocks have been allocated."""
        sequence.status = SequenceStatus.RUNNING
        quota = self.quota_of(sequence)
        quota.running += 1
        self.tenants.add(quota)
        self.sequences.append(sequence)

    def choose_victim(
        self,
        for_tenant: TenantQuota,
        step: StepBuilder | None = None,
        *,
        same_tenant_only: bool = False,
        only_over_share: bool = False,
        keep_oldest: bool = False,
    ) -> Sequence | None:
        """The running sequence to preempt so that a tenant gets blocks; None when there is none.

        It is the last sequence of the tenant that exceeds its share the most; with priorities, of
        the lowest priority that may be preempted. Tenants that use no more than their reserve are
        never preempted for others. The oldest running sequence is preempted only for a reserve: it
        finishes eventually, so that all sequences make progress, whereas two tenants that preempt
        each other in turn would never finish.

        Args:
            for_tenant: the tenant that needs blocks.
            step: the step that is being planned, if any.
            same_tenant_only: the tenant is at its maximum, so that only its own blocks help.
            only_over_share: preempt only other tenants that exceed their share, even the oldest.
            keep_oldest: never preempt the oldest.
        """
        quotas, running = self._kv.quotas, self.sequences
        victim: Sequence | None = None
        max_excess = 0.0
        seen: set[str] = set()
        for sequence in reversed(running if only_over_share and not keep_oldest else running[1:]):
            priority = sequence.request.priority
            if (
                victim is not None
                and self._ordered_by_priority
                and priority < victim.request.priority
            ):
                break
            tenant = sequence.request.message.tenant
            if tenant in seen:
                continue
            quota = quotas.get(tenant)
            is_same = quota is for_tenant
            if only_over_share if is_same else same_tenant_only:
                continue
            if step is not None and self._is_read_in_step(step, sequence):
                continue
            seen.add(tenant)
            excess = quotas.usage_ratio(quota, quota.used)
            if not is_same and (quota.used <= quota.reserved or (only_over_share and excess <= 1)):
                continue
            if victim is None or excess > max_excess:
                victim, max_excess = sequence, excess
        return victim

    def victim_for_growth(self, step: StepBuilder, sequence: Sequence, num_tokens: int) -> Sequence:
        """The victim for a running sequence's next tokens: itself if there is no other."""
        quota, num_computed = self.quota_of(sequence), sequence.num_computed_tokens
        num_needed = self._kv.num_blocks_to_allocate(sequence.seq_id, num_computed, num_tokens)
        same_tenant_only = quota.used + num_needed > quota.maximum
        return self.choose_victim(quota, step, same_tenant_only=same_tenant_only) or sequence

    def _is_read_in_step(self, step: StepBuilder, sequence: Sequence) -> bool:
        """Whether a sequence that starts in this step reads blocks that another computes in it.

        The other can't be removed from the step then: those blocks would never be written.
        """
        return (
            bool(step.plan.new)
            and sequence in step
            and self._kv.has_shared_blocks(sequence.seq_id, step.first_written_token(sequence))
        )

    def preempt_for_reserves(self) -> None:
        """Preempt tenants over their share if they hold blocks that were reserved afterwards.

        Later allocations respect the reserve.
        """
        kv = self._kv
        if not kv.quotas.tenants_with_reserve:
            return
        for quota in kv.quotas.uncovered_reserves(kv.pool.num_free_blocks):
            head = self._waiting.peek_tenant(quota.name)
            if head is None:
                continue
            prefix, chunk = self._first_chunk(head)
            num_needed = kv.num_blocks_to_allocate(head.seq_id, prefix.num_tokens, chunk, prefix)
            if num_needed > quota.unused_reserve:
                continue
            while not kv.can_allocate(head.seq_id, quota, prefix.num_tokens, chunk, prefix):
                victim = self.choose_victim(quota, only_over_share=True)
                if victim is None:
                    break
                self.preempt(victim)

    def _first_chunk(self, head: Sequence) -> tuple[CachedPrefix, int]:
        """A waiting sequence's cached prefix, and the maximum length of its first chunk."""
        prefix = self.find_cached_prefix(head)
        num_pending = head.num_tokens - prefix.num_tokens
        return prefix, min(num_pending, self._limits.max_tokens_per_sequence)

    def preempt_for_share(self, step: StepBuilder, head: Sequence, quota: TenantQuota) -> bool:
        """Preempt tenants over their share of the pool for one that stays within its own.

        Returns False if that doesn't free enough. More urgent sequences aren't preempted.
        """
        if self._kv.quotas.usage_ratio(quota, quota.used + step.num_missing_blocks) > 1:
            return False
        while True:
            prefix, chunk = self._first_chunk(head)
            if self._kv.can_allocate(head.seq_id, quota, prefix.num_tokens, chunk, prefix):
                return True
            victim = self.choose_victim(quota, step, only_over_share=True, keep_oldest=True)
            if victim is None or victim.request.priority < head.request.priority:
                return False
            self.preempt_in_step(step, victim)

    def preempt_for_seat(self, step: StepBuilder, head: Sequence, quota: TenantQuota) -> bool:
        """Preempt a sequence of a tenant over its share of seats for a tenant that has few.

        Seats can be taken beyond the share while no other tenant is active; once others are,
        `must_leave_seats` prevents it.
        """
        quotas, seats = self._kv.quotas, self._max_num_seqs
        max_claimed = min(self.reserved_seats, seats * quotas.weight_fraction(quota))
        if not self._waiting.fair or quota.running >= max_claimed:
            return False
        for victim in reversed(self.sequences[1:]):
            if victim.request.priority < head.request.priority:
                return False
            if self._is_read_in_step(step, victim):
                continue
            victim_quota = self.quota_of(victim)
            if victim_quota.running > seats * quotas.weight_fraction(victim_quota):
                self._preempt_in_step(step, victim)
                return True
        return False

    def must_leave_seats(self, quota: TenantQuota) -> bool:
        """Whether the last free seats are kept for other tenants that were active lately."""
        if len(self.sequences) < self._max_num_seqs - self.reserved_seats:
            return False
        return quota.running >= self._max_num_seqs * self._kv.quotas.weight_fraction(quota)

    def preempt_in_step(self, step: StepBuilder, victim: Sequence) -> None:
        """Preempt a sequence while a step is planned, which may hold it already."""
        self._preempt_in_step(step, victim)
        # Don't log each one: while memory is short there are thousands.
        if self.num_preemptions % _PREEMPTIONS_PER_WARNING == 1:
            log.warning(
                "Request %s is preempted and will be recomputed because there is not enough KV "
                "cache space. This costs time. Increase gpu_memory_utilization (on a CPU "
                "cpu_kvcache_space) or decrease max_num_seqs. total_cumulative_preemption_cnt=%d",
                victim.request.request_id,
                self.num_preemptions,
            )

    def _preempt_in_step(self, step: StepBuilder, victim: Sequence) -> None:
        is_new = step.is_new(victim)
        if step.remove(victim):
            self.uncache_from(victim, victim.num_computed_tokens)
        step.cancel_encoding(victim)
        if is_new and victim.encoder_key:  # this step would have encoded or loaded its states
            self._kv.uncache_states(victim)
        step.preempted.add(victim.request.message.tenant)
        self.preempt(victim)
        if is_new:
            self.removed_ids.pop()  # the worker has never had it

    def uncache_from(self, sequence: Sequence, num_tokens: int) -> None:
        """Uncache a running sequence's blocks from a token on: they were never written."""
        self._kv.uncache_from(sequence.seq_id, sequence.block_hashes, num_tokens)

    def preempt(self, sequence: Sequence, *, saves: bool = True) -> None:
        """Free a running sequence's blocks and queue it again; its tokens are recomputed later,
        unless a KV connector saves them.

        `saves`: whether it may. After a step has failed, blocks that a sequence shares with one
        that was to load them may never have been written.
        """
        if saves and self.kv_connector is not None:
            self.kv_connector.request_preempted(sequence, self.block_ids(sequence))
        self.free_and_remove(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        flight = sequence.timeline
        flight.num_preemptions += 1
        if flight.num_preemptions <= MAX_RECORDED_CHUNKS:
            flight.preempted_at.append(sequence.age_ms)
        self.num_preemptions += 1
        self._waiting.prepend(sequence)

    def finish(self, sequence: Sequence, reason: str, stop_reason: int | None = None) -> None:
        """Remove a sequence, whatever its status, and free its blocks at once, unless the KV
        connector still loads or sends them.
        """
        if sequence.finished:
            return
        was_running = sequence.status is SequenceStatus.RUNNING
        was_loading = sequence.status is SequenceStatus.WAITING_FOR_REMOTE_KVS
        in_admission = sequence.status is SequenceStatus.WAITING_FOR_ADMISSION
        parked = sequence.status is SequenceStatus.PARKED_BEAM
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        if was_running:
            self.remove(sequence)
        elif not (in_admission or parked or was_loading):
            self._waiting.remove_finished(sequence)
        quota, keeps = self.quota_of(sequence), False
        if not in_admission:
            quota.sequences -= 1
        if self.kv_connector is not None:
            has_blocks = was_running or was_loading
            block_ids = self.block_ids(sequence) if has_blocks else []
            delays, params = self.kv_connector.request_finished(sequence, block_ids)
            sequence.kv_transfer_result = params
            keeps = self.kv_transfers.finish(sequence, delays=delays and has_blocks)
        if not keeps:
            self._kv.free(sequence.seq_id, quota)

    def block_ids(self, sequence: Sequence) -> list[list[int]]:
        """Ids of a sequence's blocks, by KV cache group."""
        tables = self._kv.get_block_tables(sequence.seq_id)
        return [[block.block_id for block in table] for table in tables]

    def reject_oversized(
        self,
        sequence: Sequence,
        num_computed: int,
        num_tokens: int,
        prefix: CachedPrefix | None = None,
    ) -> bool:
        """End a sequence that can't fit even when it runs alone, because its tenant's limit has
        shrunk. `num_tokens` are the tokens after the computed ones. Returns whether it ended.
        """
        limit = self._kv.quotas.limit(self.quota_of(sequence))
        if self._kv.num_blocks_after(sequence.seq_id, num_computed, num_tokens, prefix) <= limit:
            return False
        error = KVPoolTooSmall(
            f"The request needs more than the {limit} KV blocks that its tenant may use.",
            param="max_tokens",
        )
        self.finish(sequence, "error")
        self._rejected.append((sequence, error))
        return True

    def pop_rejected(self) -> list[tuple[Sequence, KVPoolTooSmall]]:
        """Sequences that ended because they exceed their tenant's current limit, with the error."""
        rejected, self._rejected = self._rejected, []
        return rejected

    def pop_removed(self) -> list[int]:
        """Ids of the sequences removed since the last step, for the worker."""
        removed, self.removed_ids = self.removed_ids, []
        return removed

    def free_and_remove(self, sequence: Sequence) -> None:
        """Free a running sequence's blocks and remove it from the worker."""
        self.remove(sequence)
        self._kv.free(sequence.seq_id, self.quota_of(sequence))
        sequence.num_computed_tokens = 0

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from the running list and, with the next plan, from the worker."""
        self.sequences.remove(sequence)
        quota = self.quota_of(sequence)
        quota.running -= 1
        if not quota.running:
            self.tenants.discard(quota)
        self.removed_ids.append(sequence.seq_id)
        self._encoder_cache.release(sequence.seq_id)
