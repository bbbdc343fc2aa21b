"""Looking for fixed texts in a text that is still growing."""

from __future__ import annotations

from collections.abc import Sequence


def first_of(text: str, literals: Sequence[str]) -> tuple[int, str]:
    """Where the leftmost of `literals` begins, and which; (-1, "") for none.

    Of two that begin at the same place it is the longer one.
    """
    place, found = -1, ""
    for literal in literals:
        at = text.find(literal)
        if at >= 0 and (place < 0 or at < place or (at == place and len(literal) > len(found))):
            place, found = at, literal
    return place, found


def may_begin(text: str, literals: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a literal."""
    longest = max(map(len, literals), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        tail = text[-size:]
        if any(literal.startswith(tail) for literal in literals):
            return size
    return 0


def is_beginning(text: str, literals: Sequence[str]) -> bool:
    """Whether a whole text is the (shorter) beginning of one of the literals."""
    return any(len(text) < len(literal) and literal.startswith(text) for literal in literals)
