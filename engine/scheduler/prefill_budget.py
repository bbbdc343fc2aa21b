"""How many prompt tokens share a step with decodes, and what they cost.

Each prompt token makes the step longer, which delays every stream that decodes; with too few, the
prompts wait instead. Both waits grow with the load, so the share does too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

#: Minimum cost of a prompt that starts beside decodes. One that hits the cache has few tokens left
#: to compute, but attention reads its whole context, and the worker receives all of its tokens.
MIN_START_TOKENS = 8
#: Waiting prompt tokens are spread over about this many steps, if `max_prompt_tokens` allows it.
_STEPS_FOR_ALL = 32
#: Number of decodes that `PrefillLimits.min_step_tokens` is tuned for; it grows with more.
_MIN_TOKENS_DECODES = 9


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """Limits of the prompt tokens in a step in which other sequences decode.

    Attributes:
        max_prompt_tokens: bounds the duration of a step, except for `min_step_tokens`.
        saturation_decodes: number of decodes from which prompts get `max_prompt_tokens`; with fewer
            they get that fraction of it, at least a third, and fill the step up to
            `min_step_tokens` anyway. 0: always `max_prompt_tokens`.
        min_step_tokens: tokens of a step, decodes included, with up to 9 decodes; a few more tokens
            take hardly longer, because matrix products work on whole tiles of rows. With more
            decodes it is 8 (of 72) per decode, even beyond `max_prompt_tokens`: a request has some
            prompt tokens per decode, and if steps take fewer, the queue of prompts only grows.
        context_cost_tokens: number of context tokens that attention reads in the time that a token
            itself takes. A prompt's later tokens cost more than its first ones, and so does a start
            that hits the cache. `min_step_tokens` doesn't count context. 0: context is free.
        vector_cost_tokens: number of tokens without context that take as long as an encoder's
            vector, such as a picture's.
        target_step_tokens: tokens of a step, prompts and decodes, that take about as long as
            `max_prompt_tokens` may; `DecodeRotation` limits steps to them while other tenants are
            active. 0: no such limit.
    """

    max_prompt_tokens: int
    saturation_decodes: int = 0
    min_step_tokens: int = 72
    context_cost_tokens: int = 0
    target_step_tokens: int = 0
    vector_cost_tokens: float = 1.0

    def prompt_tokens(self, num_decodes: int, num_waiting_tokens: int) -> int:
        """Prompt tokens of a step.

        Args:
            num_decodes: number of decodes in it.
            num_waiting_tokens: all prompt tokens that are still to be computed.
        """
        if not self.saturation_decodes:
            return self.max_prompt_tokens
        # With less than a third, prompts would need many more steps.
        num_counted = max(num_decodes, self.saturation_decodes // 3)
        by_decodes = self.max_prompt_tokens * num_counted // self.saturation_decodes
        by_prompts = num_waiting_tokens // _STEPS_FOR_ALL
        num_tokens = min(self.max_prompt_tokens, max(by_decodes, by_prompts))
        return max(num_tokens, self.min_prompt_tokens(num_decodes))

    def min_prompt_tokens(self, num_decodes: int) -> int:
        """Prompt tokens of a step with `num_decodes` decodes that fit whatever they cost."""
        if not self.saturation_decodes:
            return 0
        filled = max(self.min_step_tokens - num_decodes, 1)
        sustained = self.min_step_tokens * num_decodes // _MIN_TOKENS_DECODES - num_decodes
        return max(min(self.max_prompt_tokens, filled), sustained)

    def chunk(self, num_pending: int, budget: int) -> int:
        """Number of a prompt's tokens that a step computes.

        If the share follows the load, a prompt is cut into chunks of equal size. They may exceed
        the budget by up to an eighth if that saves a step for the last few tokens.

        Args:
            num_pending: tokens of the prompt that are still to be computed.
            budget: prompt tokens that fit into the step.
        """
        if num_pending <= budget or budget <= 0 or not self.saturation_decodes:
            return max(0, min(num_pending, budget))
        steps = -(-(8 * num_pending - budget) // (8 * budget))
        return -(-num_pending // steps)


@dataclass(slots=True)
class StepLimits:
    """Limits of a step; `share` changes while the engine runs, as its speed is measured.

    Attributes:
        token_budget: maximum number of tokens of a step.
        max_chunk_tokens: maximum number of tokens of one sequence, with chunked prefill.
        chunked: whether prompts may be split over steps.
        share: prompt tokens of a step in which others decode.
    """

    token_budget: int
    max_chunk_tokens: int
    chunked: bool
    share: PrefillLimits

    @property
    def max_tokens_per_sequence(self) -> int:
        """Maximum number of tokens of one sequence in a step."""
        return min(self.token_budget, self.max_chunk_tokens) if self.chunked else self.token_budget


@dataclass(slots=True)
class PrefillLoad:
    """The prompts' part of a step's work.

    Attributes:
        tokens: number of prompt tokens; a prompt that starts counts at least `MIN_START_TOKENS`.
        context_reads: sum, over these tokens, of the tokens before each, which attention reads.
    """

    tokens: float = 0.0
    context_reads: float = 0.0

    def add(self, count: int, context: int) -> None:
        """Add `count` tokens that follow `context` others; a negative count removes them."""
        self.tokens += count
        self.context_reads += count * (context + abs(count) / 2)


@dataclass(slots=True)
class PrefillBudget:
    """Prompt tokens that still fit into a step.

    Attributes:
        remaining: in tokens without context; a token costs more the more tokens precede it.
        min_tokens: tokens that fit whatever they cost.
        min_tokens_per_start: minimum cost of a prompt that starts.
        context_tokens_per_token: context tokens that are read in the time of a token without
            context; 0: context is free.
        tokens_per_vector: cost of an encoder's vector; 0: encoding is free.
        load: work of the step's prompts so far.
    """

    remaining: float
    min_tokens: int = 0
    min_tokens_per_start: int = 1
    context_tokens_per_token: int = 0
    tokens_per_vector: float = 0.0
    load: PrefillLoad = field(default_factory=PrefillLoad)

    def tokens(self, context: int) -> int:
        """Number of tokens that fit after `context` others."""
        return max(self.min_tokens, self._affordable(context))

    @property
    def num_vectors(self) -> int | None:
        """Number of an encoder's vectors that fit; None: any number."""
        if not self.tokens_per_vector:
            return None
        return max(0, int(self.remaining / self.tokens_per_vector))

    def consume_vectors(self, count: int) -> None:
        """Count vectors that the step's encoder computes."""
        self.remaining -= count * self.tokens_per_vector

    def _affordable(self, context: int) -> int:
        """The largest count of which `_cost` is at most `remaining`."""
        if self.remaining <= 0 or not self.context_tokens_per_token:
            return max(0, int(self.remaining))
        base = self.context_tokens_per_token + context
        return int(
            math.sqrt(base * base + 2.0 * self.context_tokens_per_token * self.remaining) - base
        )

    def _cost(self, count: int, context: int) -> float:
        """Cost of tokens, in tokens without context."""
        if not self.context_tokens_per_token:
            return count
        return count * (1 + (context + count / 2) / self.context_tokens_per_token)

    def consume(self, count: int, context: int, *, starts: bool) -> None:
        """Count a prompt's tokens that the step computes. `starts`: they are its first."""
        self._count(count, context, starts=starts, sign=1)

    def refund(self, count: int, context: int, *, starts: bool) -> None:
        """Undo `consume`."""
        self._count(count, context, starts=starts, sign=-1)

    def _count(self, count: int, context: int, *, starts: bool, sign: int) -> None:
        num_charged = max(count, self.min_tokens_per_start) if starts else count
        self.remaining -= sign * self._cost(num_charged, context)
        self.min_tokens -= sign * num_charged
        num_loaded = max(count, MIN_START_TOKENS) if starts else count
        self.load.add(sign * num_loaded, context)


