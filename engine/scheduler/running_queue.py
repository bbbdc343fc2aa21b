"""The sequences that run: they join, get blocks, give them to others, and leave."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List

from engine.contract.errors import KVPoolTooSmall
from engine.contract.messages import MAX_RECORDED_CHUNKS
from engine.kv_cache import BlockTables, KVCacheCoordinator
from engine.kv_cache.block import TenantQuota
from engine.kv_cache.tenant_quotas import TenantQuotas
from engine.scheduler.plan import is_decode
from engine.scheduler.request import Sequence, SequenceStatus
from engine.scheduler.request_queue import RequestQueue
from engine.scheduler.step_builder import StepBuilder

# -- Who gives blocks back when there are too few.


def choose_victim(
    running: List[Sequence],
    quotas: TenantQuotas,
    for_tenant: TenantQuota,
    *,
    ordered_by_priority: bool,
    same_tenant_only: bool = False,
    over_share: bool = False,
    keep_oldest: bool = False,
    is_pinned: Callable[[Sequence], bool] = lambda sequence: False,
) -> Sequence | None:
    """The running sequence to preempt so that a tenant gets blocks.

    The last sequence of the tenant that is most over its share; where priorities count, the lowest
    goes first. Whoever uses no more than his reserve gives nothing to others. The first that runs
    never gives but to a reserve: it ends one day, and so everyone's turn comes, while two tenants
    that took from each other what they had just got would never end.

    Args:
        running: in order; the last of a tenant goes before its others.
        quotas: everyone's blocks.
        for_tenant: for whom.
        ordered_by_priority: `running` is in order of priority, and only the lowest that can give
        does.
        same_tenant_only: the tenant is at its maximum, so that only its own blocks help.
        over_share: only others who are over their share give, the first that runs too.
        keep_oldest: it never gives.
        is_pinned: whether others rely in this step on what a sequence computes; it can't give then.

    Returns None when nobody can give.
    """
    chosen: Sequence | None = None
    most = 0.0
    seen: set[str] = set()
    for sequence in reversed(running if over_share and not keep_oldest else running[1:]):
        urgency = sequence.request.priority
        if chosen is not None and ordered_by_priority and urgency < chosen.request.priority:
            break
        name = sequence.request.message.tenant
        if name in seen:
            continue
        quota = quotas.get(name)
        own = quota is for_tenant
        if (own and over_share) or (same_tenant_only and not own):
            continue
        if is_pinned(sequence):
            continue
        seen.add(name)
        excess = quotas.usage_ratio(quota, quota.used)
        if not own and (quota.used <= quota.reserved or (over_share and excess <= 1)):
            continue
        if chosen is None or excess > most:
            chosen, most = sequence, excess
    return chosen


class RunningQueue:
    """Who runs, and whose blocks go to whom when there are too few.

    Attributes:
        sequences: in the order in which they are dealt to; the last gives its blocks first.
        num_preemptions: how often one gave all of its blocks.
        removed_ids: ids of those that left since the last step; the worker hasn't heard of it.
    """

    def __init__(
        self, kv: KVCacheCoordinator, waiting: RequestQueue, ordered_by_priority: bool
    ) -> None:
        """`ordered_by_priority`: the list is kept in order of priority, and only the lowest
        gives."""
        self.sequences: list[Sequence] = []
        self.num_preemptions = 0
        #: Whose they are.
        self.tenants: set[TenantQuota] = set()
        self._kv, self._waiting, self._ordered_by_priority = kv, waiting, ordered_by_priority
        self._refused: list[tuple[Sequence, KVPoolTooSmall]] = []
        self.removed_ids: list[int] = []

    def quota_of(self, sequence: Sequence) -> TenantQuota:
        """Who pays for the sequence's blocks."""
        return self._kv.quotas.get(sequence.request.message.tenant)

    def find_cached_prefix(self, sequence: Sequence) -> BlockTables:
        """The cached blocks that a sequence's tokens begin with, if it may use any."""
        if not sequence.reads_cache:
            return self._kv.empty_blocks()
        return self._kv.get_computed_blocks(sequence.token_ids, sequence.block_hashes)

    def add(self, sequence: Sequence) -> None:
        """A sequence, whose first blocks are allocated, runs from now on."""
        sequence.status = SequenceStatus.RUNNING
        quota = self.quota_of(sequence)
        quota.running += 1
        self.tenants.add(quota)
        self.sequences.append(sequence)

    def allocate_or_preempt(self, builder: StepBuilder, index: int, count: int) -> int:
        """Deal to a running sequence that may need blocks; the index of the one after it."""
        sequence = self.sequences[index]
        seq_id, computed = sequence.seq_id, sequence.num_computed_tokens
        quota = self.quota_of(sequence)
        self._kv.free_skipped_blocks(seq_id, quota, computed)
        while not self._kv.can_allocate(seq_id, quota, computed, count):
            victim = self._victim_for(builder, sequence, count)
            if victim is sequence and self.reject_oversized(sequence, count):
                return index
            index -= self.sequences.index(victim) < index
            self.preempt_in_step(builder, victim)
            if victim is sequence:
                return index
        fresh = self._kv.allocate(seq_id, quota, computed, count)
        self._kv.cache_full_blocks(
            seq_id, sequence.token_ids, sequence.block_hashes, computed + count
        )
        if fresh:
            builder.add_blocks(sequence, fresh)
        builder.add(sequence, count)
        if not is_decode(count):
            self._waiting.charge_prompt(sequence, count)
        return index + 1

    def preempt_in_step(self, builder: StepBuilder, victim: Sequence) -> None:
        """Preempt a sequence, which this step may hold already."""
        starts = builder.is_new(victim)
        if builder.remove(victim):
            self.uncache_from(victim, victim.num_computed_tokens)
        builder.preempted.add(victim.request.message.tenant)
        self.preempt(victim)
        if starts:
            self.removed_ids.pop()  # the worker never knew it

    def uncache_from(self, sequence: Sequence, num_tokens: int) -> None:
        """Uncache a running sequence's blocks from a token on: their content never came."""
        self._kv.uncache_from(sequence.seq_id, sequence.block_hashes, num_tokens)

    def _victim_for(self, builder: StepBuilder, sequence: Sequence, count: int) -> Sequence:
        """Whom to preempt so that a sequence can grow; itself when nobody else gives."""
        quota = self.quota_of(sequence)
        needed = self._kv.needed(sequence.seq_id, sequence.num_computed_tokens, count)
        own_only = quota.used + needed > quota.maximum
        return self.victim(quota, builder, own_only=own_only) or sequence

    def victim(
        self,
        taker: TenantQuota,
        builder: StepBuilder | None = None,
        *,
        own_only: bool = False,
        over_share: bool = False,
        spares_first: bool = False,
    ) -> Sequence | None:
        """Whom to preempt for a tenant, while a step is being dealt or before."""
        return choose_victim(
            self.sequences,
            self._kv.quotas,
            taker,
            ordered_by_priority=self._ordered_by_priority,
            same_tenant_only=own_only,
            over_share=over_share,
            keep_oldest=spares_first,
            is_pinned=lambda sequence: (
                builder is not None and self.has_shared_blocks_this_step(builder, sequence)
            ),
        )

    def has_shared_blocks_this_step(self, builder: StepBuilder, sequence: Sequence) -> bool:
        """Whether another one, started in this step, reads what the sequence computes in it.

        Then it can't be taken out of the step any more: what the other one reads would never come.
        """
        count = builder.num_scheduled_tokens(sequence) if builder.plan.new else 0
        first = sequence.num_computed_tokens - count
        return count > 0 and self._kv.has_shared_blocks(sequence.seq_id, first)

    def preempt(self, sequence: Sequence) -> None:
        """Free a running sequence's blocks and queue it again; its tokens are recomputed later."""
        self.free_and_remove(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        flight = sequence.timeline
        flight.num_preemptions += 1
        if flight.num_preemptions <= MAX_RECORDED_CHUNKS:
            flight.preempted_at.append(sequence.age_ms)
        self.num_preemptions += 1
        self._waiting.prepend(sequence)

    def finish(self, sequence: Sequence, reason: str, stop_reason: int | None = None) -> None:
        """Take a sequence out wherever it stands and free its blocks at once."""
        if sequence.finished:
            return
        was_running = sequence.status is SequenceStatus.RUNNING
        unknown = sequence.status is SequenceStatus.WAITING_FOR_ADMISSION
        parked = sequence.status is SequenceStatus.PARKED_BEAM
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        if was_running:
            self.remove(sequence)
        elif not unknown and not parked:
            self._waiting.remove_finished(sequence)
        quota = self.quota_of(sequence)
        if not unknown:
            quota.sequences -= 1
        self._kv.free(sequence.seq_id, quota)

    def reject_oversized(
        self, sequence: Sequence, count: int, prefix: BlockTables | None = None
    ) -> bool:
        """End a sequence whose next `count` tokens wouldn't fit if it were the only one: its
        tenant's limit shrank.
        """
        limit = self._kv.quotas.limit(self.quota_of(sequence))
        computed = sequence.num_computed_tokens
        if prefix is not None:
            computed = len(prefix[0]) * self._kv.block_size
        if self._kv.total(sequence.seq_id, computed, count, prefix) <= limit:
            return False
        error = KVPoolTooSmall(
            f"The request needs more than the {limit} KV blocks that its tenant may use.",
            param="max_tokens",
        )
        self.finish(sequence, "error")
        self._refused.append((sequence, error))
        return True

    def pop_rejected(self) -> list[tuple[Sequence, KVPoolTooSmall]]:
        """Sequences that ended because their tenant's limit can't hold them any more."""
        refused, self._refused = self._refused, []
        return refused

    def pop_removed(self) -> list[int]:
        """Ids of the sequences that left since the last step, for the worker."""
        removed, self.removed_ids = self.removed_ids, []
        return removed

    def free_and_remove(self, sequence: Sequence) -> None:
        """Free a running sequence's blocks; the worker forgets it."""
        self.remove(sequence)
        self._kv.free(sequence.seq_id, self.quota_of(sequence))
        sequence.num_computed_tokens = 0

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence off the running list; the worker is told."""
        self.sequences.remove(sequence)
        quota = self.quota_of(sequence)
        quota.running -= 1
        if not quota.running:
            self.tenants.discard(quota)
        self.removed_ids.append(sequence.seq_id)
