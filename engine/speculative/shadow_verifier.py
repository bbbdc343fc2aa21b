"""`ShadowVerifier`: compares drafts with later tokens instead of having the model verify them."""

from __future__ import annotations

from itertools import takewhile
from typing import NamedTuple

from engine.scheduler import Sequence


class ShadowResult(NamedTuple):
    """Outcome of drafts that were compared with later tokens."""

    sequence: Sequence
    match_length: int
    num_drafts: int
    num_accepted: int


class _Shadow(NamedTuple):
    sequence: Sequence
    match_length: int
    drafts: list[int]
    position: int


class ShadowVerifier:
    """Compares drafts with the tokens that follow, without wider steps.

    While drafts aren't expected to pay, this is the only way to notice that acceptance has risen.
    """

    def __init__(self) -> None:
        self._shadows: dict[int, _Shadow] = {}

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._shadows

    def add(self, sequence: Sequence, match_length: int, drafts: list[int]) -> None:
        """Compare these drafts with the tokens after a sequence's newest one."""
        position = len(sequence.token_ids)
        self._shadows[sequence.seq_id] = _Shadow(sequence, match_length, drafts, position)

    def remove(self, seq_id: int) -> None:
        """Stop comparing for a sequence that has finished or whose drafts the model verifies."""
        self._shadows.pop(seq_id, None)

    def pop_results(self) -> list[ShadowResult]:
        """Remove and return those whose outcome is known."""
        results = []
        for sequence, match_length, drafts, position in self._shadows.values():
            tokens = sequence.token_ids[position : position + len(drafts)]
            pairs = zip(tokens, drafts, strict=False)
            num_accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if num_accepted < len(tokens) or num_accepted == len(drafts):
                num_compared = min(num_accepted + 1, len(drafts))
                results.append(ShadowResult(sequence, match_length, num_compared, num_accepted))
        for result in results:
            del self._shadows[result.sequence.seq_id]
        return results
