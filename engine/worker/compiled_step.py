"""Decode steps that the kernels run in one call, from the batch's tables."""

from __future__ import annotations

import numpy as np
import torch

from engine.contract.messages import TokenLogprobs
from engine.contract.sampling_params import SamplingParams
from engine.sampling.request_state import RequestSamplingState
from engine.sampling.sampler import NON_FINITE_LOGITS, Sampler
from engine.scheduler.plan import StepPlan, StepResult
from engine.worker.hidden_states import HiddenStateStore
from engine.worker.input_batch import InputBatch
from engine.worker.interface import BitmaskInbox
from engine.worker.sampling_io import bitmask_rows, collect_outputs, draft_by_logits_row
from engine.worker.step_inputs import DraftedRow, SampledRows
from kernels.compiled_decoder import BatchTables, BoundStep, CompiledStep, StepLogprobs

#: Logits per step at most: larger steps gain less, and the buffer stays in memory.
MAX_LOGITS = 1 << 23


def tables_of(batch: InputBatch) -> BatchTables:
    """The batch's arrays, as tensors on the same memory."""
    return BatchTables(
        torch.from_numpy(batch.tokens),
        [torch.from_numpy(table) for table in batch.block_tables],
        torch.from_numpy(batch.num_prompt),
        torch.from_numpy(batch.num_tokens),
        torch.from_numpy(batch.num_computed),
    )


