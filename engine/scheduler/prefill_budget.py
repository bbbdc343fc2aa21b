"""What prompts may take of a step, and what they took."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

# -- How many prompt tokens share a step with decodes.
#
# Each of them makes the step longer, and every stream that decodes waits for it; too few, and
# prompts wait instead. Both waits grow with the load, so the share does too.


#: A prompt that starts beside decodes counts as so many tokens at least: of one that was found in
#: the cache few are left to compute, but they read all of it, and the worker is told of it whole.
LEAST_OF_A_START = 8
#: Prompt tokens that wait are computed in about as many steps, if the most allows it.
_STEPS_FOR_ALL = 32
#: Sequences that decode beside which `PrefillLimits.min_step_tokens` is meant; beside more it
#: grows with them.
_LEAST_BESIDE = 9


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """Prompt tokens of one step in which others decode.

    Attributes:
        max_prompt_tokens: bounds how long a step takes, except that each sequence that decodes
        brings prompts
            some tokens all the same: see `min_step_tokens`.
        saturation_decodes: with so many sequences that decode in a step, prompts get
        `max_prompt_tokens`; with fewer their
            part of it, though they fill the step up to `min_step_tokens`. 0: always
            `max_prompt_tokens`.
        min_step_tokens: tokens of a step, those that decode included, where up to 9 sequences
        decode; few
            more take nearly as long as few less, for products go by whole tiles of rows. And 8
            (with 72) for each that decodes, be it more than `max_prompt_tokens`: a request brings
            some prompt
            tokens for each that it decodes, and if a step takes in fewer, prompts wait the longer
            the more wait, for the decodes of others who came before them.
        context_cost_tokens: attention reads all that stands before a token, and so many tokens of
        this context
            take as long as the token itself: a prompt's later tokens count for more than its first
            ones, and so does a start that was found in the cache. But `min_step_tokens` are
            tokens, wherever
            they stand. 0: context counts for nothing.
        target_step_tokens: tokens of a whole step, of prompts and of those that decode, that take
        about as long
            as `max_prompt_tokens` may; `DecodeRotation` holds steps to them while others are
            about. 0: it doesn't.
    """

    max_prompt_tokens: int
    saturation_decodes: int = 0
    min_step_tokens: int = 72
    context_cost_tokens: int = 0
    target_step_tokens: int = 0

    def prompt_tokens(self, num_decodes: int, num_waiting_tokens: int) -> int:
        """The share of a step.

        Args:
            num_decodes: sequences that decode in it.
            num_waiting_tokens: of prompts that are still to be computed, all together.
        """
        if not self.saturation_decodes:
            return self.max_prompt_tokens
        by_decodes = self.max_prompt_tokens * num_decodes // self.saturation_decodes
        by_prompts = num_waiting_tokens // _STEPS_FOR_ALL
        wanted = min(self.max_prompt_tokens, max(by_decodes, by_prompts))
        return max(wanted, self.min_prompt_tokens(num_decodes))

    def min_prompt_tokens(self, num_decodes: int) -> int:
        """Prompt tokens of a step that go beside so many decodes, whatever they take."""
        if not self.saturation_decodes:
            return 0
        filled = max(self.min_step_tokens - num_decodes, 1)
        sustained = self.min_step_tokens * num_decodes // _LEAST_BESIDE - num_decodes
        return max(min(self.max_prompt_tokens, filled), sustained)

    def chunk(self, wanted: int, left: int) -> int:
        """Tokens of a prompt in a step that has room for some of them.

        Where the share follows the load, a prompt goes in parts of one size, and up to an eighth
        more than there's room for where that spares a step: one for the last few tokens alone
        takes time as well.

        Args:
            wanted: tokens of the prompt that are still to be computed.
            left: of the step's share.
        """
        if wanted <= left or left <= 0 or not self.saturation_decodes:
            return max(0, min(wanted, left))
        steps = -(-(8 * wanted - left) // (8 * left))
        return -(-wanted // steps)


# -- `StepLimits`: how much a step may hold.


@dataclass(slots=True)
class StepLimits:
    """How much a step may hold; set anew while the engine runs, as its speed is measured.

    Attributes:
        token_budget: tokens of a step.
        max_chunk_tokens: tokens of one sequence in a step, where prompts may be cut.
        chunked: whether they may.
        share: prompt tokens of a step in which others decode.
    """

    token_budget: int
    max_chunk_tokens: int
    chunked: bool
    share: PrefillLimits

    @property
    def max_tokens_per_sequence(self) -> int:
        """Most tokens of one sequence in one step."""
        return min(self.token_budget, self.max_chunk_tokens) if self.chunked else self.token_budget


@dataclass(slots=True)
class PrefillLoad:
    """Work for a step's prompts.

    Attributes:
        tokens: of prompts; a prompt that starts counts as `LEAST_OF_A_START` at least.
        context_reads: for each of them the tokens before it, which attention reads, all together.
    """

    tokens: float = 0.0
    context_reads: float = 0.0

    def add(self, count: int, context: int) -> None:
        """`count` tokens behind `context` others; a negative count takes them away again."""
        self.tokens += count
        self.context_reads += count * (context + abs(count) / 2)


@dataclass(slots=True)
class PrefillBudget:
    """Prompt tokens that still fit into a step.

    Attributes:
        remaining: so many, of prompts' first tokens. Each takes longer the more tokens stand
        before it.
        min_tokens: so many fit, whatever they take.
        min_tokens_per_start: a prompt that starts counts as so many tokens, be it fewer.
        context_tokens_per_token: so many tokens of context take as long to read as a token else
        takes; 0: context is
            free.
        load: what the step's prompts have taken.
    """

    remaining: float
    min_tokens: int = 0
    min_tokens_per_start: int = 1
    context_tokens_per_token: int = 0
    load: PrefillLoad = field(default_factory=PrefillLoad)

    def tokens(self, context: int) -> int:
        """How many tokens behind so many others there's room for."""
        return max(self.min_tokens, self._affordable(context))

    def _affordable(self, context: int) -> int:
        """The largest count whose `_cost` is `left` at most."""
        if self.remaining <= 0 or not self.context_tokens_per_token:
            return max(0, int(self.remaining))
        base = self.context_tokens_per_token + context
        return int(
            math.sqrt(base * base + 2.0 * self.context_tokens_per_token * self.remaining) - base
        )

    def _cost(self, count: int, context: int) -> float:
        """What tokens take, in tokens without context."""
        if not self.context_tokens_per_token:
            return count
        return count * (1 + (context + count / 2) / self.context_tokens_per_token)

    def consume(self, count: int, context: int, *, starts: bool) -> None:
        """A step computes `count` tokens of a prompt, which starts with them or has begun."""
        self._count(count, context, starts=starts, sign=1)

    def refund(self, count: int, context: int, *, starts: bool) -> None:
        """It doesn't, after all."""
        self._count(count, context, starts=starts, sign=-1)

    def _count(self, count: int, context: int, *, starts: bool, sign: int) -> None:
        taken = max(count, self.min_tokens_per_start) if starts else count
        self.remaining -= sign * self._cost(taken, context)
        self.min_tokens -= sign * taken
        told = max(count, LEAST_OF_A_START) if starts else count
        self.load.add(sign * told, context)


