"""`ModelRunner`: one step on one device."""

from __future__ import annotations

import torch

from engine.models.decoder import NativeDecoder
from engine.protocol import TokenLogprobs
from engine.sampling.logprobs import prompt_logprobs
from engine.sampling.sampler import Sampler
from engine.sampling.token_mask import MaskedRows
from engine.scheduler.plan import StepPlan, StepResult
from engine.worker.batch import RunningBatch, StepInputs


class ModelRunner:
    """Holds the model, its KV cache and the running batch."""

    def __init__(self, model: NativeDecoder, batch: RunningBatch, sampler: Sampler) -> None:
        self.model = model
        self.batch = batch
        self.sampler = sampler

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step: forward, logits, sampling.

        The batch takes over the plan's changes even when the forward pass fails, so that the
        scheduler can take the step back by removing its sequences.
        """
        self.batch.apply(plan)
        if not plan.seq_ids:
            return StepResult([])
        inputs = self.batch.inputs(plan)
        hidden = self.model.forward(inputs.token_ids, inputs.context)
        result = StepResult([-1] * len(plan.seq_ids))
        if len(hidden) == 0:
            return result
        logits = self.model.logits(hidden)
        self._sample(plan, inputs, logits[: len(inputs.sampled)], result)
        self._score_prompts(plan, inputs, logits[len(inputs.sampled) :], result)
        return result

    def _sample(
        self, plan: StepPlan, inputs: StepInputs, logits: torch.Tensor, result: StepResult
    ) -> None:
        """Sample a token for each sequence that has caught up."""
        if not inputs.sampled:
            return
        batch = self.batch
        seq_ids = [plan.seq_ids[index] for index in inputs.sampled]
        states = [batch.sampling[batch.row_of[seq_id]] for seq_id in seq_ids]
        output = self.sampler.sample(
            logits, [state for state in states if state is not None], _masked_rows(plan, seq_ids)
        )
        token_ids = output.token_ids.tolist()
        if any(output.logprobs):
            result.logprobs = [None] * len(plan.seq_ids)
        for at, (index, seq_id) in enumerate(zip(inputs.sampled, seq_ids, strict=True)):
            if at in output.errors:
                result.errors[seq_id] = output.errors[at]
                continue
            result.token_ids[index] = token_ids[at]
            batch.append(seq_id, token_ids[at])
            if result.logprobs is not None:
                result.logprobs[index] = output.logprobs[at]

    def _score_prompts(
        self, plan: StepPlan, inputs: StepInputs, logits: torch.Tensor, result: StepResult
    ) -> None:
        """Log probabilities of prompt tokens that were asked for."""
        done = 0
        for index, first, count in inputs.prompt_rows:
            seq_id = plan.seq_ids[index]
            row = self.batch.row_of[seq_id]
            state = self.batch.sampling[row]
            if state is None:
                continue
            following = state.prompt_token_ids[first : first + count]
            wanted = state.params.prompt_logprobs or 0
            scores: list[TokenLogprobs] = prompt_logprobs(
                logits[done : done + count], torch.tensor(following), wanted
            )
            result.prompt_logprobs[seq_id] = scores
            done += count


def _masked_rows(plan: StepPlan, seq_ids: list[int]) -> MaskedRows | None:
    """The step's grammar masks, in the order of the logits; waits until they are there."""
    if plan.mask is None:
        return None
    mask = plan.mask.result()
    places = [(row, mask.row_of[seq]) for row, seq in enumerate(seq_ids) if seq in mask.row_of]
    only_eos = set(mask.only_eos)
    return MaskedRows(
        rows=[row for row, _ in places],
        bits=mask.bits[[at for _, at in places]],
        forced=[n for n, (_, at) in enumerate(places) if at in only_eos],
    )
