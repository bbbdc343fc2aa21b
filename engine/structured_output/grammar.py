"""`CompiledGrammar`, shared by requests, and `GrammarState`, one sequence's state within it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.contract.reasoning import ReasoningPhase, ReasoningState
from engine.structured_output.backend_llguidance import BadGrammar, raise_error

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class GrammarVocabulary:
    """The token ids that a row's mask covers.

    Attributes:
        num_words: int32 words of the mask.
        eos_token_ids: tokens that end an output.
        eos_bits: int32 [num_words], the same as a mask.
        special: the backend's special tokens. Texts never contain them, but grammars may name them.
        tokenizer: the backend's; None if no grammar is used.
    """

    __slots__ = ("eos_bits", "eos_token_ids", "num_words", "special", "tokenizer")

    def __init__(
        self, num_words: int, eos_token_ids: Sequence[int], tokenizer: LLTokenizer | None = None
    ) -> None:
        self.num_words, self.eos_token_ids = num_words, tuple(eos_token_ids)
        self.tokenizer, self.special = tokenizer, frozenset[int]()
        if tokenizer is not None:
            # In Python's own loop, which lets other threads run.
            is_special, every = tokenizer.is_special_token, range(tokenizer.vocab_size)
            self.special = frozenset({token for token in every if is_special(token)})
        flags = np.zeros(num_words * 32, dtype=np.uint8)
        flags[list(eos_token_ids)] = 1
        self.eos_bits: NDArray[np.int32] = np.packbits(flags, bitorder="little").view(np.int32)

    def expand(self, forced: bytes) -> int | None:
        """The token with which ordinary tokens begin to spell a text; None: there is none."""
        text = forced.decode("utf-8", "ignore")
        if self.tokenizer is None or not text:
            return None
        return self.tokenizer.greedy_tokenize(text)[0]


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar that was compiled within its limits.

    Attributes:
        num_bytes: approximate memory use.
        space: the token ids that it covers.
    """

    template: LLMatcher
    num_bytes: int
    space: GrammarVocabulary | None = None

    def new_state(
        self, token_ids: Sequence[int] = (), thinking: ReasoningState | None = None
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
    """One sequence's state in its reasoning and its grammar.

    Only accepted tokens advance it, so a failed step or a preemption doesn't change it.

    Args:
        matcher: None if only the reasoning is tracked.
        thinking: None if the output has no reasoning.
        space: the ids that it may get; None: the model's.
    """

    __slots__ = ("matcher", "space", "thinking")

    def __init__(
        self,
        matcher: LLMatcher | None,
        thinking: ReasoningState | None = None,
        space: GrammarVocabulary | None = None,
    ) -> None:
        self.matcher = matcher
        self.thinking = thinking
        self.space = space

    def advance(self, token_ids: Sequence[int]) -> None:
        """Advance by tokens.

        Raises:
            BadGrammar: the grammar doesn't allow them, or it became too complex.
        """
        if self.thinking is not None:
            token_ids = [token for token in token_ids if not self.thinking.advance(token)]
        if self.matcher is None or not token_ids or self.matcher.is_stopped():
            # Complete; tokens after the end (EOS, with ignore_eos) don't matter.
            return
        if not self.matcher.consume_tokens(list(token_ids)):
            raise_error(self.matcher)
            raise BadGrammar("the tokens so far don't follow it")

    def accept_tokens(self, drafts: Sequence[int]) -> list[GrammarState]:
        """The states after the first of some drafts, after the first two, and so on, as far as they
        are allowed. This state doesn't change.
        """
        states: list[GrammarState] = []
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
            states.append(following)
            last = following
        return states

    @property
    def phase(self) -> ReasoningPhase:
        """The sequence's state within its reasoning."""
        return ReasoningPhase.PAST if self.thinking is None else self.thinking.phase

    @property
    def is_idle(self) -> bool:
        """Whether nothing remains to be checked, whatever tokens follow."""
        return self.matcher is None and self.phase is ReasoningPhase.PAST

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an output under its grammar."""
        return () if self.space is None else self.space.eos_token_ids

    @property
    def complete(self) -> bool:
        """Whether the grammar is satisfied and nothing but EOS can follow."""
        if self.matcher is None:
            return False
        return self.matcher.is_stopped() and not self.matcher.is_error()
