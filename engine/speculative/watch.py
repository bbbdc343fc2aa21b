"""`Watch`: guesses that weren't worth checking, compared with what came."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.scheduler import Sequence


class Checked(NamedTuple):
    """So many of a guess's tokens were compared, of which the first ones came."""

    sequence: Sequence
    matched: int
    num_drafts: int
    num_accepted: int


@dataclass(slots=True)
class _Watched:
    sequence: Sequence
    matched: int
    tokens: list[int]
    at: int


class Watch:
    """How often drafts would have held, for nothing: no step is wider for it.

    Where drafts don't pay at the chance that is expected of them, it would never be found out that
    they hold more often.
    """

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._watched

    def add(self, sequence: Sequence, matched: int, tokens: list[int]) -> None:
        """What may follow a sequence's newest token."""
        watched = _Watched(sequence, matched, tokens, len(sequence.token_ids))
        self._watched[sequence.seq_id] = watched

    def drop(self, seq_id: int) -> None:
        """The sequence gets drafts, or has left."""
        self._watched.pop(seq_id, None)

    def take_checked(self) -> list[Checked]:
        """Those of which it's known by now how many came."""
        done = []
        for each in self._watched.values():
            came = each.sequence.token_ids[each.at : each.at + len(each.tokens)]
            held = _common(came, each.tokens)
            if held < len(came) or held == len(each.tokens):
                compared = min(held + 1, len(each.tokens))
                done.append(Checked(each.sequence, each.matched, compared, held))
        for checked in done:
            del self._watched[checked.sequence.seq_id]
        return done


def _common(a: list[int], b: list[int]) -> int:
    """How many tokens both begin with."""
    count = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        count += 1
    return count
