"""`CompiledGrammar`, shared by requests, and `GrammarState`, one sequence's place in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.contract.thinking import Phase, Thinking
from engine.structured.backend import BadGrammar, raise_error
from engine.structured.token_space import TokenSpace

if TYPE_CHECKING:
    from llguidance import LLMatcher


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar that passed its limits.

    Attributes:
        num_bytes: about what it holds in memory.
        space: the ids that it's about.
    """

    template: LLMatcher
    num_bytes: int
    space: TokenSpace | None = None

    def start(
        self, token_ids: Sequence[int] = (), thinking: Thinking | None = None
    ) -> GrammarState:
        """A sequence's state after `token_ids` (what another replica had generated).

        Raises:
            BadGrammar: these tokens don't follow the grammar.
        """
        state = GrammarState(self.template.deep_copy(), thinking, self.space)
        if token_ids:
            state.advance(token_ids)
        return state


class GrammarState:
    """How far one sequence has come in its reasoning and in its grammar.

    It moves with tokens that were accepted only, so a step that failed or a preemption leaves it as
    it is.

    Args:
        matcher: None where only the reasoning is watched.
        thinking: None where an output is answer from its first token on.
        space: the ids that it may get; None: the model's.
    """

    __slots__ = ("matcher", "space", "thinking")

    def __init__(
        self,
        matcher: LLMatcher | None,
        thinking: Thinking | None = None,
        space: TokenSpace | None = None,
    ) -> None:
        self.matcher = matcher
        self.thinking = thinking
        self.space = space

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take tokens over.

        Raises:
            BadGrammar: the grammar doesn't allow them, or it became too complex.
        """
        if self.thinking is not None:
            token_ids = [token for token in token_ids if not self.thinking.advance(token)]
        if self.matcher is None or not token_ids or self.matcher.is_stopped():
            # Complete; what may come after the end (EOS, with ignore_eos) says nothing.
            return
        if not self.matcher.consume_tokens(list(token_ids)):
            raise_error(self.matcher)
            raise BadGrammar("the tokens so far don't follow it")

    def follow(self, drafts: Sequence[int]) -> list[GrammarState]:
        """Where it would be once the first of some guessed tokens came, the first two, and so on:
        as many as may come. This one stays where it is.
        """
        found: list[GrammarState] = []
        last = self
        for token in drafts:
            thinking, matcher = last.thinking, last.matcher
            forced = None if thinking is None else thinking.forced_token
            if forced not in (None, token) or last.complete:
                break
            following = GrammarState(
                None if matcher is None else matcher.deep_copy(),
                None if thinking is None else thinking.copy(),
                self.space,
            )
            try:
                following.advance([token])
            except BadGrammar:
                break
            found.append(following)
            last = following
        return found

    @property
    def phase(self) -> Phase:
        """Where the sequence stands in its reasoning."""
        return Phase.PAST if self.thinking is None else self.thinking.phase

    @property
    def idle(self) -> bool:
        """Whether there is nothing left to do, whatever tokens come."""
        return self.matcher is None and self.phase is Phase.PAST

    @property
    def own_ends(self) -> tuple[int, ...]:
        """What ends an output under its grammar."""
        return () if self.space is None else self.space.eos_token_ids

    @property
    def complete(self) -> bool:
        """Whether the grammar is satisfied and nothing but EOS can follow."""
        if self.matcher is None:
            return False
        return self.matcher.is_stopped() and not self.matcher.is_error()
