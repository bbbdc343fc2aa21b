"""Recurrent states of sequences: a block of the group's pool holds the states of all its layers.

A running sequence has one block, which each step overwrites. A checkpoint is a copy of the state
after some number of tokens, cached by the hash of these tokens. The kernels write it to a separate
block when they pass that token, so no step is split or added for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from engine.kv_cache.block import Block, TenantQuota
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.kv_cache_config import KVCacheGroupSpec
from engine.kv_cache.prefix_cache import BlockHashes, CacheableSequence
from engine.kv_cache.single_type_managers import BlockTable, SingleTypeManager

#: Minimum number of tokens between two checkpoints of a sequence. Writing one takes as long as
#: about five tokens' own updates of the state, so all take less than a tenth of the states' time.
CHECKPOINT_INTERVAL = 64
#: A checkpoint is idle once it has waited for this many mean gaps between turns. In simulated chats
#: with log-normal and constant gaps, values above two lose hits to checkpoints of ended chats, and
#: values below one and a half evict checkpoints too early.
IDLE_GAPS = 2
#: Weight of the last gap in the mean.
GAP_WEIGHT = 1 / 16
#: Number of remembered prompts per block of the pool: enough to recognize several times more
#: conversations than there are blocks for states.
REMEMBERED_PROMPTS = 8
#: Shorter shared prefixes are cheaper to compute than to remember, unless a prompt ends there.
MIN_SHARED_TOKENS = 8 * CHECKPOINT_INTERVAL


def spaced_positions(end: int) -> Iterator[int]:
    """Positions below `end` where a prompt's state is saved, in case others share less of it.

    The gap after each position is at most a quarter of the tokens before it. So at least four
    fifths of any shared prefix of `MIN_SHARED_TOKENS` are reused, and the number of positions grows
    with the logarithm of a prompt's length.
    """
    position = MIN_SHARED_TOKENS
    while position < end:
        yield position
        position += position // 4 // CHECKPOINT_INTERVAL * CHECKPOINT_INTERVAL


def checkpoint_positions(start: int, end: int, branch: int) -> list[int]:
    """Positions where the state of a prompt is saved, the first one last.

    Args:
        start: number of tokens that needn't be computed.
        end: end of the prompt, in full blocks.
        branch: where it diverges from earlier prompts, as far as is known, in full blocks.
    """
    needed = {end, branch}
    spaced = {
        position
        for position in spaced_positions(end)
        if all(abs(position - other) >= CHECKPOINT_INTERVAL for other in needed)
    }
    return sorted((position for position in needed | spaced if position > start), reverse=True)


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A state that a step saves.

    Attributes:
        sequence: the sequence.
        record: its record, also after it has ended; None without a prefix cache.
        num_tokens: number of tokens that the state includes.
        block: the block that it is written to.
        quota: the tenant's.
        planned: the executor has been told to write it.
    """

    sequence: CacheableSequence
    record: CheckpointedSequence | None
    num_tokens: int
    block: Block
    quota: TenantQuota
    planned: bool = False


@dataclass(slots=True)
class CheckpointedSequence:
    """Record of a running sequence, for the choice of its checkpoints.

    Attributes:
        seq_id: the sequence's id.
        started_at: number of sequences that had started before it.
        is_returning: an earlier prompt is a prefix of it, as in later turns of a conversation.
        num_tokens: number of its tokens when it started.
        end: end of its prompt, in full blocks.
        branch: where its prompt diverges from earlier ones, in full blocks.
        positions: where checkpoints are still to be written, the next one last.
        cached: (number of tokens, key) of its cached checkpoints.
        num_computed: number of its tokens after the planned steps.
        latest: the last checkpoint in its output, with its key, which the next one replaces.
        previous: the sequence that this one continues, as a conversation's next turn does, until
            this one has a checkpoint.
        repeats_output: its prompt contains the output of `previous` after that one's prompt; None
            without `previous`.
    """

    seq_id: int
    started_at: int
    is_returning: bool
    num_tokens: int
    end: int
    branch: int
    positions: list[int]
    cached: list[tuple[int, bytes]]
    num_computed: int
    latest: tuple[Block, bytes] | None = None
    previous: CheckpointedSequence | None = None
    repeats_output: bool | None = None


