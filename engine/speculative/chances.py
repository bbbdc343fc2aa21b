"""How likely drafts hold: what is expected of a sequence that has had none yet."""

from __future__ import annotations

#: What is expected before anything was tried.
PRIOR = 0.5
#: The weight of one checked draft in the average over all sequences.
_NEW = 0.05
#: How fast it comes back to `PRIOR` with each sequence that gets no drafts for it.
_DRIFT = 0.0003


def moved(value: float, num_drafts: int, num_accepted: int, weight: float) -> float:
    """An average after a row's drafts, of which the first ones held; those behind the first that
    didn't say nothing.
    """
    for _ in range(num_accepted):
        value += weight * (1.0 - value)
    return value - weight * value if num_accepted < num_drafts else value


class UsualChances:
    """How often drafts held lately, over all sequences, by how many of the newest tokens were found
    where they were copied from (0: they weren't copied).

    Short answers that nothing repeats would each pay anew for finding that out.
    """

    def __init__(self) -> None:
        self._values: dict[int, float] = {}

    def of(self, matched: int) -> float:
        """In [0, 1]."""
        return self._values.get(matched, PRIOR)

    def note(self, matched: int, num_drafts: int, num_accepted: int) -> None:
        """A row's drafts were checked."""
        self._values[matched] = moved(self.of(matched), num_drafts, num_accepted, _NEW)

    def drift(self, matched: int) -> None:
        """A row got no drafts: what was found out grows old."""
        value = self.of(matched)
        self._values[matched] = value + _DRIFT * (PRIOR - value)
