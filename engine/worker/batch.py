"""The worker's copy of the running batch, in arrays that a step reads without Python loops."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch

from engine.models.context import AttentionContext
from engine.sampling.state import SequenceSampling
from engine.scheduler.plan import NewSequence, StepPlan


@dataclass(slots=True)
class StepInputs:
    """One step's inputs and which sequences get a token from it.

    Attributes:
        token_ids: int64 [num_tokens].
        context: the batch for attention; its `logits_rows` are the tokens to sample from, in the
            order of `sampled`, followed by those of `prompt_rows`.
        sampled: indices into the plan's sequences that have caught up.
        prompt_rows: (index into the plan, first prompt position, count) of wanted prompt logprobs.
    """

    token_ids: torch.Tensor
    context: AttentionContext
    sampled: list[int]
    prompt_rows: list[tuple[int, int, int]]


class RunningBatch:
    """Rows of sequences: tokens, block tables, counts. A row is reused when its sequence leaves.

    There is a block table for each of `num_groups` KV cache groups, all of the same length.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int = 1
    ) -> None:
        self.block_size = block_size
        # Zero pages are only mapped when written, so a long max_model_len costs nothing by itself.
        self.tokens = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        max_blocks = -(-max_model_len // block_size)
        self.block_tables = np.zeros((num_groups, max_num_seqs, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self.sampling: list[SequenceSampling | None] = [None] * max_num_seqs
        self.prompt_logprobs_next: dict[int, int] = {}
        self.row_of: dict[int, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def apply(self, plan: StepPlan) -> None:
        """Take over the plan's changes: who left, who came, who got blocks."""
        for seq_id in plan.removed:
            self._remove(seq_id)
        for sequence in plan.new:
            self._add(sequence)
        for seq_id, block_ids in plan.new_blocks:
            self._append_blocks(self.row_of[seq_id], block_ids)

    def _remove(self, seq_id: int) -> None:
        row = self.row_of.pop(seq_id, None)
        if row is not None:
            self.sampling[row] = None
            self.prompt_logprobs_next.pop(row, None)
            self._free_rows.append(row)

    def _add(self, sequence: NewSequence) -> None:
        row = self._free_rows.pop()
        self.row_of[sequence.seq_id] = row
        count = len(sequence.token_ids)
        self.tokens[row, :count] = sequence.token_ids
        self.num_tokens[row] = count
        self.num_computed[row] = sequence.num_computed_tokens
        self.num_blocks[row] = 0
        self._append_blocks(row, sequence.block_ids)
        split = sequence.num_prompt_tokens
        self.sampling[row] = SequenceSampling(
            params=sequence.sampling,
            prompt_token_ids=sequence.token_ids[:split],
            output_token_ids=sequence.token_ids[split:],
            seed=sequence.seed,
        )
        if sequence.prompt_logprobs_from >= 0:
            self.prompt_logprobs_next[row] = max(1, sequence.prompt_logprobs_from)

    def _append_blocks(self, row: int, block_ids: list[list[int]]) -> None:
        start = self.num_blocks[row]
        end = start + len(block_ids[0])
        for table, ids in zip(self.block_tables, block_ids, strict=True):
            table[row, start:end] = ids
        self.num_blocks[row] = end

    def inputs(self, plan: StepPlan) -> StepInputs:
        """The step's tensors; computed counts move on to the step's end."""
        rows = np.fromiter((self.row_of[i] for i in plan.seq_ids), np.int64, len(plan.seq_ids))
        counts = np.asarray(plan.num_scheduled, dtype=np.int64)
        starts = self.num_computed[rows]
        ends = starts + counts
        query_start = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        # Token i of the step belongs to `owner[i]` and stands at `positions[i]` of its sequence.
        owner = np.repeat(rows, counts)
        offset = np.arange(query_start[-1]) - np.repeat(query_start[:-1], counts)
        positions = np.repeat(starts, counts) + offset
        caught_up = np.flatnonzero(ends == self.num_tokens[rows])
        prompt_rows, extra = self._prompt_rows(rows, starts, ends, query_start)
        wanted = np.concatenate((query_start[1:][caught_up].astype(np.int64) - 1, *extra))
        # Every token's logits, in order: the usual decode step needs no selection.
        plain = not extra and len(wanted) == len(positions)
        rows_wanted = None if plain else torch.from_numpy(wanted)
        tables = [
            self._tables(group, rows, owner, positions, int(ends.max()))
            for group in range(len(self.block_tables))
        ]
        context = AttentionContext(
            positions=torch.from_numpy(positions),
            slot_mapping=tables[0][0],
            block_tables=tables[0][1],
            seq_lens=torch.from_numpy(ends.astype(np.int32)),
            query_start_loc=torch.from_numpy(query_start),
            logits_rows=rows_wanted,
        )
        context.others = tuple(
            dataclasses.replace(context, slot_mapping=slots, block_tables=blocks)
            for slots, blocks in tables[1:]
        )
        tokens = torch.from_numpy(self.tokens[owner, positions].astype(np.int64))
        self.num_computed[rows] = ends
        return StepInputs(tokens, context, caught_up.tolist(), prompt_rows)

    def _tables(
        self, group: int, rows: np.ndarray, owner: np.ndarray, positions: np.ndarray, longest: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A KV cache group's slots of the step's tokens, and its block tables.

        Blocks that fell out of a window since they were appended are still named: they aren't read.
        """
        table, size = self.block_tables[group], self.block_size
        blocks = table[owner, positions // size].astype(np.int64)
        slots = torch.from_numpy(blocks * size + positions % size)
        return slots, torch.from_numpy(table[rows, : -(-longest // size)])

    def _prompt_rows(
        self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray, query_start: np.ndarray
    ) -> tuple[list[tuple[int, int, int]], list[np.ndarray]]:
        """Which of the step's tokens predict a prompt token whose logprob is wanted."""
        found: list[tuple[int, int, int]] = []
        extra: list[np.ndarray] = []
        if not self.prompt_logprobs_next:
            return found, extra
        for index, row in enumerate(rows.tolist()):
            first = self.prompt_logprobs_next.get(row)
            state = self.sampling[row]
            if first is None or state is None:
                continue
            # The token at position p is predicted by the logits at p - 1.
            last = min(int(ends[index]), len(state.prompt_token_ids) - 1)
            count = last - first + 1
            if count > 0:
                at = int(query_start[index]) + first - 1 - int(starts[index])
                extra.append(np.arange(at, at + count))
                found.append((index, first, count))
                self.prompt_logprobs_next[row] = last + 1
        return found, extra

    def append(self, seq_id: int, token_id: int) -> None:
        """Take over a sampled token."""
        row = self.row_of[seq_id]
        state = self.sampling[row]
        self.tokens[row, self.num_tokens[row]] = token_id
        self.num_tokens[row] += 1
        if state is not None:
            state.output_token_ids.append(token_id)
