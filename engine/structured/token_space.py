"""`TokenSpace`: what the tokens of a grammar's masks are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLTokenizer


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
