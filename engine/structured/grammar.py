"""`CompiledGrammar`, shared by requests, and `GrammarState`, one sequence's place in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.structured.backend import BadGrammar, raise_error

if TYPE_CHECKING:
    from llguidance import LLMatcher


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar that passed its limits. `num_bytes`: about what it holds in memory."""

    template: LLMatcher
    num_bytes: int

    def start(self, token_ids: Sequence[int] = ()) -> GrammarState:
        """A sequence's state after `token_ids` (what another replica had generated).

        Raises:
            BadGrammar: these tokens don't follow the grammar.
        """
        state = GrammarState(self.template.deep_copy())
        if token_ids:
            state.advance(token_ids)
        return state


class GrammarState:
    """How far one sequence has come in its grammar. It moves with tokens that were accepted only,
    so a step that failed or a preemption leaves it as it is.
    """

    __slots__ = ("matcher",)

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take tokens over.

        Raises:
            BadGrammar: the grammar doesn't allow them, or it became too complex.
        """
        if self.matcher.is_stopped():
            # Complete; what may come after the end (EOS, with ignore_eos) says nothing.
            return
        if not self.matcher.consume_tokens(list(token_ids)):
            raise_error(self.matcher)
            raise BadGrammar("the tokens so far don't follow it")

    @property
    def complete(self) -> bool:
        """Whether the grammar is satisfied and nothing but EOS can follow."""
        return self.matcher.is_stopped() and not self.matcher.is_error()
