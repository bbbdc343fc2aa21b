"""The worker's state of the running batch, in arrays that steps read without Python loops."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping

import msgspec
import numpy as np
import torch

from engine.contract.errors import ConfigError
from engine.contract.sampling_params import SamplingParams
from engine.kv_cache.kv_cache_config import KVCacheConfig, single_group_config
from engine.models.forward_context import AttentionMetadata, StateStep
from engine.models.lora import AdapterWeights
from engine.sampling.request_state import RequestSamplingState
from engine.scheduler.plan import EncoderInput, NewSequence, RewoundSequence, StepPlan, is_decode
from engine.worker.interface import Attachments
from engine.worker.step_inputs import (
    DraftedRow,
    EncoderRange,
    PromptRow,
    RowAdapters,
    SampledRows,
    StepInputs,
)


def write_drafts(
    batch: InputBatch, plan: StepPlan, order: np.ndarray, rows: np.ndarray, first: np.ndarray
) -> tuple[list[DraftedRow], list[np.ndarray]]:
    """Write drafts after their rows' tokens; returns the rows that have drafts, and the indices of
    the drafts among the step's tokens.

    `order`, `rows`, `first`: for each row that samples, its index in the plan, its row of the
    batch, and the index of the first of the step's tokens after which it samples.
    """
    drafted: list[DraftedRow] = []
    token_indices: list[np.ndarray] = []
    if not plan.drafts:
        return drafted, token_indices
    logits_row = len(rows)
    for index, row, token in zip(order.tolist(), rows.tolist(), first.tolist(), strict=True):
        drafts = plan.drafts.get(plan.seq_ids[index])
        if not drafts:
            continue
        start = batch.num_tokens[row]
        batch.tokens[row, start : start + len(drafts)] = drafts
        token_indices.append(np.arange(token + 1, token + 1 + len(drafts)))
        drafted.append(DraftedRow(index, row, drafts, logits_row))
        logits_row += len(drafts)
    return drafted, token_indices


def plane_positions(num_tokens: int, pictures: list[EncoderInput]) -> np.ndarray:
    """A prompt's positions in time, height and width, int64 [num_tokens, 3] (M-RoPE, arXiv
    2409.12191).

    Text increments all three. A picture's vectors count frames, rows and columns from the position
    where the text stopped, and the text continues after the largest of its rows and columns. Those
    of a pruned one keep their places.
    """
    positions = np.empty((num_tokens, 3), dtype=np.int64)
    token = position = 0
    for picture in pictures:
        text = picture.start - token
        positions[token : picture.start] = (position + np.arange(text))[:, None]
        position += text
        cells = np.indices(picture.grid).reshape(3, -1).T
        # In float32, as in the models' training.
        cells[:, 0] = (cells[:, 0].astype(np.float32) * np.float32(picture.time_interval)).astype(
            int
        )
        if picture.retained:
            cells = cells[np.frombuffer(picture.retained, dtype=bool)]
        positions[picture.start : picture.start + picture.count] = position + cells
        position += max(picture.grid[1:])
        token = picture.start + picture.count
    positions[token:] = (position + np.arange(num_tokens - token))[:, None]
    return positions


class InputBatch:
    """Rows of sequences: tokens, block tables, counts.

    `apply_plan` and `prepare_inputs` may run while another thread still computes the previous step.
    That thread only reads `tokens` and writes new ones by `append_sampled`. So the row of a removed
    sequence is reused only `max_steps_in_flight` steps later.

    There is a block table for each KV cache group of `layout`, by default one with full attention.
    `attachments` are the objects that plans refer to by handle, `adapters` those by digest.

    Raises `ConfigError` if the tables exceed the system's memory.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        layout: KVCacheConfig | None = None,
        attachments: Attachments | None = None,
        adapters: Mapping[str, AdapterWeights] | None = None,
        max_steps_in_flight: int = 1,
    ) -> None:
        self.block_size = block_size
        self._attachments = Attachments() if attachments is None else attachments
        #: Whether sequences with one token come before those with several.
        self.decodes_first = False
        num_rows = (1 + max_steps_in_flight) * max_num_seqs
        layout = layout or single_group_config(1)
        self.groups = layout.groups
        self.has_states = layout.state_group is not None
        try:
            # Pages are mapped on their first write: a large max_model_len alone uses no memory.
            self.tokens = np.zeros((num_rows, max_model_len + 1), dtype=np.int32)
            #: By KV cache group, [num_rows, the group's table_length of max_model_len].
            self.block_tables = [
                np.zeros((num_rows, group.table_length(max_model_len, block_size)), dtype=np.int32)
                for group in self.groups
            ]
        except (MemoryError, ValueError) as error:
            raise ConfigError(
                f"The system has no room for tables of max_num_seqs ({max_num_seqs}) sequences of "
                f"max_model_len ({max_model_len}) tokens: {error}.",
                param="max_num_seqs",
            ) from error
        self.num_blocks = np.zeros((len(self.groups), num_rows), dtype=np.int64)
        #: Includes the tokens that steps in flight sample.
        self.num_tokens = np.zeros(num_rows, dtype=np.int64)
        self.num_computed = np.zeros(num_rows, dtype=np.int64)
        self.num_prompt = np.zeros(num_rows, dtype=np.int64)
        self.sampling: list[RequestSamplingState | None] = [None] * num_rows
        #: Whether the sampled token is the sequence's next one; beams get theirs from the plan.
        self.appends_sampled = np.ones(num_rows, dtype=bool)
        #: Row -> vectors that replace its prompt's embeddings: (first position, [n, hidden]).
        self.prompt_embeds: dict[int, list[tuple[int, torch.Tensor]]] = {}
        #: Number of encoder states that its tokens attend to.
        self.num_encoder_states = np.zeros(num_rows, dtype=np.int32)
        #: Row -> tokens of its prompt that an encoder's vectors stand for.
        self.encoder_inputs: dict[int, list[EncoderInput]] = {}
        #: Offset from a token's index to its rotary position: with three-dimensional positions,
        #: pictures in the prompt take fewer positions than tokens.
        self.rope_offsets = np.zeros(num_rows, dtype=np.int64)
        #: Row -> its prompt's positions, int64 [num_prompt, 3], for three-dimensional positions.
        self.plane_positions: dict[int, np.ndarray] = {}
        self._max_model_len = max_model_len
        #: Row -> the next prompt token to score.
        self.prompt_logprobs_next: dict[int, int] = {}
        self.adapters = RowAdapters(adapters)
        self.row_of: dict[int, int] = {}
        self._free_rows = list(range(num_rows - 1, -1, -1))
        #: Rows that the latest plan's sequences left, and those of earlier plans.
        self.rows_to_recycle: list[int] = []
        self._rows_of_earlier_plans: deque[list[int]] = deque([[]] * (max_steps_in_flight - 1))

    def apply_plan(self, plan: StepPlan) -> None:
        """Apply the plan's changes: removed, rewound and new sequences, and new blocks."""
        self._rows_of_earlier_plans.append(self.rows_to_recycle)
        self._free_rows += self._rows_of_earlier_plans.popleft()
        self.rows_to_recycle = []
        for seq_id in plan.removed:
            self._remove(seq_id)
        for rewound in plan.rewound:
            self._rewind(rewound)
        for seq_id, token_id in plan.appended:
            self._append(seq_id, token_id)
        for sequence in plan.new:
            self._add(sequence)
        for seq_id, block_ids in plan.new_blocks:
            self._append_blocks(self.row_of[seq_id], block_ids)

    def _remove(self, seq_id: int) -> None:
        row = self.row_of.pop(seq_id, None)
        if row is not None:
            self.sampling[row] = None
            self.prompt_logprobs_next.pop(row, None)
            self.prompt_embeds.pop(row, None)
            self.encoder_inputs.pop(row, None)
            self.plane_positions.pop(row, None)
            self.rope_offsets[row] = 0
            self.adapters.clear(row)
            self.rows_to_recycle.append(row)

    def _rewind(self, rewound: RewoundSequence) -> None:
        row, start = self.row_of[rewound.seq_id], rewound.num_kept_tokens
        end = start + len(rewound.token_ids)
        self.tokens[row, start:end] = rewound.token_ids
        self.num_tokens[row] = end
        self.num_computed[row] = rewound.num_computed_tokens
        state = self.state(row)
        state.output_token_ids[start - int(self.num_prompt[row]) :] = rewound.token_ids
        if state.counts is not None:  # counts can't be decremented: recount from the start
            self.sampling[row] = dataclasses.replace(state)

    def _add(self, sequence: NewSequence) -> None:
        row = self._free_rows.pop()
        self.row_of[sequence.seq_id] = row
        count = len(sequence.token_ids)
        self.tokens[row, :count] = sequence.token_ids
        self.num_tokens[row] = count
        self.num_computed[row] = sequence.num_computed_tokens
        self.num_blocks[:, row] = 0
        self._append_blocks(row, sequence.block_ids)
        self.num_encoder_states[row] = sequence.num_encoder_states
        split = self.num_prompt[row] = sequence.num_prompt_tokens
        vectors = [entry for entry in sequence.encoder_inputs if not entry.key]
        if encoded := [entry for entry in sequence.encoder_inputs if entry.key]:
            self.encoder_inputs[row] = encoded
            if encoded[0].grid:
                planes = plane_positions(sequence.num_prompt_tokens, encoded)
                self.plane_positions[row] = planes
                self.rope_offsets[row] = planes.max() + 1 - len(planes)
        self.adapters.set(row, sequence.adapter)
        self.sampling[row] = RequestSamplingState(
            params=self._sampling_params(sequence),
            # Ids at the positions of vectors are placeholders.
            prompt_token_ids=() if vectors else sequence.token_ids[:split],
            output_token_ids=sequence.token_ids[split:],
            seed=sequence.seed,
            vocab_size=self.adapters.vocab_size(row),
        )
        if vectors:
            self.prompt_embeds[row] = [
                (vector.start, self._attachments.get(vector.handle)) for vector in vectors
            ]
        self.appends_sampled[row] = not sequence.sampling.use_beam_search
        if 0 <= sequence.prompt_logprobs_from < split:
            self.prompt_logprobs_next[row] = max(1, sequence.prompt_logprobs_from)

    def _sampling_params(self, sequence: NewSequence) -> SamplingParams:
        if sequence.logits_processors is None:
            return sequence.sampling
        functions = self._attachments.get(sequence.logits_processors)
        return msgspec.structs.replace(sequence.sampling, logits_processors=functions)

    def _append(self, seq_id: int, token_id: int) -> None:
        row = self.row_of.get(seq_id)
        if row is None:  # removed, or new in this plan with all of its tokens
            return
        self.tokens[row, self.num_tokens[row]] = token_id
        self.num_tokens[row] += 1
        self.state(row).output_token_ids.append(token_id)

    def _append_blocks(self, row: int, block_ids: list[list[int]]) -> None:
        for table, counts, ids in zip(self.block_tables, self.num_blocks, block_ids, strict=True):
            start, end = counts[row], counts[row] + len(ids)
            table[row, start:end] = ids
            counts[row] = end

    def prepare_inputs(self, plan: StepPlan) -> StepInputs:
        """The step's tensors; advances the counts to the end of the step."""
        rows = np.fromiter((self.row_of[i] for i in plan.seq_ids), np.int64, len(plan.seq_ids))
        counts = np.asarray(plan.num_scheduled, dtype=np.int64)
        order = np.arange(len(counts))
        if self.decodes_first:
            order = np.argsort(~is_decode(counts), kind="stable")
        rows, counts = rows[order], counts[order]
        starts = self.num_computed[rows]
        ends = starts + counts
        query_start = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        # Token i of the step belongs to row `owner[i]`, at `positions[i]` of its sequence.
        owner = np.repeat(rows, counts)
        offset = np.arange(query_start[-1]) - np.repeat(query_start[:-1], counts)
        positions = np.repeat(starts, counts) + offset
        samples = np.asarray(plan.num_samples)[order]
        caught_up = np.flatnonzero(samples)
        prompt_rows, extra = self._prompt_rows(order, rows, starts, ends, query_start)
        first = query_start[1:][caught_up].astype(np.int64) - samples[caught_up]
        drafted, draft_tokens = write_drafts(self, plan, order[caught_up], rows[caught_up], first)
        logits_rows = np.concatenate((first, *draft_tokens, *extra))
        # Common decode steps need the logits of all tokens in order, without selection.
        selects = len(logits_rows) != len(positions) or bool(draft_tokens or extra)
        tables = [
            self._tables(group, rows, owner, positions, int(ends.max()))
            for group, described in enumerate(self.groups)
            if described.kind not in ("cross", "state")
        ]
        rotations, planes = positions, None
        if self.plane_positions:
            rotations, planes = self._rotations(rows, starts, ends, query_start, owner, positions)
        context = AttentionMetadata(
            positions=torch.from_numpy(rotations),
            plane_positions=planes,
            slot_mapping=tables[0][0],
            block_tables=tables[0][1],
            seq_lens=torch.from_numpy(ends.astype(np.int32)),
            query_start_loc=torch.from_numpy(query_start),
            logits_rows=torch.from_numpy(logits_rows) if selects else None,
            sequence_rows=torch.from_numpy(rows),
        )
        if self.encoder_inputs:
            context.visible_ends = self._visible_ends(rows, starts, ends, query_start, positions)
        num_decodes = int(is_decode(counts).sum()) if self.decodes_first else 0
        if 0 < num_decodes < len(counts):
            context.num_decodes = num_decodes
            prefill_start = query_start[num_decodes:] - query_start[num_decodes]
            context.prefill_start_loc = torch.from_numpy(prefill_start)
        context.adapters = self.adapters.for_tokens(owner)
        context.other_groups = tuple(
            dataclasses.replace(context, slot_mapping=slots, block_tables=blocks)
            for slots, blocks in tables[1:]
        )
        context.other_groups += tuple(
            self._cross_group(context, group, owner)
            for group, described in enumerate(self.groups)
            if described.kind == "cross"
        )
        if self.has_states:
            context.states = self._state_step(plan, order, rows, starts, query_start)
        if self.prompt_embeds:
            context.embeds = self._embeds(rows, starts, ends, query_start)
        encoder_ranges: list[EncoderRange] = []
        if self.encoder_inputs:
            encoder_ranges = self._encoder_ranges(rows, starts, ends, query_start)
        self.num_computed[rows] = ends
        growing = rows[caught_up]
        states = [self.state(row) for row in growing.tolist()]
        for drafted_row in drafted:
            states += self.state(drafted_row.row).with_drafts(drafted_row.drafts)
        return StepInputs(
            token_index=(owner, positions),
            context=context,
            sampled=order[caught_up].tolist(),
            states=states,
            target_index=self.target_index(growing),
            prompt_logprob_rows=prompt_rows,
            drafted=drafted,
            encode=[(task, self._attachments.get(task.handle)) for task in plan.encode],
            encoder_ranges=encoder_ranges,
        )

    def target_index(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where to write the next tokens of rows that have caught up; counts these tokens."""
        positions = self.num_tokens[rows]
        self.num_tokens[rows] += self.appends_sampled[rows]
        return rows, positions

    def state(self, row: int) -> RequestSamplingState:
        """The sampling state of the sequence in a row."""
        state = self.sampling[row]
        if state is None:
            raise RuntimeError(f"Row {row} holds no sequence.")
        return state

    def needs_only_last_token(self, row: int) -> bool:
        """Whether a decoding row needs no vector for its last token and no prompt logprobs."""
        computed = self.num_computed[row]
        return (
            row not in self.prompt_logprobs_next
            and not any(
                computed < start + len(vectors)
                for start, vectors in self.prompt_embeds.get(row, ())
            )
            and not any(
                computed < entry.start + entry.count for entry in self.encoder_inputs.get(row, ())
            )
        )

    def token_ids(self, inputs: StepInputs) -> torch.Tensor:
        """The step's token ids, int64 [num_tokens]; the previous step must have run."""
        return torch.from_numpy(self.tokens[inputs.token_index].astype(np.int64))

    def append_sampled(self, inputs: SampledRows, token_ids: list[int]) -> None:
        """Write the sampled tokens, one per entry of `inputs.sampled`; -1: none."""
        rows, positions = inputs.target_index
        states = inputs.states[: len(token_ids)]
        if min(token_ids) < 0:
            # The next step may be prepared and read these positions, so they must hold valid ids.
            valid = [index for index, token_id in enumerate(token_ids) if token_id >= 0]
            rows, positions = rows[valid], positions[valid]
        self.tokens[rows, positions] = [token_id for token_id in token_ids if token_id >= 0]
        for state, token_id in zip(states, token_ids, strict=True):
            if token_id >= 0:
                state.output_token_ids.append(token_id)

    def _tables(
        self, group: int, rows: np.ndarray, owner: np.ndarray, positions: np.ndarray, longest: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A KV cache group's slots of the step's tokens, and its block tables.

        The tables still list blocks that have left a sliding window; kernels don't read them.
        """
        table, size = self.block_tables[group], self.block_size
        blocks = table[owner, positions // size].astype(np.int64)
        slots = torch.from_numpy(blocks * size + positions % size)
        length = self.groups[group].table_length(longest, size)
        return slots, torch.from_numpy(table[rows, :length])

    def _cross_group(
        self, context: AttentionMetadata, group: int, owner: np.ndarray
    ) -> AttentionMetadata:
        """A cross-attention group, in which each token is a sequence of one query: causality among
        tokens doesn't apply to the encoder's states.
        """
        num_states = self.num_encoder_states[owner]
        width = -(-int(num_states.max(initial=0)) // self.block_size)
        return dataclasses.replace(
            context,
            other_groups=(),
            block_tables=torch.from_numpy(self.block_tables[group][owner, :width]),
            seq_lens=torch.from_numpy(num_states),
            query_start_loc=torch.arange(len(owner) + 1, dtype=torch.int32),
            num_decodes=0,
            prefill_start_loc=None,
        )

    def _state_step(
        self,
        plan: StepPlan,
        order: np.ndarray,
        rows: np.ndarray,
        starts: np.ndarray,
        query_start: np.ndarray,
    ) -> StateStep:
        """The blocks that hold the step's states."""
        saves = []
        if plan.checkpoints:
            index_of = {plan.seq_ids[entry]: index for index, entry in enumerate(order.tolist())}
            for seq_id, num_tokens, block in plan.checkpoints:
                index = index_of[seq_id]
                saves.append((int(query_start[index]) + num_tokens - int(starts[index]), block))
        return StateStep(
            blocks=torch.from_numpy(self.block_tables[-1][rows, 0].astype(np.int64)),
            copies=plan.block_copies,
            saves=torch.tensor(sorted(saves), dtype=torch.int64).view(-1, 2),
        )

    def _embeds(
        self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray, query_start: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`AttentionMetadata.embeds`: indices of the step's tokens that have vectors, and the
        vectors.
        """
        indices, values = [], []
        for index, row in enumerate(rows.tolist()):
            for start, vectors in self.prompt_embeds.get(row, ()):
                first = max(start, int(starts[index]))
                end = min(start + len(vectors), int(ends[index]))
                if first < end:
                    token = int(query_start[index]) + first - int(starts[index])
                    indices.append(torch.arange(token, token + end - first))
                    values.append(vectors[first - start : end - start])
        return (torch.cat(indices), torch.cat(values)) if indices else None

    def _rotations(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        query_start: np.ndarray,
        owner: np.ndarray,
        positions: np.ndarray,
    ) -> tuple[np.ndarray, torch.Tensor | None]:
        """`AttentionMetadata.positions` and `plane_positions` of a step that has rows with
        three-dimensional positions.
        """
        rotations = positions + self.rope_offsets[owner]
        planes: list[np.ndarray] = []
        next_row = self._max_model_len
        for index, row in enumerate(rows.tolist()):
            if (of_prompt := self.plane_positions.get(row)) is None:
                continue
            start, end = int(starts[index]), min(int(ends[index]), len(of_prompt))
            if start >= end:
                continue
            chunk = of_prompt[start:end]
            first = int(query_start[index])
            rotations[first : first + len(chunk)] = chunk[:, 0]  # text has three equal positions
            differing = np.flatnonzero((chunk != chunk[:, :1]).any(axis=1))
            rotations[first + differing] = next_row + np.arange(len(differing))
            next_row += len(differing)
            planes.append(chunk[differing])
        plane_positions = np.concatenate(planes) if planes else np.zeros((0, 3), dtype=np.int64)
        return rotations, torch.from_numpy(plane_positions) if len(plane_positions) else None

    def _visible_ends(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        query_start: np.ndarray,
        positions: np.ndarray,
    ) -> torch.Tensor | None:
        """`AttentionArgs.visible_ends` of a step; None if no token attends to a later one."""
        visible = None
        for index, row in enumerate(rows.tolist()):
            start, end = int(starts[index]), int(ends[index])
            for entry in self.encoder_inputs.get(row, ()):
                last = entry.start + entry.count
                if not entry.bidirectional or last <= start or entry.start >= end:
                    continue
                if visible is None:
                    visible = (positions + 1).astype(np.int32)
                first = int(query_start[index]) - start
                visible[first + max(entry.start, start) : first + last] = last
        return None if visible is None else torch.from_numpy(visible)

    def _encoder_ranges(
        self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray, query_start: np.ndarray
    ) -> list[EncoderRange]:
        """The step's tokens that stand for vectors of an encoder."""
        ranges = []
        for index, row in enumerate(rows.tolist()):
            for entry in self.encoder_inputs.get(row, ()):
                first = max(entry.start, int(starts[index]))
                count = min(entry.start + entry.count, int(ends[index])) - first
                if count > 0:
                    token = int(query_start[index]) + first - int(starts[index])
                    offset = entry.offset + first - entry.start
                    ranges.append(EncoderRange(token, token + count, entry.key, offset))
        return ranges

    def _prompt_rows(
        self,
        order: np.ndarray,
        rows: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        query_start: np.ndarray,
    ) -> tuple[list[PromptRow], list[np.ndarray]]:
        """The prompt positions to score, and the step's tokens that predict them."""
        prompt_rows: list[PromptRow] = []
        token_indices: list[np.ndarray] = []
        if not self.prompt_logprobs_next:
            return prompt_rows, token_indices
        for index, row in enumerate(rows.tolist()):
            first = self.prompt_logprobs_next.get(row)
            state = self.sampling[row]
            if first is None or state is None:
                continue
            # The token at position p is predicted by the logits at p - 1.
            last = min(int(ends[index]), len(state.prompt_token_ids) - 1)
            count = last - first + 1
            if count > 0:
                token = int(query_start[index]) + first - 1 - int(starts[index])
                token_indices.append(np.arange(token, token + count))
                prompt_rows.append((int(order[index]), state, first, count))
                self.prompt_logprobs_next[row] = last + 1
            if last + 1 >= len(state.prompt_token_ids):  # all are scored
                del self.prompt_logprobs_next[row]
        return prompt_rows, token_indices
