"""`DraftScheduler`: adds drafts to steps, and rolls back those that the model rejected."""

from __future__ import annotations

from typing import Protocol

from engine.kv_cache import KVCacheCoordinator
from engine.scheduler.plan import StepPlan, is_decode
from engine.scheduler.request import Sequence
from engine.scheduler.request_queue import RequestQueue
from engine.scheduler.running_queue import RunningQueue
from engine.scheduler.step_builder import StepBuilder


class DraftSource(Protocol):
    """Where drafts come from; `engine.speculative` implements it."""

    def untracked_sequences(self, plan: StepPlan, scheduled: list[Sequence], /) -> list[int]:
        """Ids of a step's sequences, still without drafts, that draft heads needn't track."""

    def propose(
        self, decodes: list[Sequence], max_drafts: int, num_prompt_tokens: int, /
    ) -> dict[int, list[int]]:
        """Drafts by sequence id, at most `max_drafts` in all, for the decodes of a step that also
        holds `num_prompt_tokens`.
        """

    def record_outcome(self, sequence: Sequence, num_drafts: int, num_accepted: int, /) -> None:
        """Record that the first `num_accepted` of a sequence's drafts were accepted."""


class DraftScheduler:
    """Gives drafts the budget and the blocks that a step's sequences leave.

    Attributes:
        source: None: no speculative decoding.
    """

    def __init__(self, kv: KVCacheCoordinator, waiting: RequestQueue, runs: RunningQueue) -> None:
        self._kv, self._waiting, self._runs = kv, waiting, runs
        self.source: DraftSource | None = None

    def add(self, step: StepBuilder, source: DraftSource) -> None:
        """Add drafts to a step, without preempting others."""
        plan = step.plan
        plan.untracked = source.untracked_sequences(plan, step.scheduled)
        if step.budget <= 0:
            return
        decodes = [
            sequence
            for sequence, count in zip(step.scheduled, plan.num_scheduled, strict=True)
            if is_decode(count) and len(sequence.token_ids) > sequence.num_prompt_tokens
        ]
        num_prompt_tokens = plan.num_tokens - len(decodes)
        drafts_by_id = source.propose(decodes, step.budget, num_prompt_tokens)
        if not drafts_by_id:
            return
        for row, sequence in enumerate(step.scheduled):
            if not (drafts := drafts_by_id.get(sequence.seq_id)):
                continue
            blocks = self._kv.allocate_slots(
                sequence,
                self._runs.quota_of(sequence),
                sequence.num_computed_tokens,
                len(drafts),
                lookahead=True,
            )
            if blocks is not None:
                step.add_blocks(sequence, blocks)
                step.add_drafts(row, drafts)

    def process(
        self, plan: StepPlan, scheduled: list[Sequence], token_ids: list[list[int]]
    ) -> None:
        """Roll back the rejected drafts of a step whose rows got these tokens: their KV must be
        computed again.
        """
        for sequence, new_ids in zip(scheduled, token_ids, strict=True):
            if (drafts := plan.drafts.get(sequence.seq_id)) is None:
                continue
            num_accepted = max(0, len(new_ids) - 1)
            num_rejected = len(drafts) - num_accepted
            sequence.num_computed_tokens -= num_rejected
            if self._kv.states is not None:
                self._kv.states.rewind(sequence.seq_id, sequence.num_computed_tokens)
            sequence.timeline.num_drafts += 1
            sequence.timeline.num_draft_tokens += len(drafts)
            sequence.timeline.num_accepted_tokens += num_accepted
            self._waiting.charge_rejected_drafts(sequence, num_rejected)
            if self.source is not None:
                self.source.record_outcome(sequence, len(drafts), num_accepted)