#: Minimum number of a step's prompt tokens for its time to be measured; and the minimum share: with
#: fewer, reading the weights would dominate the step.
MIN_BUDGET_TOKENS = 32
#: The weight of a new step in the averages.
_NEW = 0.1
#: The weight of all earlier steps that encoded in the encoder's average. The first step is much
#: slower than others, as it builds caches.
_PREVIOUS_ENCODINGS = 7 / 8
#: Maximum ratio by which a step counts as slower or faster than the average.
_OUTLIER = 2.0
#: Maximum of `PrefillLimits.context_cost_tokens`, so that the pace of a model that reads no context
#: can still be measured.
_MAX_CONTEXT_COST = 1 << 14


class PrefillPace:
    """Adapts a step's prompt tokens to what is computed in a given time, measured step by step.

    A measurement at startup says little about an hour later: other processes share the machine's
    cores and memory.

    Attributes:
        seconds_per_token: of prompts, without the time of the step's decodes.
        seconds_per_context_token: added by each token of context.
        seconds_per_step_token: duration of a step over its tokens, of prompts and decodes.
        seconds_per_vector: of an encoder; 0: not measured yet.
    """

    def __init__(
        self,
        limits: StepLimits,
        seconds_per_token: float,
        max_seconds: float,
        seconds_per_read: float = 0.0,
    ) -> None:
        """Both paces are initial values. `max_seconds`: time limit of a step's prompt tokens."""
        self._limits, self._max_seconds = limits, max_seconds
        self.seconds_per_token = seconds_per_token
        self.seconds_per_context_token = seconds_per_read
        self.seconds_per_step_token = seconds_per_token
        self.seconds_per_vector = 0.0
        #: Of the steps that encoded, later ones with more weight.
        self._encoder_seconds = self._encoder_vectors = 0.0
        #: Duration of a step with decodes only; 0: not measured yet.
        self._decode_seconds = 0.0
        self._set_limits()

    def update(
        self, load: PrefillLoad, num_decodes: int, seconds: float, num_vectors: int = 0
    ) -> None:
        """Update the averages with a step's time. `num_vectors`: those that its encoder computed;
        what the step took beyond the expected time is theirs, and nothing else is measured.
        """
        if num_vectors:
            expected = self._prompt_seconds(load) + (self._decode_seconds if num_decodes else 0.0)
            self._encoder_seconds *= _PREVIOUS_ENCODINGS
            self._encoder_seconds += max(0.0, seconds - expected)
            self._encoder_vectors = self._encoder_vectors * _PREVIOUS_ENCODINGS + num_vectors
            self.seconds_per_vector = self._encoder_seconds / self._encoder_vectors
            self._set_limits()
            return
        if load.tokens + num_decodes >= MIN_BUDGET_TOKENS:
            expected = (load.tokens + num_decodes) * self.seconds_per_step_token
            self.seconds_per_step_token *= _step(seconds / expected, 1.0)
        if not load.tokens:
            previous = self._decode_seconds or seconds
            self._decode_seconds = previous * _step(seconds / previous, 1.0)
        elif load.tokens >= MIN_BUDGET_TOKENS:
            decode_seconds = self._decode_seconds if num_decodes else 0.0
            self._update_paces(load, max(0.0, seconds - decode_seconds))
        self._set_limits()

    def _update_paces(self, load: PrefillLoad, seconds: float) -> None:
        """Correct both paces by the ratio to the expected time, in proportion to their parts."""
        reading = load.context_reads * self.seconds_per_context_token
        expected = self._prompt_seconds(load)
        ratio, part = seconds / expected, reading / expected
        self.seconds_per_token *= _step(ratio, 1 - part)
        self.seconds_per_context_token *= _step(ratio, part)

    def _prompt_seconds(self, load: PrefillLoad) -> float:
        """Expected time of a step's prompts."""
        reading = load.context_reads * self.seconds_per_context_token
        return load.tokens * self.seconds_per_token + reading

    def _set_limits(self) -> None:
        per_token = self.seconds_per_token
        self.seconds_per_context_token = max(
            self.seconds_per_context_token, per_token / _MAX_CONTEXT_COST
        )
        self._limits.share = replace(
            self._limits.share,
            max_prompt_tokens=max(MIN_BUDGET_TOKENS, int(self._max_seconds / per_token)),
            context_cost_tokens=max(1, round(per_token / self.seconds_per_context_token)),
            target_step_tokens=max(
                MIN_BUDGET_TOKENS, int(self._max_seconds / self.seconds_per_step_token)
            ),
            vector_cost_tokens=(self.seconds_per_vector or per_token) / per_token,
        )


def _step(ratio: float, weight: float) -> float:
    """The factor by which an average changes for a value that is `ratio` times as large."""
    bounded = min(max(ratio, 1 / _OUTLIER), _OUTLIER)
    return 1 + _NEW * weight * (bounded - 1)
