"""`ShadowVerifier`: drafts that are compared with later tokens instead of being verified."""

from __future__ import annotations

from itertools import takewhile
from typing import NamedTuple

from engine.scheduler import Sequence


class ShadowResult(NamedTuple):
    """Outcome of drafts that were compared with later tokens instead of being verified."""

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
    """Compares drafts with the tokens that come, without wider steps.

    Where drafts don't pay at their expected chance, nothing else would tell that they hold more
    often.
    """

    def __init__(self) -> None:
        self._shadows: dict[int, _Shadow] = {}

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._shadows

    def add(self, sequence: Sequence, match_length: int, drafts: list[int]) -> None:
        """Watch drafts that may follow a sequence's newest token."""
        position = len(sequence.token_ids)
        self._shadows[sequence.seq_id] = _Shadow(sequence, match_length, drafts, position)

    def remove(self, seq_id: int) -> None:
        """Stop watching a sequence: its drafts are verified, or it has finished."""
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
