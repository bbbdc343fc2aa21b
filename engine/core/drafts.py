"""`CoreDrafts`: what the core does about drafts, from step to step."""

from __future__ import annotations

from collections.abc import Callable

from engine.contract.protocol import FlightRecord
from engine.core.counters import EngineCounters
from engine.scheduler import Scheduler, Sequence, StepPlan, StepResult
from engine.speculative.drafter import Drafter


class CoreDrafts:
    """Has the drafter hear what it must, and counts what held. Without one nothing happens."""

    def __init__(
        self, drafter: Drafter | None, scheduler: Scheduler, counters: EngineCounters
    ) -> None:
        """`drafter`: who gives the scheduler's rows drafts; None: nobody does."""
        self._drafter, self._rows, self._counters = drafter, scheduler.drafts, counters
        scheduler.drafts.source = drafter
        counters.of_flights.append(_observe)

    def settle(self, plan: StepPlan, scheduled: list[Sequence], result: StepResult) -> None:
        """A step was run: what didn't hold is taken back, and counted."""
        if self._drafter is not None:
            self._drafter.note_following(result.following)
        if plan.drafts:
            self._rows.settle(plan, scheduled, result.token_ids)
            self._count(plan, result)

    def _count(self, plan: StepPlan, result: StepResult) -> None:
        """Count a step's drafts, and those that held by their place."""
        stats = self._counters.stats
        for seq_id, token_ids in zip(plan.seq_ids, result.token_ids, strict=True):
            drafts = plan.drafts.get(seq_id)
            if drafts is None:
                continue
            accepted = max(0, len(token_ids) - 1)
            stats.spec_decode_num_drafts_total += 1
            stats.spec_decode_num_draft_tokens_total += len(drafts)
            stats.spec_decode_num_accepted_tokens_total += accepted
            held = stats.spec_decode_num_accepted_tokens_per_pos_total
            held += [0] * (len(drafts) - len(held))
            for place in range(accepted):
                held[place] += 1

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """What a step took, its plan and its result included."""
        if self._drafter is not None:
            self._drafter.note_step(plan, seconds)

    def reset(self, *, worker_too: bool = False) -> None:
        """Forget what a draft model has cached; `worker_too`: its memory was given back."""
        if self._drafter is not None:
            self._drafter.reset(worker_too=worker_too)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless a draft model's pool is in order."""
        if self._drafter is not None:
            self._drafter.check_integrity()


def _observe(flight: FlightRecord, observe: Callable[[str, float], None]) -> None:
    """What an output that ended says of its drafts."""
    if flight.num_drafts:
        observe("request_spec_decode_accepted_length", flight.mean_accepted_length)