def _first_current(
    queue: OrderedDict[Block, bytes], source: TenantQuota, is_current: Callable[[int], bool]
) -> Block | None:
    """Return the first block of a tenant's queue that is free, has the key that it was queued with,
    and whose number `is_current`; those before it leave the queue.
    """
    while queue:
        block, key = next(iter(queue.items()))
        is_free = block.ref_count == 0 and block.charged_to is source
        if is_free and block.block_hash == key and is_current(block.block_id):
            return block
        del queue[block]
    return None


class StateManager(SingleTypeManager):
    """Blocks of states. The pool has at least one per running sequence, so each always gets its
    own; checkpoints use the remaining ones.

    Checkpoints that later ones make superfluous are evicted first: those in the middle of a prompt
    once its end is cached; those of a conversation's turn once the next turn has its own, unless
    prompts diverge there; and the end of a prompt once its output has one, in a conversation that
    repeated an output before. `_make_space` decides about other evictions.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, group: KVCacheGroupSpec, suffix: bytes = b""
    ) -> None:
        super().__init__(pool, block_size, group, suffix)
        # States are cached by the hash of full blocks; both sizes are powers of two.
        self._interval = max(CHECKPOINT_INTERVAL, block_size)
        self._sequences: dict[int, CheckpointedSequence] = {}
        #: Sequences that no other continues yet, by the hash of their prompts, oldest first.
        self._last_turns: dict[bytes, CheckpointedSequence] = {}
        #: Number of started sequences: the clock of all ages here.
        self._num_started = 0
        #: Mean number of sequences that start between two turns of a conversation.
        self._mean_gap = 0.0
        #: By block id, when the cached checkpoint was last used, and whether prompts returned to
        #: it; never for superfluous ones.
        self._used_at = [float("-inf")] * pool.num_blocks
        self._is_returned_to = [False] * pool.num_blocks
        #: Checkpoints of the last plan, and earlier ones whose tokens aren't known yet.
        self._pending: list[Checkpoint] = []
        self._copies: list[tuple[int, int]] = []
        #: Sequence id -> its states before each draft that isn't verified yet.
        self._drafted: dict[int, list[Checkpoint]] = {}

    def cached_blocks_of(self, hashes: Sequence[bytes]) -> BlockTable:
        block = self.pool.get_cached_block(hashes[-1] + self.suffix) if hashes else None
        return [] if block is None else [block]

    def num_blocks_to_allocate(
        self, seq_id: int, num_tokens: int, num_computed: int, prefix: BlockTable | None
    ) -> int:
        return 0

    def num_blocks_after(
        self, seq_id: int, num_tokens: int, num_computed: int, prefix: BlockTable | None
    ) -> int:
        return 0

    def adopt_prefix(self, seq_id: int, prefix: BlockTable, quota: TenantQuota) -> None:
        """Start a sequence with a copy of a checkpoint, if there is one."""
        if not prefix:
            return
        (checkpoint,) = prefix
        quota = self._state_quota(quota)
        self.pool.touch(prefix, quota)
        self.pool.free_blocks(prefix, quota)
        self._record_use(checkpoint, is_returned_to=True)
        block = self._get_block(quota)
        # In the smallest pool the block is the checkpoint itself, which needs no copy.
        if block is not checkpoint:
            self._copies.append((checkpoint.block_id, block.block_id))
        self.tables[seq_id] = [block]

    def allocate_new_blocks(
        self, seq_id: int, num_tokens: int, num_computed: int, quota: TenantQuota
    ) -> BlockTable:
        if seq_id in self.tables:
            return []
        table = self.tables[seq_id] = [self._get_block(self._state_quota(quota))]
        return list(table)

    def remove_skipped_blocks(self, seq_id: int, num_computed: int, quota: TenantQuota) -> None:
        """Do nothing: there is one block."""

    def cache(self, seq_id: int, hashes: Sequence[bytes], first: int, end: int) -> None:
        """Do nothing: see `schedule_checkpoints`."""

    def start_sequence(self, sequence: CacheableSequence, num_computed: int, branch: int) -> None:
        """Start a sequence with `num_computed` cached tokens, sharing `branch` tokens with
        others.
        """
        num_tokens, size = len(sequence.token_ids), self.block_size
        # The last token is always computed, so no prompt can continue after it.
        end = (num_tokens - 1) // size * size
        hashes = sequence.block_hashes.hash_full_blocks(sequence.token_ids, size)[: end // size]
        same_prompt = self._last_turns.pop(hashes[-1], None) if hashes else None
        previous = None if same_prompt is not None else self._pop_last_turn(hashes)
        if previous is not None:
            previous.previous = None
            if previous.seq_id != sequence.seq_id:
                gap = self._num_started - previous.started_at
                self._mean_gap += (gap - self._mean_gap) * (GAP_WEIGHT if self._mean_gap else 1)
        record = CheckpointedSequence(
            seq_id=sequence.seq_id,
            started_at=self._num_started,
            is_returning=previous is not None
            or (same_prompt is not None and same_prompt.is_returning),
            num_tokens=num_tokens,
            end=end,
            branch=branch,
            positions=[],
            cached=[],
            num_computed=num_computed,
            previous=previous,
        )
        if previous is not None and branch >= previous.end:
            record.repeats_output = branch + size > min(previous.num_computed, end)
            record.branch = 0  # prompts don't diverge at the end of the last turn
        record.positions = [
            position
            for position in checkpoint_positions(num_computed, end, record.branch)
            if position % size == 0
        ]
        self._num_started += 1
        self._sequences[sequence.seq_id] = record
        if hashes:
            self._last_turns[hashes[-1]] = record
            if len(self._last_turns) > REMEMBERED_PROMPTS * self.pool.num_blocks:
                del self._last_turns[next(iter(self._last_turns))]

    def _pop_last_turn(self, hashes: Sequence[bytes]) -> CheckpointedSequence | None:
        """The sequence of the longest remembered prompt that is a prefix of these blocks."""
        for block_hash in reversed(hashes):
            if block_hash in self._last_turns:
                return self._last_turns.pop(block_hash)
        return None

    def schedule_checkpoints(
        self, sequence: CacheableSequence, quota: TenantQuota, num_computed: int, num_tokens: int
    ) -> None:
        """Have the next step save the sequence's state at its positions between `num_computed` and
        `num_tokens` tokens, while there are free blocks.
        """
        record = self._sequences[sequence.seq_id]
        record.num_computed = num_tokens
        positions, quota = record.positions, self._state_quota(quota)
        while positions and positions[-1] <= num_tokens:
            self._keep(sequence, positions.pop(), quota)
        if record.repeats_output is False:
            return
        # A prompt of full blocks goes on from its very end only in a later turn.
        ends = num_tokens == record.num_tokens and num_tokens % self.block_size == 0
        if ends or (num_tokens > record.num_tokens and num_tokens % self._interval == 0):
            self._keep(sequence, num_tokens, quota)

    def _keep(self, sequence: CacheableSequence, num_tokens: int, quota: TenantQuota) -> None:
        record = self._sequences[sequence.seq_id]
        if num_tokens >= record.end:
            # At once, so that the new checkpoint may reuse one of their blocks.
            self._evict_superfluous(record, num_tokens)
        is_returned_to = record.is_returning or num_tokens == record.branch
        if self.pool.num_free_blocks and self._make_space(quota, is_returned_to):
            block = self._get_block(quota)
            self._pending.append(Checkpoint(sequence, record, num_tokens, block, quota))

    def _make_space(self, quota: TenantQuota, is_returned_to: bool) -> bool:
        """Whether a new checkpoint is worth more than the one it would replace, which is then made
        the next to be evicted.

        By last use alone, conversations that take turns evict each other just before they return,
        and none ever hits. So a checkpoint is replaced if it has been idle for longer than
        conversations usually are, or if no prompt has returned to it while the new one belongs to a
        conversation that has returned. Otherwise the cached ones stay, and the new one isn't
        written.

        Args:
            quota: the tenant's.
            is_returned_to: prompts have returned to the new checkpoint's conversation.
        """
        source, first = self._next_to_evict()
        if source is not quota or first.block_hash is None:
            return True
        if self._num_started - self._used_at[first.block_id] > IDLE_GAPS * self._mean_gap:
            return True
        if is_returned_to:
            block = _first_current(
                source.unreturned, source, lambda number: not self._is_returned_to[number]
            )
            if block is not None:
                self.pool.evict_first(block)
                return True
        return False

    def _next_to_evict(self) -> tuple[TenantQuota, Block]:
        """The block that is allocated next, and the tenant that has it: one without content if
        there is any, else the tenant's oldest superfluous one.
        """
        source, _ = self.pool.quotas.next_to_evict()
        first = next(iter(source.free))
        if first.block_hash is None:
            return source, first
        block = _first_current(
            source.superfluous, source, lambda number: self._used_at[number] == float("-inf")
        )
        if block is not None:
            self.pool.evict_first(block)
            return source, block
        return source, first

    def _record_use(self, checkpoint: Block, is_returned_to: bool) -> None:
        self._used_at[checkpoint.block_id] = self._num_started
        self._is_returned_to[checkpoint.block_id] = is_returned_to
        key, owner = checkpoint.block_hash, checkpoint.charged_to
        if owner is not None and key is not None and not is_returned_to:
            owner.unreturned.pop(checkpoint, None)
            owner.unreturned[checkpoint] = key

    def cache_written_checkpoints(self) -> None:
        """Cache the checkpoints of earlier steps, which are written before the next step reads
        them.
        """
        pending, self._pending = self._pending, []
        for checkpoint in pending:
            sequence, num_tokens = checkpoint.sequence, checkpoint.num_tokens
            if len(sequence.token_ids) < num_tokens:
                self._pending.append(checkpoint)  # its last token is still being sampled
                continue
            hashes = sequence.block_hashes.hash_full_blocks(sequence.token_ids, self.block_size)
            key = hashes[num_tokens // self.block_size - 1] + self.suffix
            block, is_new = checkpoint.block, self.pool.get_cached_block(key) is None
            if is_new:
                self.pool.cache_block(block, key)
            self._free(checkpoint)
            record = checkpoint.record
            if record is None or not is_new:
                continue
            self._record_use(block, record.is_returning or num_tokens == record.branch)
            record.cached.append((num_tokens, key))
            if num_tokens >= record.end:
                self._evict_superfluous(record, num_tokens)
            if num_tokens >= record.num_tokens:
                if record.latest is not None and record.latest[0].block_hash == record.latest[1]:
                    self.pool.discard(record.latest[0])
                record.latest = block, key

    def _evict_superfluous(self, record: CheckpointedSequence, num_tokens: int) -> None:
        """Have the checkpoints that the one after `num_tokens`, at the end of its prompt or in its
        output, replaces evicted before all but older superfluous ones, the shortest first.
        """
        first_needed = num_tokens if record.repeats_output else record.end
        for sequence in (record, record.previous):
            if sequence is None:
                continue
            for position, key in sequence.cached:
                block = self.pool.get_cached_block(key)
                is_replaced = sequence is not record or position < first_needed
                if block is not None and is_replaced and position != sequence.branch:
                    self._used_at[block.block_id] = float("-inf")
                    owner = block.charged_to
                    if owner is not None and owner.superfluous.get(block) != key:
                        owner.superfluous.pop(block, None)
                        owner.superfluous[block] = key
        record.previous = None

    def pop_checkpoints(self) -> list[tuple[int, int, int]]:
        """(sequence id, number of tokens, block id) of the checkpoints of the plan just made."""
        drafted = chain.from_iterable(self._drafted.values())
        planned = [
            checkpoint for checkpoint in chain(self._pending, drafted) if not checkpoint.planned
        ]
        for checkpoint in planned:
            checkpoint.planned = True
        return [
            (checkpoint.sequence.seq_id, checkpoint.num_tokens, checkpoint.block.block_id)
            for checkpoint in planned
        ]

    def pop_copies(self) -> list[tuple[int, int]]:
        """(source, target) of the blocks to copy, in order, before the plan's step computes."""
        copies, self._copies = self._copies, []
        return copies

    def keep_until_verified(
        self, sequence: CacheableSequence, quota: TenantQuota, num_computed: int, num_drafts: int
    ) -> None:
        """Have the next step save the states before each draft that follows `num_computed` tokens.
        The pool must have as many free blocks.
        """
        quota, record = self._state_quota(quota), self._sequences.get(sequence.seq_id)
        self._drafted[sequence.seq_id] = [
            Checkpoint(sequence, record, num_computed + index, block, quota)
            for index, block in enumerate(self._get_block(quota) for _ in range(num_drafts))
        ]

    def rewind(self, seq_id: int, num_tokens: int) -> None:
        """After a sequence's drafts were verified: continue from the state after `num_tokens`
        tokens, the accepted ones.
        """
        for checkpoint in self._drafted.pop(seq_id, ()):
            if checkpoint.num_tokens == num_tokens and seq_id in self.tables:
                self._copies.append((checkpoint.block.block_id, self.tables[seq_id][0].block_id))
            accepted = checkpoint.num_tokens <= num_tokens
            if accepted and checkpoint.num_tokens % self._interval == 0:
                self._pending.append(checkpoint)
            else:
                self._free(checkpoint)

    def uncache_from(self, seq_id: int, hashes: Sequence[bytes], first: int) -> None:
        num_tokens = first * self.block_size
        self._drop(
            checkpoint
            for checkpoint in self._pending
            if checkpoint.sequence.seq_id == seq_id and checkpoint.num_tokens > num_tokens
        )
        record = self._sequences.get(seq_id)
        for position, key in record.cached if record is not None else ():
            if position > num_tokens:
                self.pool.uncache_all(key)

    def drop_pending(self, hashes: BlockHashes) -> None:
        """Drop a sequence's pending checkpoints: its step failed."""
        self._drop(
            checkpoint for checkpoint in self._pending if checkpoint.sequence.block_hashes is hashes
        )

    def free(self, seq_id: int, quota: TenantQuota) -> None:
        table = self.tables.pop(seq_id, None)
        if table is None:
            return
        self.pool.free_blocks(table, self._state_quota(quota))
        self.pool.discard(table[0])
        self._sequences.pop(seq_id, None)
        for checkpoint in self._drafted.pop(seq_id, ()):
            self._free(checkpoint)
        # Tokens that aren't known by now never will be.
        self._drop(
            checkpoint
            for checkpoint in self._pending
            if checkpoint.sequence.seq_id == seq_id
            and checkpoint.num_tokens > len(checkpoint.sequence.token_ids)
        )

    def blocks_by_sequence(self) -> Iterator[tuple[int, BlockTable]]:
        checkpoints = chain(self._pending, *self._drafted.values())
        return chain(
            super().blocks_by_sequence(),
            ((checkpoint.sequence.seq_id, [checkpoint.block]) for checkpoint in checkpoints),
        )

    def _drop(self, dropped: Iterator[Checkpoint]) -> None:
        for checkpoint in list(dropped):
            self._pending.remove(checkpoint)
            self._free(checkpoint)

    def _free(self, checkpoint: Checkpoint) -> None:
        """Free its block: evicted by its last use, or at once if it isn't cached."""
        self.pool.free_blocks([checkpoint.block], checkpoint.quota)
        if checkpoint.block.block_hash is None:
            self.pool.discard(checkpoint.block)

    def _state_quota(self, quota: TenantQuota) -> TenantQuota:
        """The tenant's quota in this pool."""
        return self.pool.quotas.get(quota.name)

    def _get_block(self, quota: TenantQuota) -> Block:
        if not self.pool.num_free_blocks:
            # Only checkpoints that aren't written yet can occupy the block a sequence needs.
            self._drop(iter(self._pending[-1:]))
        source, block = self._next_to_evict()
        source.superfluous.pop(block, None)
        source.unreturned.pop(block, None)
        return self.pool.get_new_blocks(1, quota)[0]
