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
#: Sequences that decode beside which `PrefillShare.least` is meant; beside more it grows with them.
_LEAST_BESIDE = 9


@dataclass(frozen=True, slots=True)
class PrefillShare:
    """Prompt tokens of one step in which others decode.

    Attributes:
        most: bounds how long a step takes, except that each sequence that decodes brings prompts
            some tokens all the same: see `least`.
        full_at: with so many sequences that decode in a step, prompts get `most`; with fewer their
            part of it, though they fill the step up to `least`. 0: always `most`.
        least: tokens of a step, those that decode included, where up to 9 sequences decode; few
            more take nearly as long as few less, for products go by whole tiles of rows. And 8
            (with 72) for each that decodes, be it more than `most`: a request brings some prompt
            tokens for each that it decodes, and if a step takes in fewer, prompts wait the longer
            the more wait, for the decodes of others who came before them.
        reach: attention reads all that stands before a token, and so many tokens of this context
            take as long as the token itself: a prompt's later tokens count for more than its first
            ones, and so does a start that was found in the cache. But `least` are tokens, wherever
            they stand. 0: context counts for nothing.
        whole: tokens of a whole step, of prompts and of those that decode, that take about as long
            as `most` may; `Turns` holds steps to them while others are about. 0: it doesn't.
    """

    most: int
    full_at: int = 0
    least: int = 72
    reach: int = 0
    whole: int = 0

    def of(self, num_decodes: int, num_waiting_tokens: int) -> int:
        """The share of a step.

        Args:
            num_decodes: sequences that decode in it.
            num_waiting_tokens: of prompts that are still to be computed, all together.
        """
        if not self.full_at:
            return self.most
        by_decodes = self.most * num_decodes // self.full_at
        by_prompts = num_waiting_tokens // _STEPS_FOR_ALL
        wanted = min(self.most, max(by_decodes, by_prompts))
        return max(wanted, self.least_of(num_decodes))

    def least_of(self, num_decodes: int) -> int:
        """Prompt tokens of a step that go beside so many decodes, whatever they take."""
        if not self.full_at:
            return 0
        filled = max(self.least - num_decodes, 1)
        sustained = self.least * num_decodes // _LEAST_BESIDE - num_decodes
        return max(min(self.most, filled), sustained)

    def chunk(self, wanted: int, left: int) -> int:
        """Tokens of a prompt in a step that has room for some of them.

        Where the share follows the load, a prompt goes in parts of one size, and up to an eighth
        more than there's room for where that spares a step: one for the last few tokens alone
        takes time as well.

        Args:
            wanted: tokens of the prompt that are still to be computed.
            left: of the step's share.
        """
        if wanted <= left or left <= 0 or not self.full_at:
            return max(0, min(wanted, left))
        steps = -(-(8 * wanted - left) // (8 * left))
        return -(-wanted // steps)


# -- `StepLimits`: how much a step may hold.


@dataclass(slots=True)
class StepLimits:
    """How much a step may hold; set anew while the engine runs, as its speed is measured.

    Attributes:
        token_budget: tokens of a step.
        chunk: tokens of one sequence in a step, where prompts may be cut.
        chunked: whether they may.
        share: prompt tokens of a step in which others decode.
    """

    token_budget: int
    chunk: int
    chunked: bool
    share: PrefillShare

    @property
    def most_at_once(self) -> int:
        """Most tokens of one sequence in one step."""
        return min(self.token_budget, self.chunk) if self.chunked else self.token_budget


@dataclass(slots=True)
class PromptLoad:
    """Work for a step's prompts.

    Attributes:
        tokens: of prompts; a prompt that starts counts as `LEAST_OF_A_START` at least.
        reads: for each of them the tokens before it, which attention reads, all together.
    """

    tokens: float = 0.0
    reads: float = 0.0

    def add(self, count: int, context: int) -> None:
        """`count` tokens behind `context` others; a negative count takes them away again."""
        self.tokens += count
        self.reads += count * (context + abs(count) / 2)


@dataclass(slots=True)
class PrefillRoom:
    """Prompt tokens that still fit into a step.

    Attributes:
        left: so many, of prompts' first tokens. Each takes longer the more tokens stand before it.
        least: so many fit, whatever they take.
        least_of_a_start: a prompt that starts counts as so many tokens, be it fewer.
        reach: so many tokens of context take as long to read as a token else takes; 0: context is
            free.
        load: what the step's prompts have taken.
    """

    left: float
    least: int = 0
    least_of_a_start: int = 1
    reach: int = 0
    load: PromptLoad = field(default_factory=PromptLoad)

    def tokens(self, context: int) -> int:
        """How many tokens behind so many others there's room for."""
        return max(self.least, self._affordable(context))

    def _affordable(self, context: int) -> int:
        """The largest count whose `_cost` is `left` at most."""
        if self.left <= 0 or not self.reach:
            return max(0, int(self.left))
        base = self.reach + context
        return int(math.sqrt(base * base + 2.0 * self.reach * self.left) - base)

    def _cost(self, count: int, context: int) -> float:
        """What tokens take, in tokens without context."""
        if not self.reach:
            return count
        return count * (1 + (context + count / 2) / self.reach)

    def take(self, count: int, context: int, *, starts: bool) -> None:
        """A step computes `count` tokens of a prompt, which starts with them or has begun."""
        self._count(count, context, starts=starts, sign=1)

    def give_back(self, count: int, context: int, *, starts: bool) -> None:
        """It doesn't, after all."""
        self._count(count, context, starts=starts, sign=-1)

    def _count(self, count: int, context: int, *, starts: bool, sign: int) -> None:
        taken = max(count, self.least_of_a_start) if starts else count
        self.left -= sign * self._cost(taken, context)
        self.least -= sign * taken
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
