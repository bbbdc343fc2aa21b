"""Decode steps that the kernels run in one call, directly on the batch's tables."""

from __future__ import annotations

import numpy as np
import torch

from engine.contract.messages import TokenLogprobs
from engine.contract.sampling_params import SamplingParams
from engine.sampling.request_state import RequestSamplingState
from engine.sampling.sampler import NON_FINITE_LOGITS, Sampler
from engine.scheduler.plan import StepPlan, StepResult
from engine.worker.hidden_states import HiddenStateStore
from engine.worker.input_batch import InputBatch, write_drafts
from engine.worker.interface import BitmaskInbox
from engine.worker.sampling_io import bitmask_rows, collect_outputs, draft_by_logits_row
from engine.worker.step_inputs import DraftedRow, SampledRows
from kernels.compiled_decoder import BatchTables, BoundStep, CompiledStep, StepLogprobs

#: Maximum number of logits per step: larger steps gain less, and the buffer stays in memory.
MAX_LOGITS = 1 << 23


def tables_of(batch: InputBatch) -> BatchTables:
    """The batch's arrays, as tensors that share their memory."""
    block_tables = [torch.from_numpy(table) for table in batch.block_tables]
    states = block_tables.pop() if batch.has_states else None
    return BatchTables(
        torch.from_numpy(batch.tokens),
        block_tables,
        torch.from_numpy(batch.num_prompt),
        torch.from_numpy(batch.num_tokens),
        torch.from_numpy(batch.num_computed),
        torch.from_numpy(batch.rope_offsets),
        state_blocks=states,
    )


