"""Between a step and the sampler: grammar masks go in, tokens and scores come out."""

from __future__ import annotations

import numpy as np

from engine.sampling.sampler import SamplerOutput
from engine.sampling.token_mask import MaskedRows
from engine.scheduler.plan import StepPlan, StepResult
from engine.worker.batch import RunningBatch, Sampled
from engine.worker.drafted import masks_behind, settle_drafted
from engine.worker.grammar_inbox import GrammarInbox


def masked_rows(plan: StepPlan, sampled: Sampled, masks: GrammarInbox) -> MaskedRows | None:
    """The step's grammar masks, in the order of the logits; waits until they are there."""
    if not plan.awaits_masks:
        return None
    output = masks.take(plan.step)
    if not output.seq_ids:
        return None
    row_of: dict[int, int] = {}
    for at, seq_id in enumerate(output.seq_ids):
        row_of.setdefault(seq_id, at)
    seq_ids = [plan.seq_ids[index] for index in sampled.sampled]
    places = [(row, row_of[seq]) for row, seq in enumerate(seq_ids) if seq in row_of]
    places += masks_behind(sampled, plan, output.seq_ids, row_of)
    bits = np.frombuffer(output.bits, dtype="<i4").reshape(len(output.seq_ids), -1)
    only_eos = set(output.only_eos)
    return MaskedRows(
        rows=[row for row, _ in places],
        bits=bits[[at for _, at in places]],
        forced=[n for n, (_, at) in enumerate(places) if at in only_eos],
    )


def collect(
    batch: RunningBatch,
    plan: StepPlan,
    sampled: Sampled,
    output: SamplerOutput,
    result: StepResult,
) -> None:
    """Take over what was sampled, into the batch and into the step's result."""
    seq_ids = [plan.seq_ids[index] for index in sampled.sampled]
    drawn = output.token_ids.tolist()
    token_ids = drawn[: len(seq_ids)]
    for at, candidates in output.candidates.items():
        token_ids[at] = -1
        result.candidates[seq_ids[at]] = candidates
    batch.take(sampled, token_ids)
    for index, token_id in zip(sampled.sampled, token_ids, strict=True):
        if token_id >= 0:
            result.token_ids[index].append(token_id)
    # What goes wrong behind a draft goes wrong again once its row comes there.
    errors = {seq_ids[at]: why for at, why in output.errors.items() if at < len(seq_ids)}
    result.errors.update(errors)
    if any(output.logprobs):
        if result.logprobs is None:
            result.logprobs = [None] * len(plan.seq_ids)
        for index, scores in zip(sampled.sampled, output.logprobs, strict=False):
            result.logprobs[index] = None if scores is None else [scores]
    settle_drafted(batch, sampled, drawn, output, result)
