"""Rows whose drafts a step checks: where what belongs to them stands, and what they get."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from engine.sampling.sampler import SamplerOutput
from engine.sampling.token_bitmask import TokenBitmask
from engine.scheduler.plan import StepPlan, StepResult
from engine.worker.input_batch import InputBatch
from engine.worker.interface import BitmaskInbox
from engine.worker.step_inputs import DraftedRow, SampledRows


def _settle(batch: InputBatch, drafted: DraftedRow, token_ids: list[int]) -> None:
    """A row has got these tokens: its own, which `InputBatch.append_sampled` took over, and one
    behind each
    draft that held.
    """
    row, more = drafted.row, token_ids[1:]
    known = batch.num_tokens[row]
    batch.tokens[row, known : known + len(more)] = more
    batch.num_tokens[row] += len(more)
    batch.num_computed[row] -= len(drafted.drafts) - len(more)
    batch.state(row).output_token_ids += more


def draft_by_logits_row(sampled: SampledRows) -> dict[int, int]:
    """Row of the logits -> the draft that stands where its token goes."""
    found: dict[int, int] = {}
    if sampled.drafted:
        row_of = {index: row for row, index in enumerate(sampled.sampled)}
        for each in sampled.drafted:
            rows = [row_of[each.index], *range(each.first, each.first + len(each.drafts) - 1)]
            found |= zip(rows, each.drafts, strict=True)
    return found


def bitmask_rows_after_drafts(
    sampled: SampledRows, plan: StepPlan, masked: list[int], row_of: Mapping[int, int]
) -> list[tuple[int, int]]:
    """(row of the logits, row of the masks) behind drafts; `masked`: the sequence of each row of
    the masks, `row_of`: the first row of each sequence.
    """
    found = []
    for drafted in sampled.drafted:
        seq_id = plan.seq_ids[drafted.index]
        own = row_of.get(seq_id)
        if own is not None:
            behind = range(masked.count(seq_id) - 1)
            found += [(drafted.first + at, own + 1 + at) for at in behind]
    return found


def append_accepted(
    batch: InputBatch,
    sampled: SampledRows,
    drawn: list[int],
    output: SamplerOutput,
    result: StepResult,
) -> None:
    """Give rows with drafts, whose own tokens are in `result`, what they get beyond these; `drawn`:
    a token for each row of the logits.
    """
    for drafted in sampled.drafted:
        token_ids = result.token_ids[drafted.index]
        token_ids += accepted_after(drafted.drafts, token_ids, drawn[drafted.first :])
        _settle(batch, drafted, token_ids)
        scored = result.logprobs and result.logprobs[drafted.index]
        if scored:
            more = output.logprobs[drafted.first : drafted.first + len(token_ids) - 1]
            scored += [each for each in more if each is not None]


def accepted_after(drafts: list[int], sampled: list[int], behind: list[int]) -> list[int]:
    """The tokens that a row gets beyond its own.

    Args:
        drafts: in order.
        sampled: the row's own token; nothing where none could be chosen.
        behind: what the target draws behind each draft; negative where nothing can be chosen.

    Those behind the drafts that held: a draft holds if it is what was drawn in its place.
    """
    found: list[int] = []
    for drawn, draft, token_id in zip([*sampled, *behind], drafts, behind, strict=False):
        if not sampled or drawn != draft or token_id < 0:
            break
        found.append(token_id)
    return found


# -- Between a step and the sampler: grammar masks go in, tokens and scores come out.


def bitmask_rows(plan: StepPlan, sampled: SampledRows, masks: BitmaskInbox) -> TokenBitmask | None:
    """The step's grammar masks, in the order of the logits; waits until they are there."""
    if not plan.awaits_bitmask:
        return None
    output = masks.wait(plan.step)
    if not output.seq_ids:
        return None
    row_of: dict[int, int] = {}
    for at, seq_id in enumerate(output.seq_ids):
        row_of.setdefault(seq_id, at)
    seq_ids = [plan.seq_ids[index] for index in sampled.sampled]
    places = [(row, row_of[seq]) for row, seq in enumerate(seq_ids) if seq in row_of]
    places += bitmask_rows_after_drafts(sampled, plan, output.seq_ids, row_of)
    bits = np.frombuffer(output.bits, dtype="<i4").reshape(len(output.seq_ids), -1)
    only_eos = set(output.eos_only_sequences)
    return TokenBitmask(
        rows=[row for row, _ in places],
        bits=bits[[at for _, at in places]],
        eos_only=[n for n, (_, at) in enumerate(places) if at in only_eos],
    )


def collect_outputs(
    batch: InputBatch,
    plan: StepPlan,
    sampled: SampledRows,
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
    batch.append_sampled(sampled, token_ids)
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
    append_accepted(batch, sampled, drawn, output, result)
