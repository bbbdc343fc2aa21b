"""Rows of a step that have drafts: who guesses at tokens to come, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.kv_cache import KVCacheCoordinator, TenantQuota
from engine.scheduler.plan import StepPlan, decodes
from engine.scheduler.queue import WaitingQueue
from engine.scheduler.sequence import Sequence
from engine.scheduler.step_builder import StepBuilder


class DraftSource(Protocol):
    """What the scheduler asks; `engine.speculative` answers."""

    def unfollowed(self, plan: StepPlan, scheduled: list[Sequence]) -> list[int]:
        """The sequences of a step that heads needn't follow from here on; it has no drafts yet."""

    def propose(self, decoding: list[Sequence], room: int, beside: int = 0) -> dict[int, list[int]]:
        """Drafts by sequence id, at most `room` in all, for sequences that decode in a step beside
        so many tokens of prompts.
        """

    def note(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """A row's drafts were checked: so many of the first ones held."""


class DraftRows:
    """Drafts of a scheduler's steps.

    Attributes:
        source: who guesses; None: nobody does.
    """

    def __init__(
        self,
        kv: KVCacheCoordinator,
        waiting: WaitingQueue,
        quota_of: Callable[[Sequence], TenantQuota],
    ) -> None:
        self._kv, self._waiting, self._quota_of = kv, waiting, quota_of
        self.source: DraftSource | None = None

    def add(self, builder: StepBuilder) -> None:
        """Give rows that decode drafts, from what is left of budget and pool."""
        plan = builder.plan
        if self.source is None:
            return
        plan.unfollowed = self.source.unfollowed(plan, builder.scheduled)
        if builder.budget <= 0:
            return
        decoding = [
            sequence
            for sequence, count in zip(builder.scheduled, plan.num_scheduled, strict=True)
            if decodes(count) and len(sequence.token_ids) > sequence.num_prompt_tokens
        ]
        beside = plan.num_tokens - len(decoding)
        found = self.source.propose(decoding, builder.budget, beside)
        if not found:
            return
        for at, sequence in enumerate(builder.scheduled):
            drafts = found.get(sequence.seq_id)
            if not drafts:
                continue
            seq_id, quota = sequence.seq_id, self._quota_of(sequence)
            computed, count = sequence.num_computed_tokens - 1, 1 + len(drafts)
            if self._kv.can_allocate(seq_id, quota, computed, count):
                if fresh := self._kv.allocate(seq_id, quota, computed, count):
                    builder.grow(sequence, fresh)
                builder.add_drafts(at, drafts)

    def settle(self, plan: StepPlan, scheduled: list[Sequence], token_ids: list[list[int]]) -> None:
        """A step with drafts was run, and its rows got these tokens: what a draft that didn't hold
        left in the cache is computed anew.
        """
        for sequence, found in zip(scheduled, token_ids, strict=True):
            drafts = plan.drafts.get(sequence.seq_id)
            if drafts is None:
                continue
            accepted = max(0, len(found) - 1)
            sequence.num_computed_tokens -= len(drafts) - accepted
            sequence.flight.num_drafts += 1
            sequence.flight.num_draft_tokens += len(drafts)
            sequence.flight.num_accepted_tokens += accepted
            self._waiting.charge_in_vain(sequence, len(drafts) - accepted)
            if self.source is not None:
                self.source.note(sequence, len(drafts), accepted)