class CompiledStepRunner:
    """Runs the steps that need nothing but the kernels.

    The call samples the tokens of as many rows as it can, and returns the logits of the others for
    the sampler. It is bound to a set of sequences, and reused while the same ones decode.

    Attributes:
        keeps: whether to save the hidden states of the next step.
    """

    def __init__(
        self,
        step: CompiledStep,
        batch: InputBatch,
        sampler: Sampler,
        vocab_size: int,
        masks: BitmaskInbox,
        hidden: tuple[HiddenStateStore, int] | None = None,
    ) -> None:
        """`masks`: grammar bitmasks. `hidden`: the store of hidden states and the width of the
        states states that `step` returns; None: no states are saved.
        """
        self._step = step
        self._batch = batch
        self._masks = masks
        self._hidden, self.keeps = hidden, False
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._max_rows = MAX_LOGITS // vocab_size
        #: The sequences of the previous step, to which the call is bound.
        self._seq_ids: list[int] = []
        self._single_token_counts: list[int] = []
        self._masked = False
        self._kernel_sampled: list[int] = []
        self._states: list[RequestSamplingState] = []
        self._sampled: list[int] = []
        self._sampled_states: list[RequestSamplingState] = []
        self._sampled_rows = np.zeros(0, dtype=np.int64)
        #: Plan indices of the rows in the call's order, and their rows of the batch.
        self._order: list[int] = []
        self._rows: list[int] = []
        self._logits = torch.empty(0)
        self._run: BoundStep | None = None

    def run(self, plan: StepPlan) -> StepResult | None:
        """The step's result, or None for a step that the call doesn't support. The plan's changes
        must have been applied to the batch.
        """
        rewound = plan.rewound and self._sampled
        changed = plan.new or plan.appended or rewound or plan.seq_ids != self._seq_ids
        if changed or plan.awaits_bitmask != self._masked:
            self._bind(plan)
        if self._run is None or plan.block_copies or plan.checkpoints:
            return None
        counts, logits, sampled_logits = None, None, self._logits
        drafted: list[DraftedRow] = []
        if plan.num_scheduled != self._single_token_counts:
            drafts_fit = plan.num_tokens <= self._max_rows and not self._batch.has_states
            if plan.num_decodes < len(plan.seq_ids) or not drafts_fit:
                return None
            counts = [len(plan.drafts.get(plan.seq_ids[index], ())) for index in self._order]
            drafted, logits_rows = self._write_drafts(plan, counts)
            if len(logits_rows):
                logits = torch.empty((len(logits_rows), self._vocab_size))
        result = StepResult.empty(len(plan.seq_ids))
        hidden = None
        if self._hidden is not None and self.keeps:
            hidden = torch.empty((plan.num_tokens, self._hidden[1]))
        accepted = self._run(counts, logits, hidden)
        for index, state, token_ids in zip(
            self._kernel_sampled, self._states, accepted, strict=True
        ):
            if token_ids:
                result.token_ids[index] = token_ids
                state.output_token_ids += token_ids
            else:
                result.errors[plan.seq_ids[index]] = NON_FINITE_LOGITS
        counts = counts or [0] * len(self._order)
        if self._run.scores is not None:
            self._score(self._run.scores, counts, result)
        if self._sampled:
            states = list(self._sampled_states)
            for row in drafted:
                states += self._batch.state(row.row).with_drafts(row.drafts)
            sampled = SampledRows(
                sampled=self._sampled,
                states=states,
                target_index=self._batch.target_index(self._sampled_rows),
                drafted=drafted,
            )
            if logits is not None:
                sampled_logits = logits[torch.from_numpy(logits_rows)]
            self._sample(plan, sampled, sampled_logits, result)
        if self._hidden is not None and hidden is not None:
            self._hidden[0].save_rows(plan, self._order, counts, hidden, result)
        return result

    def _write_drafts(
        self, plan: StepPlan, counts: list[int]
    ) -> tuple[list[DraftedRow], np.ndarray]:
        """Write drafts to the batch. Returns those of rows that the kernels don't sample, and the
        order of these rows' logits for the sampler: of each row's first token, then of those after
        drafts.
        """
        num_chosen = len(self._kernel_sampled)
        order, rows = np.array(self._order), np.array(self._rows)
        first = np.cumsum([0, *(1 + count for count in counts)])[:-1]
        write_drafts(self._batch, plan, order[:num_chosen], rows[:num_chosen], first[:num_chosen])
        first = first[num_chosen:] - (first[num_chosen] if num_chosen < len(first) else 0)
        drafted, draft_rows = write_drafts(
            self._batch, plan, order[num_chosen:], rows[num_chosen:], first
        )
        return drafted, np.concatenate((first, *draft_rows))

    def _score(self, scores: StepLogprobs, drafts: list[int], result: StepResult) -> None:
        """Copy the log probabilities of the tokens that the call sampled."""
        logprobs: list[list[TokenLogprobs] | None] = [None] * len(result.token_ids)
        start = 0
        for index, state, count in zip(self._kernel_sampled, self._states, drafts, strict=False):
            num_logprobs, num_tokens = state.params.logprobs, len(result.token_ids[index])
            if num_logprobs is not None and num_tokens:
                rows = slice(start, start + num_tokens)
                columns = slice(1 + min(num_logprobs, self._vocab_size))
                logprobs[index] = [
                    TokenLogprobs(*entry)
                    for entry in zip(
                        *(table[rows, columns].tolist() for table in scores), strict=True
                    )
                ]
            start += 1 + count
        if any(logprobs):
            result.logprobs = logprobs

    def _sample(
        self, plan: StepPlan, sampled: SampledRows, logits: torch.Tensor, result: StepResult
    ) -> None:
        mask = bitmask_rows(plan, sampled, self._masks)
        drafts = draft_by_logits_row(sampled)
        output = self._sampler.sample(logits, sampled.states, mask, drafts)
        collect_outputs(self._batch, plan, sampled, output, result)

    def _bind(self, plan: StepPlan) -> None:
        """Bind the call to the plan's sequences, if it can run their steps."""
        self._seq_ids, self._run = [], None
        count = len(plan.seq_ids)
        if not 0 < count <= self._max_rows or plan.num_decodes < count:
            return
        batch = self._batch
        rows = np.array([batch.row_of[seq_id] for seq_id in plan.seq_ids])
        if not all(plan.num_samples) or not all(map(batch.needs_only_last_token, rows.tolist())):
            return
        states = [batch.state(row) for row in rows.tolist()]
        self._masked = plan.awaits_bitmask
        uses_kernels = [
            self._sampler.can_use_kernels(state)
            and not (self._masked and may_be_masked(state.params))
            for state in states
        ]
        self._kernel_sampled = [index for index in range(count) if uses_kernels[index]]
        self._sampled = [index for index in range(count) if not uses_kernels[index]]
        self._order = self._kernel_sampled + self._sampled
        order = rows[self._order]
        tables = batch.adapters.for_compiled_step(order)
        if tables is None:
            return
        self._states = [states[index] for index in self._kernel_sampled]
        self._sampled_states = [states[index] for index in self._sampled]
        self._sampled_rows = rows[self._sampled]
        self._logits = torch.empty((len(self._sampled), self._vocab_size))
        choice = self._sampler.step_choice(self._states, self._vocab_size)
        self._rows = order.tolist()
        self._run = self._step.bind(
            torch.from_numpy(order),
            choice,
            self._logits if self._sampled else None,
            tables,
        )
        self._seq_ids, self._single_token_counts = list(plan.seq_ids), [1] * count


def may_be_masked(params: SamplingParams) -> bool:
    """Whether a grammar or a reasoning budget may forbid tokens."""
    has_budget = params.thinking is not None and params.thinking.budget is not None
    return has_budget or params.structured_outputs is not None
