"""`HeadMemory`: what heads that are a layer know of each sequence."""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor

from engine.models.context import AttentionContext
from engine.scheduler.plan import StepPlan, StepResult
from engine.speculative.heads.layer_heads import LayerHeads
from engine.worker.batch import RunningBatch, StepInputs

log = logging.getLogger(__name__)

#: Tokens whose keys and values are computed at once, where no draft is wanted before.
_MOST_PENDING = 256


class HeadMemory:
    """Keys and values of the heads' layer, in the same blocks as the model's.

    The entry that is made of token p and of the model's state before it stands at p's own place. So
    what a block holds depends on the tokens up to its end and on nothing else, as the model's keys
    and values do: shared, cached, evicted and computed anew, it is right whenever those are. Two
    things are kept beside: each row's newest state, and that of the last token of each block, from
    which a sequence goes on whose prompt was found in the cache. A sequence's place 0 has no entry.

    A round of drafts has places of its own behind the pool's blocks: a draft's keys and values are
    in no block, so none are left there that don't hold.
    """

    whole = True

    def __init__(
        self,
        heads: LayerHeads,
        batch: RunningBatch,
        group: int,
        num_blocks: int,
        dtype: torch.dtype,
        most: int,
    ) -> None:
        """`group`: whose block tables, of full attention; `most`: drafts of a sequence."""
        self.heads, self.taps = heads, heads.taps
        self._batch, self._tables = batch, batch.block_tables[group]
        self.block_size = size = batch.block_size
        rows = len(batch.tokens)
        self.num_blocks, self.own_blocks = num_blocks, -(-(2 * size - 2 + most) // size)
        heads.layer.allocate(num_blocks + rows // 2 * self.own_blocks, size, dtype)
        self._ends = torch.zeros((num_blocks, heads.width))
        self._states = torch.zeros((rows, heads.width))
        #: Row -> (sequence, tokens up to its state).
        self._of: dict[int, tuple[int, int]] = {}
        #: (tokens, the states before them, positions, slots), in the steps' order.
        self._pending: list[tuple[np.ndarray, Tensor, np.ndarray, np.ndarray]] = []
        self._num_pending = 0
        self._failed = False

    # -- what steps computed ------------------------------------------------------------------

    def keep(self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, result: StepResult) -> None:
        """See `HiddenKeeper`."""
        self._take(plan, *inputs.places, hidden)

    def keep_rows(
        self,
        plan: StepPlan,
        order: list[int],
        drafts: list[int],
        hidden: Tensor,
        result: StepResult,
    ) -> None:
        """See `HiddenKeeper`."""
        seq_ids = [plan.seq_ids[index] for index in order]
        rows = np.array([self._batch.row_of[seq_id] for seq_id in seq_ids])
        counts = 1 + np.array(drafts)
        # Beams get their tokens elsewhere; what failed is computed anew, if ever.
        held = [
            0 if seq_id in result.errors else max(1, len(result.token_ids[index]))
            for index, seq_id in zip(order, seq_ids, strict=True)
        ]
        owner = np.repeat(rows, counts)
        first = np.repeat(self._batch.num_computed[rows] - np.array(held), counts)
        offset = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._take(plan, owner, first + offset, hidden)

    def _take(
        self, plan: StepPlan, owner: np.ndarray, positions: np.ndarray, hidden: Tensor
    ) -> None:
        """States of the tokens at `positions` of the rows `owner`, int64 [n] each, a row's behind
        each other; those of drafts that didn't hold lie beyond what is computed.
        """
        if self._failed:
            return
        try:
            self._follow(plan, owner, positions, hidden)
        except Exception:  # whatever it is, the model goes on without drafts
            self._failed = True
            log.exception("The heads can't follow the model any more; no drafts until a restart")

    def _follow(
        self, plan: StepPlan, owner: np.ndarray, positions: np.ndarray, hidden: Tensor
    ) -> None:
        batch, size = self._batch, self.block_size
        held = np.flatnonzero(positions < batch.num_computed[owner])
        if not len(held):
            return
        owner, positions = owner[held], positions[held]
        states = self.heads.states(hidden)[torch.from_numpy(held)]
        blocks = self._tables[owner, positions // size].astype(np.int64)
        # First: a sequence may begin behind a block that another one computes in the same step.
        full = np.flatnonzero((positions + 1) % size == 0)
        self._ends[torch.from_numpy(blocks[full])] = states[torch.from_numpy(full)]
        starts = np.flatnonzero(np.diff(owner, prepend=-1))
        seq_of = {batch.row_of[seq_id]: seq_id for seq_id in plan.seq_ids}
        before = states.roll(1, 0)
        for at in starts.tolist():
            row, position = int(owner[at]), int(positions[at])
            before[at] = self._before(row, seq_of[row], position)
        lasts = np.append(starts[1:], len(owner)) - 1
        for at in lasts.tolist():
            row = int(owner[at])
            self._states[row] = states[at]
            self._of[row] = seq_of[row], int(positions[at]) + 1
        self._put_off(owner, positions, blocks * size + positions % size, before)

    def _before(self, row: int, seq_id: int, position: int) -> Tensor:
        """The state of the token before a position, at which a step began to compute."""
        if position == 0:
            return torch.zeros(self.heads.width)
        if self._of.get(row) == (seq_id, position):
            return self._states[row]
        block, place = divmod(position - 1, self.block_size)
        if place != self.block_size - 1:
            raise RuntimeError(f"The heads know no state before position {position}.")
        return self._ends[int(self._tables[row, block])]

    def _put_off(
        self, owner: np.ndarray, positions: np.ndarray, slots: np.ndarray, before: Tensor
    ) -> None:
        """Compute keys and values of these tokens later, with others."""
        tokens = self._batch.tokens[owner, positions].astype(np.int64)
        self._pending.append((tokens, before, positions, slots))
        self._num_pending += len(tokens)
        if self._num_pending >= _MOST_PENDING:
            self.catch_up()

    def catch_up(self) -> None:
        """Compute the keys and values of all tokens whose states have come."""
        if not self._pending:
            return
        parts, self._pending, self._num_pending = self._pending, [], 0
        tokens, positions, slots = (
            np.concatenate([part[at] for part in parts]) for at in (0, 2, 3)
        )
        # A block may have changed hands meanwhile: of each place what came last.
        _, from_end = np.unique(slots[::-1], return_index=True)
        newest = np.sort(len(slots) - 1 - from_end)
        newest = newest[positions[newest] > 0]
        if not len(newest):
            return
        before = torch.cat([part[1] for part in parts])[torch.from_numpy(newest)]
        x, _ = self.heads.mixed(torch.from_numpy(tokens[newest]), before)
        places = torch.from_numpy(positions[newest] - 1), torch.from_numpy(slots[newest])
        self.heads.layer.write(x, *places)

    # -- drafts -------------------------------------------------------------------------------

    def row_of(self, seq_id: int) -> int | None:
        """See `HiddenKeeper`."""
        row = self._batch.row_of.get(seq_id)
        if self._failed or row is None:
            return None
        if self._of.get(row) != (seq_id, int(self._batch.num_tokens[row]) - 1):
            return None
        return row

    def rounds(self, rows: list[int]) -> LayerRounds:
        """See `HiddenKeeper`."""
        self.catch_up()
        computed = self._batch.num_tokens[rows] - 1
        tables = self._tables[rows, : -(-int(computed.max()) // self.block_size)]
        return LayerRounds(self, tables, computed, self._states[rows])


class LayerRounds:
    """Drafts of some rows, whose keys and values are in places of their own.

    A row sees its full blocks but the first, where they are; the entries of that one, which has
    none at place 0, and of its last block, which isn't full, are copied before those of the drafts.
    Their order makes no difference: keys were rotated by their positions before.
    """

    def __init__(
        self, memory: HeadMemory, tables: np.ndarray, computed: np.ndarray, states: Tensor
    ) -> None:
        """`tables`: [n, blocks], of the rows; `computed`: [n], >= 1, tokens with an entry but for
        the first; `states`: [n, width], of the last of these.
        """
        self._heads, size = memory.heads, memory.block_size
        count, own = len(computed), memory.own_blocks
        full = computed // size
        ahead = np.maximum(full - 1, 0)
        self._tables = np.zeros((count, int(ahead.max()) + own), dtype=np.int32)
        source: list[np.ndarray] = []
        target: list[np.ndarray] = []
        self._next = np.zeros(count, dtype=np.int64)
        for at in range(count):
            first = memory.num_blocks + at * own
            self._tables[at, : ahead[at]] = tables[at, 1 : full[at]]
            self._tables[at, ahead[at] : ahead[at] + own] = np.arange(first, first + own)
            loose = np.arange(1, min(size, computed[at]))
            loose = np.append(loose, np.arange(max(1, full[at]) * size, computed[at]))
            source.append(tables[at, loose // size].astype(np.int64) * size + loose % size)
            target.append(first * size + np.arange(len(loose)))
            self._next[at] = first * size + len(loose)
        if sum(map(len, source)):
            places = [torch.from_numpy(np.concatenate(each)) for each in (source, target)]
            taken, put = ((each // size, each % size) for each in places)
            self._heads.layer.copy(taken, put)
        self._positions, self._lengths, self._states = computed - 1, computed, states

    def logits(self, tokens: Tensor) -> Tensor:
        """See `Rounds`."""
        x, residual = self._heads.mixed(tokens, self._states)
        step = AttentionContext(
            positions=torch.from_numpy(self._positions),
            slot_mapping=torch.from_numpy(self._next),
            block_tables=torch.from_numpy(self._tables),
            seq_lens=torch.from_numpy(self._lengths.astype(np.int32)),
            query_start_loc=torch.arange(len(x) + 1, dtype=torch.int32),
        )
        self._states = self._heads.layer(x, residual, step)
        self._positions, self._next = self._positions + 1, self._next + 1
        self._lengths = self._lengths + 1
        return self._heads.logits(self._states)

    def keep(self, rows: list[int]) -> None:
        """See `Rounds`."""
        self._positions, self._next = self._positions[rows], self._next[rows]
        self._lengths, self._tables = self._lengths[rows], self._tables[rows]
        self._states = self._states[rows]
