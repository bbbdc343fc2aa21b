"""What prompts may take of a step, and what they took."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from engine.scheduler.prefill_share import LEAST_OF_A_START


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
