"""Steps in which every sequence decodes, run by the kernels from the batch's tables."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.sampling.sampler import NOT_FINITE, Sampler
from engine.sampling.state import SequenceSampling
from engine.scheduler.plan import StepPlan, StepResult
from engine.worker.batch import RunningBatch
from kernels.steps import CompiledStep, StepTables

#: Logits that a step may make; a larger one has less to gain, and they stay in memory.
MOST_LOGITS = 1 << 23


def tables_of(batch: RunningBatch) -> StepTables:
    """The batch's arrays, as tensors on the same memory."""
    return StepTables(
        torch.from_numpy(batch.tokens),
        torch.from_numpy(batch.block_tables),
        torch.from_numpy(batch.num_prompt),
        torch.from_numpy(batch.num_tokens),
        torch.from_numpy(batch.num_computed),
    )


class DecodeSteps:
    """Runs the steps that need nothing but the kernels.

    What a step must look at is found out when other sequences come together, and kept for as long
    as the same ones decode.
    """

    def __init__(
        self, step: CompiledStep, batch: RunningBatch, sampler: Sampler, vocab_size: int
    ) -> None:
        self._step = step
        self._batch = batch
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._most = MOST_LOGITS // vocab_size
        #: Of the step before, if that was one of these.
        self._seq_ids: list[int] = []
        self._ones: list[int] = []
        self._states: list[SequenceSampling] = []
        self._run: Callable[[], list[int]] | None = None

    def run(self, plan: StepPlan) -> StepResult | None:
        """The step's result; None when it must be run as any other. The batch has the plan's
        changes.
        """
        fresh = plan.new or plan.appended or plan.seq_ids != self._seq_ids
        if fresh or plan.mask is not None or plan.num_scheduled != self._ones:
            self._look(plan)
        if self._run is None:
            return None
        token_ids = self._run()
        result = StepResult(token_ids)
        for at, (state, token_id) in enumerate(zip(self._states, token_ids, strict=True)):
            if token_id >= 0:
                state.output_token_ids.append(token_id)
            else:
                result.errors[plan.seq_ids[at]] = NOT_FINITE
        return result

    def _look(self, plan: StepPlan) -> None:
        """Find out whether the step is one of these, and prepare those that follow."""
        self._seq_ids, self._run = [], None
        count = len(plan.seq_ids)
        if plan.mask is not None or not 0 < count <= self._most or max(plan.num_scheduled) > 1:
            return
        batch = self._batch
        rows = [batch.row_of[seq_id] for seq_id in plan.seq_ids]
        caught_up = (batch.num_computed[rows] + 1 == batch.num_tokens[rows]).all()
        if not caught_up or batch.embeds or batch.prompt_logprobs_next:
            return
        self._states = [batch.state(row) for row in rows]
        plain, choice = self._sampler.plain_choice(self._states, self._vocab_size)
        if plain:
            self._run = self._step.over(torch.tensor(rows), choice)
            self._seq_ids, self._ones = list(plan.seq_ids), [1] * count
