"""Input and output of sampling: grammar bitmasks, tokens, drafts and log probabilities."""

from __future__ import annotations

import numpy as np

from engine.sampling.sampler import SamplerOutput
from engine.sampling.token_bitmask import TokenBitmask
from engine.scheduler.plan import StepPlan, StepResult
from engine.worker.input_batch import InputBatch
from engine.worker.interface import BitmaskInbox
from engine.worker.step_inputs import SampledRows


def draft_by_logits_row(sampled: SampledRows) -> dict[int, int]:
    """Row of the logits -> the draft that is verified against the token of that row."""
    drafts: dict[int, int] = {}
    if sampled.drafted:
        row_of = {index: row for row, index in enumerate(sampled.sampled)}
        for drafted in sampled.drafted:
            following = range(drafted.first, drafted.first + len(drafted.drafts) - 1)
            drafts |= zip([row_of[drafted.index], *following], drafted.drafts, strict=True)
    return drafts


def bitmask_rows(plan: StepPlan, sampled: SampledRows, masks: BitmaskInbox) -> TokenBitmask | None:
    """The step's grammar bitmasks in the order of the logits; waits for them."""
    if not plan.awaits_bitmask:
        return None
    output = masks.wait(plan.step)
    if not output.seq_ids:
        return None
    first_row: dict[int, int] = {}
    for mask_row, seq_id in enumerate(output.seq_ids):
        first_row.setdefault(seq_id, mask_row)
    #: (row of the logits, row of the bitmasks)
    pairs = [
        (row, first_row[plan.seq_ids[index]])
        for row, index in enumerate(sampled.sampled)
        if plan.seq_ids[index] in first_row
    ]
    for drafted in sampled.drafted:
        seq_id = plan.seq_ids[drafted.index]
        if seq_id in first_row:
            pairs += [
                (drafted.first + offset, first_row[seq_id] + 1 + offset)
                for offset in range(output.seq_ids.count(seq_id) - 1)
            ]
    bits = np.frombuffer(output.bits, dtype="<i4").reshape(len(output.seq_ids), -1)
    eos_only = set(output.eos_only_sequences)
    return TokenBitmask(
        rows=[row for row, _ in pairs],
        bits=bits[[mask_row for _, mask_row in pairs]],
        eos_only=[n for n, (_, mask_row) in enumerate(pairs) if mask_row in eos_only],
    )


def collect_outputs(
    batch: InputBatch,
    plan: StepPlan,
    sampled: SampledRows,
    output: SamplerOutput,
    result: StepResult,
) -> None:
    """Write the sampled tokens to the batch and to the step's result."""
    seq_ids = [plan.seq_ids[index] for index in sampled.sampled]
    token_by_logits_row = output.token_ids.tolist()
    token_ids = token_by_logits_row[: len(seq_ids)]
    for row, candidates in output.candidates.items():
        token_ids[row] = -1
        result.candidates[seq_ids[row]] = candidates
    batch.append_sampled(sampled, token_ids)
    for index, token_id in zip(sampled.sampled, token_ids, strict=True):
        if token_id >= 0:
            result.token_ids[index].append(token_id)
    # An error after a draft recurs once its row is sampled without drafts.
    result.errors.update(
        {seq_ids[row]: error for row, error in output.errors.items() if row < len(seq_ids)}
    )
    if any(output.logprobs):
        if result.logprobs is None:
            result.logprobs = [None] * len(plan.seq_ids)
        for index, scores in zip(sampled.sampled, output.logprobs, strict=False):
            result.logprobs[index] = None if scores is None else [scores]
    append_accepted(batch, sampled, token_by_logits_row, output, result)


def append_accepted(
    batch: InputBatch,
    sampled: SampledRows,
    token_by_logits_row: list[int],
    output: SamplerOutput,
    result: StepResult,
) -> None:
    """Add the tokens after accepted drafts to rows whose first tokens are in `result`."""
    # A sequence that was aborted while the step ran has left its row.
    states = dict(zip(sampled.sampled, sampled.states, strict=False)) if sampled.drafted else {}
    for drafted in sampled.drafted:
        token_ids = result.token_ids[drafted.index]
        accepted = accepted_after(drafted.drafts, token_ids, token_by_logits_row[drafted.first :])
        token_ids += accepted
        # `InputBatch.append_sampled` has written the row's first token.
        row, start = drafted.row, batch.num_tokens[drafted.row]
        batch.tokens[row, start : start + len(accepted)] = accepted
        batch.num_tokens[row] += len(accepted)
        batch.num_computed[row] -= len(drafted.drafts) - len(accepted)
        states[drafted.index].output_token_ids += accepted
        scores = result.logprobs and result.logprobs[drafted.index]
        if scores:
            following = output.logprobs[drafted.first : drafted.first + len(accepted)]
            scores += [score for score in following if score is not None]


def accepted_after(drafts: list[int], sampled: list[int], following: list[int]) -> list[int]:
    """The tokens that a row gets after its first one.

    A draft is accepted if the target sampled it, and adds the token that the target sampled after
    it.

    Args:
        drafts: in order.
        sampled: the row's first token; [] if none could be sampled.
        following: the token that the target samples after each draft; negative if it can't.
    """
    accepted: list[int] = []
    for drawn, draft, token_id in zip([*sampled, *following], drafts, following, strict=False):
        if not sampled or drawn != draft or token_id < 0:
            break
        accepted.append(token_id)
    return accepted
