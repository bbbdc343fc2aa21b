"""How long prompt tokens take here, followed from step to step.

A machine's speed at the start says little about an hour later: others share its cores and memory.
"""

from __future__ import annotations

from dataclasses import replace

from engine.scheduler.plan import StepPlan, decodes
from engine.scheduler.prefill_share import LEAST_OF_A_START
from engine.scheduler.scheduler import Scheduler

#: Prompt tokens of a step below which its time says too little of them; and the least share: fewer
#: would waste the weights that a step reads anyway.
LEAST_TOKENS = 32
#: The weight of a new step in the averages.
_NEW = 0.1
#: A step counts as at most so many times slower or faster than the average.
_OUTLIER = 2.0


class PrefillPace:
    """Keeps the most prompt tokens beside decodes at what is computed in a given time.

    Attributes:
        seconds_per_token: of prompts, beside what the decodes of the same step take.
    """

    def __init__(self, scheduler: Scheduler, seconds_per_token: float, limit: float) -> None:
        """`seconds_per_token`: to begin with; `limit`: seconds for the prompt tokens of a step."""
        self._scheduler, self._limit = scheduler, limit
        self.seconds_per_token = seconds_per_token
        #: Of a step of decodes alone; 0: none yet.
        self._decode_seconds = 0.0
        self._set()

    def note(self, plan: StepPlan, seconds: float) -> None:
        """Take a step's time into account."""
        prompt_tokens = _prompt_load(plan)
        if not prompt_tokens:
            before = self._decode_seconds or seconds
            self._decode_seconds = _moved(before, seconds)
        elif prompt_tokens >= LEAST_TOKENS:
            beside = self._decode_seconds if plan.num_decodes else 0.0
            taken = max(0.0, seconds - beside) / prompt_tokens
            self.seconds_per_token = _moved(self.seconds_per_token, taken)
            self._set()

    def _set(self) -> None:
        most = max(LEAST_TOKENS, int(self._limit / self.seconds_per_token))
        self._scheduler.limits.share = replace(self._scheduler.limits.share, most=most)


def _prompt_load(plan: StepPlan) -> int:
    """Its prompt tokens, as they count beside decodes."""
    if not plan.new:
        return plan.num_prompt_tokens
    started = {each.seq_id for each in plan.new}
    load = 0
    for seq_id, count in zip(plan.seq_ids, plan.num_scheduled, strict=True):
        if seq_id in started:
            load += max(count, LEAST_OF_A_START)
        elif not decodes(count, len(plan.drafts.get(seq_id, ()))):
            load += count
    return load


def _moved(average: float, value: float) -> float:
    """The average with a new value."""
    bounded = min(max(value, average / _OUTLIER), average * _OUTLIER)
    return average + _NEW * (bounded - average)
