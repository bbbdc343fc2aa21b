"""How long prompt tokens take here, followed from step to step.

A machine's speed at the start says little about an hour later: others share its cores and memory.
"""

from __future__ import annotations

from dataclasses import replace

from engine.scheduler.limits import StepLimits
from engine.scheduler.prefill_room import PromptLoad

#: Prompt tokens of a step below which its time says too little of them; and the least share: fewer
#: would waste the weights that a step reads anyway.
LEAST_TOKENS = 32
#: The weight of a new step in the averages.
_NEW = 0.1
#: A step counts as at most so many times slower or faster than the average.
_OUTLIER = 2.0
#: The longest `PrefillShare.reach`: of a model that reads no context, there's still some to learn.
_LONGEST_REACH = 1 << 14


class PrefillPace:
    """Keeps prompts beside decodes at what is computed in a given time.

    Attributes:
        seconds_per_token: of prompts, beside what the decodes of the same step take.
        seconds_per_read: what each token that stands before it adds to that.
        seconds_of_any: what a step takes for each token of it, of a prompt or one that decodes.
    """

    def __init__(
        self,
        limits: StepLimits,
        seconds_per_token: float,
        max_seconds: float,
        seconds_per_read: float = 0.0,
    ) -> None:
        """Both paces are to begin with; `max_seconds`: for the prompt tokens of a step."""
        self._limits, self._max_seconds = limits, max_seconds
        self.seconds_per_token = seconds_per_token
        self.seconds_per_read = seconds_per_read
        self.seconds_of_any = seconds_per_token
        #: Of a step of decodes alone; 0: none yet.
        self._decode_seconds = 0.0
        self._set()

    def note(self, load: PromptLoad, num_decodes: int, seconds: float) -> None:
        """Take a step's time into account."""
        if load.tokens + num_decodes >= LEAST_TOKENS:
            foreseen = (load.tokens + num_decodes) * self.seconds_of_any
            self.seconds_of_any *= _step(seconds / foreseen, 1.0)
        if not load.tokens:
            before = self._decode_seconds or seconds
            self._decode_seconds = before * _step(seconds / before, 1.0)
        elif load.tokens >= LEAST_TOKENS:
            beside = self._decode_seconds if num_decodes else 0.0
            self._learn(load, max(0.0, seconds - beside))
        self._set()

    def _learn(self, load: PromptLoad, seconds: float) -> None:
        """What was longer or shorter than foreseen goes to both paces, by what each foresaw."""
        reading = load.reads * self.seconds_per_read
        foreseen = load.tokens * self.seconds_per_token + reading
        ratio, part = seconds / foreseen, reading / foreseen
        self.seconds_per_token *= _step(ratio, 1 - part)
        self.seconds_per_read *= _step(ratio, part)

    def _set(self) -> None:
        per_token = self.seconds_per_token
        self.seconds_per_read = max(self.seconds_per_read, per_token / _LONGEST_REACH)
        self._limits.share = replace(
            self._limits.share,
            most=max(LEAST_TOKENS, int(self._max_seconds / per_token)),
            reach=max(1, round(per_token / self.seconds_per_read)),
            whole=max(LEAST_TOKENS, int(self._max_seconds / self.seconds_of_any)),
        )


def _step(ratio: float, weight: float) -> float:
    """By how much an average moves for a value that is so many times as large."""
    bounded = min(max(ratio, 1 / _OUTLIER), _OUTLIER)
    return 1 + _NEW * weight * (bounded - 1)
