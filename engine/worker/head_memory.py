"""`HeadMemory`: what heads that are a layer know of each sequence."""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor

from engine.models.context import AttentionContext
from engine.sampling.transfer import to_device
from engine.scheduler.plan import StepPlan, StepResult
from engine.speculative.heads.layer_heads import LayerHeads
from engine.worker.batch import RunningBatch, StepInputs

log = logging.getLogger(__name__)

#: Tokens whose keys and values are computed at once, where no draft is wanted before.
_MOST_PENDING = 256


def known_tokens(token_ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """int64 of token ids, another one in the place of each that an adapter brings: heads have no
    such token, and what they say behind one is checked as ever.
    """
    return np.where(token_ids < vocab_size, token_ids, 0).astype(np.int64)


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
        device: torch.device,
        kept: torch.dtype = torch.float32,
        vocab_size: int = 2**31 - 1,
    ) -> None:
        """`group`: whose block tables, of full attention; `most`: drafts of a sequence; `device`:
        of the heads, which compute in `kept`, while keys and values are in `dtype`; `vocab_size`:
        of the tokens that they know.
        """
        self._vocab_size = vocab_size
        self.heads, self.taps = heads, heads.taps
        self._batch, self._tables = batch, batch.block_tables[group]
        self.block_size = size = batch.block_size
        rows = len(batch.tokens)
        self.num_blocks, self.own_blocks = num_blocks, -(-(2 * size - 2 + most) // size)
        heads.layer.allocate(num_blocks + rows // 2 * self.own_blocks, size, dtype)
        self._device = device
        self._ends = torch.zeros((num_blocks, heads.width), dtype=kept, device=device)
        self._states = torch.zeros((rows, heads.width), dtype=kept, device=device)
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
        states = self.heads.states(hidden)[self.there(held)]
        blocks = self._tables[owner, positions // size].astype(np.int64)
        # First: a sequence may begin behind a block that another one computes in the same step.
        full = np.flatnonzero((positions + 1) % size == 0)
        if len(full):
            self._ends[self.there(blocks[full])] = states[self.there(full)]
        starts = np.flatnonzero(np.diff(owner, prepend=-1))
        lasts = np.append(starts[1:], len(owner)) - 1
        seq_of = {batch.row_of[seq_id]: seq_id for seq_id in plan.seq_ids}
        before = states.roll(1, 0)
        self._put_befores(before, starts, owner, positions, seq_of)
        self._states[self.there(owner[lasts])] = states[self.there(lasts)]
        for at in lasts.tolist():
            row = int(owner[at])
            self._of[row] = seq_of[row], int(positions[at]) + 1
        self._put_off(owner, positions, blocks * size + positions % size, before)

    def _put_befores(
        self,
        before: Tensor,
        starts: np.ndarray,
        owner: np.ndarray,
        positions: np.ndarray,
        seq_of: dict[int, int],
    ) -> None:
        """Write to `before` the states of the tokens before the rows' first ones of a step, which
        are at `starts`: a row goes on where it was, or behind a block; place 0 has none before it.
        """
        first: list[int] = []
        going_on: list[tuple[int, int]] = []
        behind: list[tuple[int, int]] = []
        for at in starts.tolist():
            row, position = int(owner[at]), int(positions[at])
            if position == 0:
                first.append(at)
            elif self._of.get(row) == (seq_of[row], position):
                going_on.append((at, row))
            elif position % self.block_size == 0:
                behind.append((at, int(self._tables[row, position // self.block_size - 1])))
            else:
                raise RuntimeError(f"The heads know no state before position {position}.")
        if first:
            before[self.there(np.array(first))] = 0.0
        for places, known in ((going_on, self._states), (behind, self._ends)):
            if places:
                to, which = (self.there(np.array(part)) for part in zip(*places, strict=True))
                before[to] = known[which]

    def there(self, array: np.ndarray) -> Tensor:
        """A vector of the host on the heads' device."""
        return to_device(torch.from_numpy(array), self._device)

    def _put_off(
        self, owner: np.ndarray, positions: np.ndarray, slots: np.ndarray, before: Tensor
    ) -> None:
        """Compute keys and values of these tokens later, with others."""
        tokens = known_tokens(self._batch.tokens[owner, positions], self._vocab_size)
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
        before = torch.cat([part[1] for part in parts])[self.there(newest)]
        x, _ = self.heads.mixed(self.there(tokens[newest]), before)
        places = self.there(positions[newest] - 1), self.there(slots[newest])
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
        return LayerRounds(self, tables, computed, self._states[self.there(np.array(rows))])

    def rehearse(self, count: int) -> None:
        """See `HiddenKeeper`; places before the first are written nowhere."""
        heads = self.heads
        nowhere = self.there(np.full(count, -1))
        tokens = positions = torch.zeros_like(nowhere)
        states = heads.states(self._states.new_zeros((count, heads.columns)))
        x, residual = heads.mixed(tokens, states)
        heads.layer.write(x, positions, nowhere)
        if count <= len(self._states):
            tables = self.there(np.zeros((count, self.own_blocks), dtype=np.int32))
            starts = self.there(np.arange(count + 1, dtype=np.int32))
            lengths = torch.ones_like(starts[:count])
            step = AttentionContext(positions, nowhere, tables, lengths, starts)
            heads.logits(heads.layer(x, residual, step))


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
        seen = np.zeros((count, int(ahead.max()) + own), dtype=np.int32)
        source: list[np.ndarray] = []
        target: list[np.ndarray] = []
        following = np.zeros(count, dtype=np.int64)
        for at in range(count):
            first = memory.num_blocks + at * own
            seen[at, : ahead[at]] = tables[at, 1 : full[at]]
            seen[at, ahead[at] : ahead[at] + own] = np.arange(first, first + own)
            loose = np.arange(1, min(size, computed[at]))
            loose = np.append(loose, np.arange(max(1, full[at]) * size, computed[at]))
            source.append(tables[at, loose // size].astype(np.int64) * size + loose % size)
            target.append(first * size + np.arange(len(loose)))
            following[at] = first * size + len(loose)
        if sum(map(len, source)):
            taken, put = (memory.there(np.concatenate(each)) for each in (source, target))
            self._heads.layer.copy((taken // size, taken % size), (put // size, put % size))
        self._there = memory.there
        #: Of the next draft of each row; all on the heads' device, where they are counted up.
        self._positions, self._next = memory.there(computed - 1), memory.there(following)
        self._lengths, self._tables = memory.there(computed.astype(np.int32)), memory.there(seen)
        self._starts = memory.there(np.arange(count + 1, dtype=np.int32))
        self._states = states

    def logits(self, tokens: Tensor) -> Tensor:
        """See `Rounds`."""
        x, residual = self._heads.mixed(tokens, self._states)
        step = AttentionContext(
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
        """See `Rounds`."""
        kept = self._there(np.array(rows))
        self._positions, self._next = self._positions[kept], self._next[kept]
        self._lengths, self._tables = self._lengths[kept], self._tables[kept]
        self._states = self._states[kept]
