"""`DraftHeadCache`: keys, values and states of draft heads that consist of a layer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.models.forward_context import AttentionMetadata
from engine.scheduler.plan import StepPlan, StepResult
from engine.speculative.heads.layer import LayerDraftHeads
from engine.worker.input_batch import InputBatch
from engine.worker.step_inputs import StepInputs
from kernels.tensors import to_device

log = logging.getLogger(__name__)

#: Maximum number of deferred tokens while no drafts are requested. Then they are computed at once,
#: which costs little more than a single token.
MAX_PENDING_TOKENS = 256


def replace_adapter_tokens(token_ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """int64 token ids, in which ids added by an adapter are replaced: heads don't know these
    tokens. Drafts after them are verified like all others.
    """
    return np.where(token_ids < vocab_size, token_ids, 0).astype(np.int64)


class PendingTokens(NamedTuple):
    """Tokens of a step that the heads haven't processed yet.

    Attributes:
        hidden: [n, any], the model's output.
        previous_state_indices: [n], index of the state before each token, see
            `DraftHeadCache._previous_state_index`.
        tokens, positions, slots: [n].
    """

    hidden: Tensor
    previous_state_indices: np.ndarray
    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray


class DraftHeadCache:
    """Keys and values of the heads' layer, in the same blocks as the model's.

    The entry computed from token p and the model's state before it is stored at position p. So a
    block's content depends only on the tokens up to its end, like the model's own keys and values,
    and stays valid when blocks are shared, cached, evicted and recomputed. Two more things are
    stored: each row's newest state, and that of the last token of each block, from which a sequence
    with a cached prefix continues. Position 0 of a sequence has no entry.

    A sequence is tracked from its first step on or not at all, and no longer once the plan says so;
    a step without tracked sequences costs nothing. So it is known for each block whether its
    entries exist, and a sequence that starts after a block without them isn't tracked.

    A round of drafts uses separate blocks after the pool's: keys and values of drafts are never in
    the pool's blocks, so none of rejected drafts remain there.
    """

    needs_all_tokens = True

    def __init__(
        self,
        heads: LayerDraftHeads,
        batch: InputBatch,
        group: int,
        num_blocks: int,
        dtype: torch.dtype,
        max_drafts: int,
        device: torch.device,
        state_dtype: torch.dtype = torch.float32,
        vocab_size: int = 2**31 - 1,
    ) -> None:
        """`group`: KV cache group with full attention, whose block tables are used; `max_drafts`:
        maximum number of drafts per sequence; `device`: of the heads, which compute in
        `state_dtype`, while keys and values are in `dtype`; `vocab_size`: size of the heads'
        vocabulary.
        """
        self._vocab_size = vocab_size
        self.heads, self.aux_layers = heads, heads.taps
        self._batch, self._tables = batch, batch.block_tables[group]
        self.block_size = size = batch.block_size
        rows = len(batch.tokens)
        self.num_blocks = num_blocks
        self.draft_blocks_per_row = -(-(2 * size - 2 + max_drafts) // size)
        heads.layer.allocate(num_blocks + rows // 2 * self.draft_blocks_per_row, size, dtype)
        self._device = device
        self._block_end_states = torch.zeros(
            (num_blocks, heads.width), dtype=state_dtype, device=device
        )
        self._states = torch.zeros((rows, heads.width), dtype=state_dtype, device=device)
        #: Row -> (sequence, number of tokens up to its state).
        self._of: dict[int, tuple[int, int]] = {}
        self._group = group
        #: Whether each block has all of its entries, or will have once pending tokens are
        #: processed.
        self._block_is_filled = np.zeros(num_blocks, dtype=bool)
        #: The step's rows that are tracked.
        self._tracked_rows: set[int] = set()
        #: Unprocessed tokens of steps, in order, and their number.
        self._pending: list[PendingTokens] = []
        self._num_pending = 0
        #: Index among them of a row's newest state, and of the state of a block's last token.
        self._state_at: dict[int, int] = {}
        self._end_at: dict[int, int] = {}
        self._failed = False

    def begin(self, plan: StepPlan) -> bool:
        if self._failed:
            return False
        try:
            return self._begin(plan)
        except Exception:  # as in `_try_save`
            self._failed = True
            log.exception("The heads can't follow the model any more; no drafts until a restart")
            return False

    def _begin(self, plan: StepPlan) -> bool:
        """Determine which rows are tracked."""
        self._forget(plan)
        unfollowed = set(plan.untracked)
        new = {sequence.seq_id for sequence in plan.new if sequence.seq_id not in unfollowed}
        self._tracked_rows = set()
        if not (new or self._of):
            return False
        batch, size = self._batch, self.block_size
        rows = [batch.row_of[seq_id] for seq_id in plan.seq_ids]
        starts = batch.num_computed[rows].tolist()
        for row, seq_id, start, count in zip(
            rows, plan.seq_ids, starts, plan.num_scheduled, strict=True
        ):
            begins = seq_id in new and self._may_begin(row, start)
            if begins or self._of.get(row) == (seq_id, start):
                self._tracked_rows.add(row)
                if count > 1 and seq_id not in plan.drafts:  # others may start after these
                    self._block_is_filled[
                        self._tables[row, start // size : (start + count) // size]
                    ] = True
        return bool(self._tracked_rows)

    def _forget(self, plan: StepPlan) -> None:
        """Stop tracking sequences as the plan says; mark blocks that will be written as
        unfilled.
        """
        if plan.removed:
            removed = set(plan.removed)
            self._of = {row: entry for row, entry in self._of.items() if entry[0] not in removed}
        for seq_id in plan.untracked:
            self._of.pop(self._batch.row_of.get(seq_id, -1), None)
        for sequence in plan.new:
            self._of.pop(self._batch.row_of[sequence.seq_id], None)
            cached = sequence.num_computed_tokens // self.block_size
            self._block_is_filled[sequence.block_ids[self._group][cached:]] = False
        for _, blocks in plan.new_blocks:
            self._block_is_filled[blocks[self._group]] = False

    def _may_begin(self, row: int, start: int) -> bool:
        """Whether the entries of the `start` tokens before a row's first token exist."""
        num_full_blocks, rest = divmod(start, self.block_size)
        return not rest and bool(self._block_is_filled[self._tables[row, :num_full_blocks]].all())

    def tokens(self, inputs: StepInputs) -> np.ndarray:
        """See `HiddenStateStore`: the tokens of tracked rows."""
        owner, _ = inputs.token_index
        return np.flatnonzero(np.isin(owner, list(self._tracked_rows)))

    def save(self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, result: StepResult) -> None:
        self._try_save(result, lambda: self._keep(plan, inputs, hidden))

    def _keep(self, plan: StepPlan, inputs: StepInputs, hidden: Tensor) -> None:
        token_indices = self.tokens(inputs)
        owner, positions = (array[token_indices] for array in inputs.token_index)
        # Rejected drafts are beyond the computed tokens.
        accepted = np.flatnonzero(positions < self._batch.num_computed[owner])
        if len(accepted) < len(token_indices):
            owner, positions = owner[accepted], positions[accepted]
            hidden = hidden[self.on_device(accepted)]
        self._follow(plan, owner, positions, hidden)

    def save_rows(
        self,
        plan: StepPlan,
        order: list[int],
        drafts: list[int],
        hidden: Tensor,
        result: StepResult,
    ) -> None:
        self._try_save(result, lambda: self._keep_rows(plan, order, drafts, hidden, result))

    def _keep_rows(
        self,
        plan: StepPlan,
        order: list[int],
        drafts: list[int],
        hidden: Tensor,
        result: StepResult,
    ) -> None:
        """Drop rows that aren't tracked first: that may be nearly all of a full batch."""
        batch, followed, start = self._batch, self._tracked_rows, 0
        owner, positions, hidden_rows = list[int](), list[int](), list[int]()
        for index, count in zip(order, drafts, strict=True):
            seq_id = plan.seq_ids[index]
            row = batch.row_of[seq_id]
            # A failed row is recomputed, if at all.
            if row in followed and seq_id not in result.errors:
                # Beams get their tokens with the next plan.
                num_tokens = max(1, len(result.token_ids[index]))
                end = int(batch.num_computed[row])
                owner += [row] * num_tokens
                positions += range(end - num_tokens, end)
                hidden_rows += range(start, start + num_tokens)
            start += 1 + count
        if len(hidden_rows) < start:
            hidden = hidden[self.on_device(np.array(hidden_rows, dtype=np.int64))]
        self._follow(plan, np.array(owner, np.int64), np.array(positions, np.int64), hidden)

    def _try_save(self, result: StepResult, keep: Callable[[], None]) -> None:
        """Save a step's states, and record the time that it takes."""
        if self._failed:
            return
        started = time.perf_counter()
        try:
            keep()
            result.tracking_seconds = time.perf_counter() - started
        except Exception:  # whatever the error, the model continues without drafts
            self._failed = True
            log.exception("The heads can't follow the model any more; no drafts until a restart")

    def _follow(
        self, plan: StepPlan, owner: np.ndarray, positions: np.ndarray, hidden: Tensor
    ) -> None:
        """Record new tokens with minimal work; the rest is done in `process_pending`.

        `hidden`: states of the tokens at `positions` of the rows `owner`, int64 [n] each, tokens of
        a row being consecutive.
        """
        batch, size = self._batch, self.block_size
        count, first = len(owner), self._num_pending
        if not count:
            return
        blocks = self._tables[owner, positions // size].astype(np.int64)
        # The previous state of a token is usually that of the token before it.
        previous_state_indices = np.arange(first, first + count)
        # Done first: a sequence may start after a block that another one computes in this step.
        full = np.flatnonzero((positions + 1) % size == 0)
        for index, block in zip(full.tolist(), blocks[full].tolist(), strict=True):
            self._end_at[block] = first + index
            self._block_is_filled[block] = True
        starts = np.flatnonzero(np.diff(owner, prepend=-1)).tolist()
        seq_of = {batch.row_of[seq_id]: seq_id for seq_id in plan.seq_ids}
        for start, end in zip(starts, [*starts[1:], count], strict=True):
            row = int(owner[start])
            previous_state_indices[start] = self._previous_state_index(
                row, seq_of[row], int(positions[start])
            )
            self._state_at[row] = first + end - 1
            self._of[row] = seq_of[row], int(positions[end - 1]) + 1
        tokens, slots = batch.tokens[owner, positions], blocks * size + positions % size
        self._pending.append(
            PendingTokens(hidden, previous_state_indices, tokens, positions, slots)
        )
        self._num_pending += count
        if self._num_pending >= MAX_PENDING_TOKENS:
            self.process_pending()

    def _previous_state_index(self, row: int, seq_id: int, position: int) -> int:
        """Index of the state before a row's first token of a step: the row's newest state, or that
        of the block before it; position 0 has none (index 0). From 1 on: pending states; below 0:
        states of rows, then those of blocks.
        """
        if position == 0:
            return 0
        if self._of.get(row) == (seq_id, position):
            index = self._state_at.get(row)
            return -1 - row if index is None else 1 + index
        block = int(self._tables[row, position // self.block_size - 1])
        index = self._end_at.get(block)
        return -1 - len(self._states) - block if index is None else 1 + index

    def on_device(self, array: np.ndarray) -> Tensor:
        """A host array as a tensor on the heads' device."""
        return to_device(torch.from_numpy(array), self._device)

    def process_pending(self) -> None:
        """See `HiddenStateStore`: compute keys and values of all pending tokens."""
        if self._pending and not self._failed:
            try:
                self._read()
            except Exception:
                self._failed = True  # the pending tokens are lost
                raise

    def _read(self) -> None:
        parts, self._pending, self._num_pending = self._pending, [], 0
        hidden = parts[0].hidden if len(parts) == 1 else torch.cat([part.hidden for part in parts])
        states = self.heads.states(hidden)
        previous_states = self._get_previous_states(
            states, np.concatenate([part.previous_state_indices for part in parts])
        )
        for saved_states, sources in (
            (self._states, self._state_at),
            (self._block_end_states, self._end_at),
        ):
            if sources:
                to, which = (
                    np.array(list(indices)) for indices in (sources.keys(), sources.values())
                )
                saved_states[self.on_device(to)] = states[self.on_device(which)]
                sources.clear()
        tokens, positions, slots = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("tokens", "positions", "slots")
        )
        # A block may have been reallocated meanwhile: keep the last write to each slot.
        _, from_end = np.unique(slots[::-1], return_index=True)
        newest = np.sort(len(slots) - 1 - from_end)
        newest = newest[positions[newest] > 0]
        if not len(newest):
            return
        token_ids = replace_adapter_tokens(tokens[newest], self._vocab_size)
        x, _ = self.heads.combine_inputs(
            self.on_device(token_ids), previous_states[self.on_device(newest)]
        )
        targets = self.on_device(positions[newest] - 1), self.on_device(slots[newest])
        self.heads.layer.write(x, *targets)

    def _get_previous_states(self, states: Tensor, indices: np.ndarray) -> Tensor:
        """[n, width]: the states at `indices`, see `_previous_state_index`."""
        previous_states = states[self.on_device(np.maximum(indices - 1, 0))]
        rows = len(self._states)
        of_rows = np.flatnonzero((indices < 0) & (indices >= -rows))
        of_blocks = np.flatnonzero(indices < -rows)
        if len(of_rows):
            previous_states[self.on_device(of_rows)] = self._states[
                self.on_device(-1 - indices[of_rows])
            ]
        if len(of_blocks):
            previous_states[self.on_device(of_blocks)] = self._block_end_states[
                self.on_device(-1 - rows - indices[of_blocks])
            ]
        nothing = np.flatnonzero(indices == 0)
        if len(nothing):
            previous_states[self.on_device(nothing)] = 0.0
        return previous_states

    def row_of(self, seq_id: int) -> int | None:
        row = self._batch.row_of.get(seq_id)
        if self._failed or row is None:
            return None
        if self._of.get(row) != (seq_id, int(self._batch.num_tokens[row]) - 1):
            return None
        return row

    def is_tracked(self, seq_id: int) -> bool:
        row = self._batch.row_of.get(seq_id, -1)
        return not self._failed and self._of.get(row, (-1, 0))[0] == seq_id

    def start_draft_rounds(self, rows: list[int]) -> LayerDraftRounds:
        self.process_pending()
        computed = self._batch.num_tokens[rows] - 1
        tables = self._tables[rows, : -(-int(computed.max()) // self.block_size)]
        return LayerDraftRounds(
            self, tables, computed, self._states[self.on_device(np.array(rows))]
        )

    def warm_up(self, count: int) -> None:
        """See `HiddenStateStore`; positions before the first are written nowhere."""
        heads = self.heads
        nowhere = self.on_device(np.full(count, -1))
        tokens = positions = torch.zeros_like(nowhere)
        states = heads.states(self._states.new_zeros((count, heads.columns)))
        x, residual = heads.combine_inputs(tokens, states)
        heads.layer.write(x, positions, nowhere)
        if count <= len(self._states):
            tables = self.on_device(np.zeros((count, self.draft_blocks_per_row), dtype=np.int32))
            starts = self.on_device(np.arange(count + 1, dtype=np.int32))
            lengths = torch.ones_like(starts[:count])
            step = AttentionMetadata(positions, nowhere, tables, lengths, starts)
            heads.logits(heads.layer(x, residual, step))


class LayerDraftRounds:
    """Drafts of some rows, whose keys and values are stored in separate blocks.

    A row reads its full blocks except the first in place. The entries of the first block, which has
    none at position 0, and of its last, partial block are copied before those of the drafts. Their
    order doesn't matter: keys were rotated by their positions before.
    """

    def __init__(
        self, memory: DraftHeadCache, tables: np.ndarray, computed: np.ndarray, states: Tensor
    ) -> None:
        """`tables`: [n, blocks], of the rows; `computed`: [n], >= 1, number of tokens that have an
        entry, plus the first; `states`: [n, width], states of their last tokens.
        """
        self._heads, size = memory.heads, memory.block_size
        count, num_draft_blocks = len(computed), memory.draft_blocks_per_row
        full = computed // size
        ahead = np.maximum(full - 1, 0)
        seen = np.zeros((count, int(ahead.max()) + num_draft_blocks), dtype=np.int32)
        source: list[np.ndarray] = []
        target: list[np.ndarray] = []
        following = np.zeros(count, dtype=np.int64)
        for index in range(count):
            first = memory.num_blocks + index * num_draft_blocks
            seen[index, : ahead[index]] = tables[index, 1 : full[index]]
            seen[index, ahead[index] : ahead[index] + num_draft_blocks] = np.arange(
                first, first + num_draft_blocks
            )
            loose = np.arange(1, min(size, computed[index]))
            loose = np.append(loose, np.arange(max(1, full[index]) * size, computed[index]))
            source.append(tables[index, loose // size].astype(np.int64) * size + loose % size)
            target.append(first * size + np.arange(len(loose)))
            following[index] = first * size + len(loose)
        if sum(map(len, source)):
            source_slots, target_slots = (
                memory.on_device(np.concatenate(slots)) for slots in (source, target)
            )
            self._heads.layer.copy(
                (source_slots // size, source_slots % size),
                (target_slots // size, target_slots % size),
            )
        self._on_device = memory.on_device
        #: Positions of each row's next draft, on the heads' device, where they are incremented.
        self._positions, self._next = memory.on_device(computed - 1), memory.on_device(following)
        self._lengths, self._tables = (
            memory.on_device(computed.astype(np.int32)),
            memory.on_device(seen),
        )
        self._starts = memory.on_device(np.arange(count + 1, dtype=np.int32))
        self._states = states

    def logits(self, tokens: Tensor) -> Tensor:
        x, residual = self._heads.combine_inputs(tokens, self._states)
        step = AttentionMetadata(
            positions=self._positions,
            slot_mapping=self._next,
            block_tables=self._tables,
            seq_lens=self._lengths,
            query_start_loc=self._starts[: len(x) + 1],
        )
        self._states = self._heads.layer(x, residual, step)
        self._positions, self._next = self._positions + 1, self._next + 1
        self._lengths = self._lengths + 1
        return self._heads.logits(self._states)

    def keep(self, rows: list[int]) -> None:
        indices = self._on_device(np.array(rows))
        self._positions, self._next = self._positions[indices], self._next[indices]
        self._lengths, self._tables = self._lengths[indices], self._tables[indices]
        self._states = self._states[indices]
