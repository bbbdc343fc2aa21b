"""Rows whose drafts a step checks: where what belongs to them stands, and what they get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.sampling.sampler import SamplerOutput
from engine.scheduler.plan import StepPlan, StepResult

if TYPE_CHECKING:
    from engine.worker.batch import RunningBatch, Sampled


@dataclass(slots=True, frozen=True)
class Drafted:
    """A row whose drafts the step checks.

    Attributes:
        index: of its sequence in the plan.
        row: in the batch.
        drafts: in order.
        first: where the logits behind its first draft stand; those behind the others follow.
    """

    index: int
    row: int
    drafts: list[int]
    first: int


def put_drafts(
    batch: RunningBatch, plan: StepPlan, order: np.ndarray, rows: np.ndarray, first: np.ndarray
) -> tuple[list[Drafted], list[np.ndarray]]:
    """The rows with drafts, which are put behind their tokens; and which of the step's tokens the
    drafts are.

    `order`, `rows`, `first`: of the rows that sample, where in the plan and in the batch they are,
    and which of the step's tokens is their first to sample behind.
    """
    found: list[Drafted] = []
    tokens: list[np.ndarray] = []
    if not plan.drafts:
        return found, tokens
    place = len(rows)
    for index, row, at in zip(order.tolist(), rows.tolist(), first.tolist(), strict=True):
        drafts = plan.drafts.get(plan.seq_ids[index])
        if not drafts:
            continue
        known = batch.num_tokens[row]
        batch.tokens[row, known : known + len(drafts)] = drafts
        tokens.append(np.arange(at + 1, at + 1 + len(drafts)))
        found.append(Drafted(index, row, drafts, place))
        place += len(drafts)
    return found, tokens


def _settle(batch: RunningBatch, drafted: Drafted, token_ids: list[int]) -> None:
    """A row has got these tokens: its own, which `RunningBatch.take` took over, and one behind each
    draft that held.
    """
    row, more = drafted.row, token_ids[1:]
    known = batch.num_tokens[row]
    batch.tokens[row, known : known + len(more)] = more
    batch.num_tokens[row] += len(more)
    batch.num_computed[row] -= len(drafted.drafts) - len(more)
    batch.state(row).output_token_ids += more


def drafts_in_place(sampled: Sampled) -> dict[int, int]:
    """Row of the logits -> the draft that stands where its token goes."""
    found: dict[int, int] = {}
    if sampled.drafted:
        row_of = {index: row for row, index in enumerate(sampled.sampled)}
        for each in sampled.drafted:
            rows = [row_of[each.index], *range(each.first, each.first + len(each.drafts) - 1)]
            found |= zip(rows, each.drafts, strict=True)
    return found


def masks_behind(
    sampled: Sampled, plan: StepPlan, masked: list[int], row_of: Mapping[int, int]
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


def settle_drafted(
    batch: RunningBatch,
    sampled: Sampled,
    drawn: list[int],
    output: SamplerOutput,
    result: StepResult,
) -> None:
    """Give rows with drafts, whose own tokens are in `result`, what they get beyond these; `drawn`:
    a token for each row of the logits.
    """
    for drafted in sampled.drafted:
        token_ids = result.token_ids[drafted.index]
        token_ids += behind_drafts(drafted.drafts, token_ids, drawn[drafted.first :])
        _settle(batch, drafted, token_ids)
        scored = result.logprobs and result.logprobs[drafted.index]
        if scored:
            more = output.logprobs[drafted.first : drafted.first + len(token_ids) - 1]
            scored += [each for each in more if each is not None]


def behind_drafts(drafts: list[int], sampled: list[int], behind: list[int]) -> list[int]:
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