class CompiledStepRunner:
    """Runs the steps that need nothing but the kernels.

    The call samples the tokens of all rows that it can, and returns the logits of the others for
    the sampler. It is bound to a set of sequences and used for as long as the same ones decode.

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
        """`masks`: bitmasks of grammars. `hidden`: the store of hidden states and the width of the
        states that `step` returns; None: no states are saved.
        """
        self._step = step
        self._batch = batch
        self._masks = masks
        self._hidden, self.keeps = hidden, False
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._max_rows = MAX_LOGITS // vocab_size
        #: What the call is bound to: the sequences of the previous step.
        self._seq_ids: list[int] = []
        self._single_token_counts: list[int] = []
        self._masked = False
        self._kernel_sampled: list[int] = []
        self._states: list[RequestSamplingState] = []
        self._sampled: list[int] = []
        self._sampled_states: list[RequestSamplingState] = []
        self._sampled_rows = np.zeros(0, dtype=np.int64)
        self._rows: list[int] = []
        self._logits = torch.empty(0)
        self._run: BoundStep | None = None

    def run(self, plan: StepPlan) -> StepResult | None:
        """The step's result, or None for a step that the call can't run. The batch must have the
        plan's changes.
        """
        rewound = plan.rewound and self._sampled
        changed = plan.new or plan.appended or rewound or plan.seq_ids != self._seq_ids
        if changed or plan.awaits_bitmask != self._masked:
            self._bind(plan)
        if self._run is None:
            return None
        if plan.num_scheduled != self._single_token_counts:
            return self._verify_drafts(plan, self._run)
        result = StepResult.empty(len(plan.seq_ids))
        hidden = self._hidden_buffer(len(plan.seq_ids))
        token_ids = self._run(hidden)
        for index, state, token_id in zip(
            self._kernel_sampled, self._states, token_ids, strict=True
        ):
            if token_id >= 0:
                result.token_ids[index].append(token_id)
                state.output_token_ids.append(token_id)
            else:
                result.errors[plan.seq_ids[index]] = NON_FINITE_LOGITS
        if self._run.scores is not None:
            self._score(self._run.scores, [0] * len(self._kernel_sampled), result)
        if self._sampled:
            sampled = SampledRows(
                sampled=self._sampled,
                states=self._sampled_states,
                target_index=self._batch.target_index(self._sampled_rows),
            )
            self._sample(plan, sampled, self._logits, result)
        self._save_hidden(plan, [0] * len(plan.seq_ids), hidden, result)
        return result

    def _verify_drafts(self, plan: StepPlan, run: BoundStep) -> StepResult | None:
        """Run a step with drafts; None where a row has prompt tokens left or it is too large."""
        if plan.num_decodes < len(plan.seq_ids) or plan.num_tokens > self._max_rows:
            return None
        result = StepResult.empty(len(plan.seq_ids))
        order = self._kernel_sampled + self._sampled
        drafts = [plan.drafts.get(plan.seq_ids[index], []) for index in order]
        batch = self._batch
        for row, row_drafts in zip(self._rows, drafts, strict=True):
            if row_drafts:
                start = batch.num_tokens[row]
                batch.tokens[row, start : start + len(row_drafts)] = row_drafts
        counts = [len(row_drafts) for row_drafts in drafts]
        num_chosen = len(self._kernel_sampled)
        num_logits = sum(counts[num_chosen:]) + len(self._sampled)
        logits = torch.empty((num_logits, self._vocab_size)) if num_logits else None
        hidden = self._hidden_buffer(sum(counts) + len(counts))
        accepted = run.verify(counts, logits, hidden)
        for index, state, token_ids in zip(
            self._kernel_sampled, self._states, accepted, strict=True
        ):
            if token_ids:
                result.token_ids[index] = token_ids
                state.output_token_ids += token_ids
            else:
                result.errors[plan.seq_ids[index]] = NON_FINITE_LOGITS
        if run.scores is not None:
            self._score(run.scores, counts, result)
        if logits is not None:
            sampled, logits_rows = self._drafted(drafts[num_chosen:])
            self._sample(plan, sampled, logits[logits_rows], result)
        self._save_hidden(plan, counts, hidden, result)
        return result

    def _hidden_buffer(self, tokens: int) -> torch.Tensor | None:
        """A buffer for the hidden states of so many tokens, if they are to be saved."""
        if self._hidden is None or not self.keeps:
            return None
        return torch.empty((tokens, self._hidden[1]))

    def _save_hidden(
        self, plan: StepPlan, drafts: list[int], hidden: torch.Tensor | None, result: StepResult
    ) -> None:
        """Save the hidden states of the newest tokens; `drafts`: number of each row's drafts."""
        if self._hidden is not None and hidden is not None:
            order = self._kernel_sampled + self._sampled
            self._hidden[0].save_rows(plan, order, drafts, hidden, result)

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

    def _drafted(self, drafts: list[list[int]]) -> tuple[SampledRows, list[int]]:
        """The rows to sample from the logits of rows with `drafts`, and the order of these logits:
        the first of each row, then those after drafts.
        """
        first_rows: list[int] = []
        draft_rows: list[int] = []
        states, drafted = list(self._sampled_states), []
        end, first = 0, len(drafts)
        for index, row, state, tokens in zip(
            self._sampled, self._sampled_rows.tolist(), self._sampled_states, drafts, strict=True
        ):
            first_rows.append(end)
            end += 1 + len(tokens)
            if tokens:
                draft_rows += range(end - len(tokens), end)
                states += state.with_drafts(tokens)
                drafted.append(DraftedRow(index, row, tokens, first))
                first += len(tokens)
        sampled = SampledRows(
            sampled=self._sampled,
            states=states,
            target_index=self._batch.target_index(self._sampled_rows),
            drafted=drafted,
        )
        return sampled, first_rows + draft_rows

    def _sample(
        self, plan: StepPlan, sampled: SampledRows, logits: torch.Tensor, result: StepResult
    ) -> None:
        """Sample from the logits that the call returned."""
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
        plain = [
            self._sampler.is_plain(state) and not (self._masked and may_be_masked(state.params))
            for state in states
        ]
        self._kernel_sampled = [index for index in range(count) if plain[index]]
        self._sampled = [index for index in range(count) if not plain[index]]
        order = rows[self._kernel_sampled + self._sampled]
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
