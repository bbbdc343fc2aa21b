"""Reasoning before the answer: where it ends, its budget, and what must wait for its end."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import msgspec

from engine.contract.errors import InvalidRequest
from engine.contract.validation import check_int, check_token_ids

MAX_MARK_TOKENS = 64
MAX_MARKS = 16
_PARAM = "thinking"


class ReasoningParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """How to recognize a model's reasoning, in tokens. Structured output begins after it.

    Attributes:
        end: token sequences, each of which ends the reasoning.
        start: the beginning of an output with reasoning; [] if every output starts within the
            reasoning (the prompt has opened it).
        close: forced once the budget is used up; must end with one of `end`. []: the first of them.
        budget: maximum number of tokens before `close`, >= 0; None for no limit.

    Raises:
        InvalidRequest: with `param` "thinking" or "thinking.<field>".
    """

    end: list[list[int]]
    start: list[int] = msgspec.field(default_factory=list)
    close: list[int] = msgspec.field(default_factory=list)
    budget: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.end, list) or not 0 < len(self.end) <= MAX_MARKS:
            raise InvalidRequest(
                f"thinking.end must be a list of 1 to {MAX_MARKS} lists.", param=f"{_PARAM}.end"
            )
        for mark in self.end:
            check_token_ids(f"{_PARAM}.end", mark, MAX_MARK_TOKENS)
            if not mark:
                raise InvalidRequest("thinking.end holds an empty list.", param=f"{_PARAM}.end")
        check_token_ids(f"{_PARAM}.start", self.start, MAX_MARK_TOKENS)
        check_token_ids(f"{_PARAM}.close", self.close, MAX_MARK_TOKENS)
        if self.close and not any(_ends_with(self.close, mark) for mark in self.end):
            raise InvalidRequest(
                "thinking.close must end with one of thinking.end.", param=f"{_PARAM}.close"
            )
        if self.budget is not None:
            check_int(f"{_PARAM}.budget", self.budget, 0)

    @property
    def forced(self) -> list[int]:
        """The tokens that end the reasoning by force."""
        return self.close or self.end[0]

    @property
    def all_token_ids(self) -> list[int]:
        """All token ids in these fields."""
        return [*self.start, *self.close, *(token for mark in self.end for token in mark)]


class ReasoningPhase(Enum):
    """Phase of an output."""

    START = "start"
    INSIDE = "inside"
    CLOSING = "closing"
    PAST = "past"


class ReasoningState:
    """State of one output's reasoning. Only accepted tokens advance it."""

    __slots__ = ("_count", "_position", "_tail", "_tail_size", "params", "phase")

    def __init__(self, params: ReasoningParams) -> None:
        self.params = params
        self.phase = ReasoningPhase.START if params.start else ReasoningPhase.INSIDE
        self._position = self._count = 0
        self._tail: list[int] = []
        self._tail_size = max(map(len, params.end))
        self._spend()

    def copy(self) -> ReasoningState:
        """An independent copy."""
        other = ReasoningState(self.params)
        other.phase, other._position, other._count = self.phase, self._position, self._count
        other._tail = self._tail
        return other

    @property
    def forced_token(self) -> int | None:
        """The only token that is allowed next; None: no restriction."""
        if self.phase is ReasoningPhase.CLOSING:
            return self.params.forced[self._position]
        if self.phase is ReasoningPhase.START and self._position:
            return self.params.start[self._position]
        return None

    def advance(self, token: int) -> bool:
        """Advance by a token; returns whether it belongs to the reasoning (rather than the
        answer).
        """
        if self.phase is ReasoningPhase.START:
            return self._start(token)
        if self.phase is ReasoningPhase.CLOSING:
            self._position += 1
            if self._position == len(self.params.forced):
                self.phase = ReasoningPhase.PAST
            return True
        if self.phase is ReasoningPhase.PAST:
            return False
        self._count += 1
        self._tail = [*self._tail, token][-self._tail_size :]
        if any(_ends_with(self._tail, mark) for mark in self.params.end):
            self.phase = ReasoningPhase.PAST
        else:
            self._spend()
        return True

    def _start(self, token: int) -> bool:
        if token != self.params.start[self._position]:
            self.phase = ReasoningPhase.PAST  # this output has no reasoning
            return False
        self._position += 1
        if self._position == len(self.params.start):
            self.phase, self._position = ReasoningPhase.INSIDE, 0
            self._spend()
        return True

    def _spend(self) -> None:
        """Close the reasoning once its budget is used up."""
        budget = self.params.budget
        if self.phase is ReasoningPhase.INSIDE and budget is not None and self._count >= budget:
            self.phase, self._position = ReasoningPhase.CLOSING, 0


def _ends_with(tokens: Sequence[int], mark: Sequence[int]) -> bool:
    return list(tokens[-len(mark) :]) == list(mark)
