"""The few places that touch `llguidance`: its tokenizer, its limits, one compilation.

Used by the compile worker and, for what passed there, by the engine. `llguidance` is imported when
the first request needs it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: States of a grammar's lexer, 1 to 2 KB each: they grow while a grammar is used.
MAX_LEXER_STATES = 30_000
#: Items of the parser in one step: about 20,000 a millisecond.
STEP_MAX_ITEMS = 20_000
MAX_MESSAGE_CHARS = 400


class BadGrammar(Exception):
    """A grammar that can't be used, and why, for the client."""


class TokenSpace:
    """The ids that a row's mask is over.

    Attributes:
        num_words: int32 words of the mask.
        eos_token_ids: what ends an output.
        eos_bits: int32 [num_words], the same as a mask.
        special: the backend's special tokens. A text never has one, but a grammar may name them.
        tokenizer: the backend's; None where no grammar is followed.
    """

    __slots__ = ("eos_bits", "eos_token_ids", "num_words", "special", "tokenizer")

    def __init__(
        self, num_words: int, eos_token_ids: Sequence[int], tokenizer: LLTokenizer | None = None
    ) -> None:
        self.num_words, self.eos_token_ids = num_words, tuple(eos_token_ids)
        self.tokenizer, self.special = tokenizer, frozenset[int]()
        if tokenizer is not None:
            # In Python's own loop, which lets other threads have their turns.
            is_special, every = tokenizer.is_special_token, range(tokenizer.vocab_size)
            self.special = frozenset({token for token in every if is_special(token)})
        flags = np.zeros(num_words * 32, dtype=np.uint8)
        flags[list(eos_token_ids)] = 1
        self.eos_bits: NDArray[np.int32] = np.packbits(flags, bitorder="little").view(np.int32)

    def spelled(self, forced: bytes) -> int | None:
        """The token with which ordinary tokens begin to spell a text; None: there is none."""
        text = forced.decode("utf-8", "ignore")
        if self.tokenizer is None or not text:
            return None
        return self.tokenizer.greedy_tokenize(text)[0]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokens, as both sides of the pipe need them.

    Attributes:
        tokenizer: the text of a `tokenizer.json`.
        size: how many ids the logits have, at least as many as the tokenizer.
        eos_token_ids: not empty.
    """

    tokenizer: str
    size: int
    eos_token_ids: tuple[int, ...]

    @property
    def num_words(self) -> int:
        """int32 words of a row's bitmask."""
        return words_for(self.size)


def words_for(vocab_size: int) -> int:
    """int32 words that have a bit for each token."""
    return -(-vocab_size // 32)


def available() -> bool:
    """Whether the backend is installed."""
    return importlib.util.find_spec("llguidance") is not None


def load_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """The backend's tokenizer. Raises ValueError where it can't read the model's."""
    from llguidance import LLTokenizer

    eos = list(vocabulary.eos_token_ids)
    return LLTokenizer(vocabulary.tokenizer, n_vocab=vocabulary.size, eos_token=eos)


def build(tokenizer: LLTokenizer, grammar: str, row: NDArray[np.int32]) -> LLMatcher:
    """A matcher at the grammar's start, its first mask computed (into `row`).

    Building is lazy, so a grammar that costs too much often shows only at its first mask.

    Raises:
        BadGrammar: the grammar is wrong, over a limit, or matches nothing.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES, step_max_items=STEP_MAX_ITEMS, verbose_errors=False
    )
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    raise_error(matcher)
    fill(matcher, row)
    raise_error(matcher)
    if matcher.is_stopped() and not matcher.is_accepting():
        raise BadGrammar("nothing can match it")
    if not row.any():
        raise BadGrammar("no token of this model can begin it")
    return matcher


def fill(matcher: LLMatcher, row: NDArray[np.int32]) -> None:
    """Write the next token's mask to `row` (int32 [words], contiguous), a bit a token."""
    matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)


def raise_error(matcher: Any) -> None:
    """Raise `BadGrammar` if the matcher has failed."""
    if matcher.is_error():
        raise BadGrammar(short(matcher.get_error()))


def short(message: str) -> str:
    """The backend's message without its internals, bounded."""
    text = message.split("<state>")[0].split("<non-verbose/>")[0]
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 3] + "..."
