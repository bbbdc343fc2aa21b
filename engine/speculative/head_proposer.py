"""`HeadProposer`: drafts from heads on the model's last hidden states."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from engine.scheduler import Sequence
from engine.speculative.head_tracking import HeadTracking
from engine.speculative.interface import HeadFacts, HeadPlan, HeadResult
from engine.speculative.step_times import StepTimes

log = logging.getLogger(__name__)

#: Drafting is disabled after this many consecutive failures.
_MAX_FAILURES = 3


class HeadProposer:
    """A `DraftProposer` without per-sequence state: the worker keeps the hidden states."""

    def __init__(self, facts: HeadFacts, run: Callable[[HeadPlan], HeadResult]) -> None:
        """`run`: draws drafts with the worker's heads."""
        self._facts = facts
        self._run = run
        self._failures = 0
        self.costs = StepTimes(is_draft=True)
        self.seconds = self.reading = 0.0
        self.following = HeadTracking(facts.cost_fraction) if facts.reads_tokens else None

    @property
    def is_healthy(self) -> bool:
        """See `DraftProposer`."""
        return self._failures < _MAX_FAILURES

    def propose(self, requests: list[tuple[Sequence, int]]) -> dict[int, list[int]]:
        """See `DraftProposer`."""
        if not requests:
            return {}
        started = time.perf_counter()
        plan = HeadPlan(
            [sequence.seq_id for sequence, _ in requests], [count for _, count in requests]
        )
        try:
            result = self._run(plan)
        except Exception:  # failing heads must not fail the model's step
            self._failures += 1
            log.exception("The heads failed; %d in a row", self._failures)
            return {}
        finally:
            self.seconds = time.perf_counter() - started
        self._failures, self.reading, drafts = 0, result.reading, result.drafts
        if self.following is not None:
            for seq_id in result.lost:
                self.following.remove(seq_id)
        if depth := max(map(len, drafts)):
            self.costs.record(len(requests), (self.seconds - self.reading) / depth)
        return {
            seq_id: tokens for seq_id, tokens in zip(plan.seq_ids, drafts, strict=True) if tokens
        }

    def supports(self, sequence: Sequence) -> bool:
        """See `DraftProposer`: heads need hidden states only, but tracking ones need token ids."""
        return not (self._facts.reads_tokens and sequence.request.encoder_inputs)

    def max_drafts(self, sequence: Sequence) -> int:
        """See `DraftProposer`."""
        facts = self._facts
        if not facts.max_model_len:
            return facts.max_drafts
        return min(facts.max_drafts, facts.max_model_len - sequence.num_tokens)

    def num_unread_tokens(self, sequence: Sequence) -> float:
        """See `DraftProposer`: 0, since heads read along with the model."""
        return 0.0

    def forget(self, sequence: Sequence) -> None:
        """See `DraftProposer`."""
        if self.following is not None:
            self.following.remove(sequence.seq_id)

    def reset(self, *, worker_too: bool = False) -> None:
        """Do nothing: there is no state."""

    def check_integrity(self) -> None:
        """Do nothing: there is no bookkeeping."""