# -- How long prompt tokens take here, followed from step to step.
#
# A machine's speed at the start says little about an hour later: others share its cores and memory.


#: Prompt tokens of a step below which its time says too little of them; and the least share: fewer
#: would waste the weights that a step reads anyway.
LEAST_TOKENS = 32
#: The weight of a new step in the averages.
_NEW = 0.1
#: A step counts as at most so many times slower or faster than the average.
_OUTLIER = 2.0
#: The longest `PrefillLimits.context_cost_tokens`: of a model that reads no context, there's still
#: some to learn.
_LONGEST_REACH = 1 << 14


class PrefillPace:
    """Keeps prompts beside decodes at what is computed in a given time.

    Attributes:
        seconds_per_token: of prompts, beside what the decodes of the same step take.
        seconds_per_context_token: what each token that stands before it adds to that.
        seconds_per_step_token: what a step takes for each token of it, of a prompt or one that
        decodes.
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
        self.seconds_per_context_token = seconds_per_read
        self.seconds_per_step_token = seconds_per_token
        #: Of a step of decodes alone; 0: none yet.
        self._decode_seconds = 0.0
        self._set()

    def update(self, load: PrefillLoad, num_decodes: int, seconds: float) -> None:
        """Take a step's time into account."""
        if load.tokens + num_decodes >= LEAST_TOKENS:
            foreseen = (load.tokens + num_decodes) * self.seconds_per_step_token
            self.seconds_per_step_token *= _step(seconds / foreseen, 1.0)
        if not load.tokens:
            before = self._decode_seconds or seconds
            self._decode_seconds = before * _step(seconds / before, 1.0)
        elif load.tokens >= LEAST_TOKENS:
            beside = self._decode_seconds if num_decodes else 0.0
            self._learn(load, max(0.0, seconds - beside))
        self._set()

    def _learn(self, load: PrefillLoad, seconds: float) -> None:
        """What was longer or shorter than foreseen goes to both paces, by what each foresaw."""
        reading = load.context_reads * self.seconds_per_context_token
        foreseen = load.tokens * self.seconds_per_token + reading
        ratio, part = seconds / foreseen, reading / foreseen
        self.seconds_per_token *= _step(ratio, 1 - part)
        self.seconds_per_context_token *= _step(ratio, part)

    def _set(self) -> None:
        per_token = self.seconds_per_token
        self.seconds_per_context_token = max(
            self.seconds_per_context_token, per_token / _LONGEST_REACH
        )
        self._limits.share = replace(
            self._limits.share,
            max_prompt_tokens=max(LEAST_TOKENS, int(self._max_seconds / per_token)),
            context_cost_tokens=max(1, round(per_token / self.seconds_per_context_token)),
            target_step_tokens=max(
                LEAST_TOKENS, int(self._max_seconds / self.seconds_per_step_token)
            ),
        )


def _step(ratio: float, weight: float) -> float:
    """By how much an average moves for a value that is so many times as large."""
    bounded = min(max(ratio, 1 / _OUTLIER), _OUTLIER)
    return 1 + _NEW * weight * (bounded - 1)
