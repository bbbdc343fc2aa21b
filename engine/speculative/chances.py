"""How likely drafts hold: of a tenant's texts, and of one sequence.

A rating as of chess players (Elo): what a draft is like and what its sequence is like add up to the
logarithm of its odds, and both move towards what was seen.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import exp, log

#: Tenants whose chances are known; those that said nothing for longest are forgotten.
MOST_TENANTS = 1024
#: Longer runs of equal tokens, and places further behind, are taken as this one.
MOST_ALIKE = 16
#: What is expected of a draft model or head, which was made for it: nothing is learned of these but
#: by checking some, so a good one must be expected, or it would never be tried.
MODEL_PRIOR = 0.8
#: How far one checked draft moves the logarithm of odds of all drafts like it, and of its sequence.
_TENANT_MOVES, _SEQUENCE_MOVES = 0.25, 0.5
#: The part by which both come back with each step.
_TENANT_FORGETS, _SEQUENCE_FORGETS = 0.0006, 0.01
#: So much likelier than they are do those drafts seem that seem likeliest of many.
_CAUTION = 0.4
#: Nothing is surer than these odds.
_SUREST = 4.0
#: Drafts that hold less often are none.
_LEAST = 0.02
#: For so many steps the best of a tenant's odds is as it was, unless a draft was checked.
_BEST_HOLDS = 64


def matched_odds(matched: int) -> float:
    """Logarithm of the odds that text goes on as it did where its newest tokens stood before:
    `matched` of them, at least 1. Two of `matched` + 2 don't, before any were compared.
    """
    return log(matched / 2)


def drawn_odds(_: int) -> float:
    """The same of what a draft model or head drew, at any place."""
    return log(MODEL_PRIOR / (1.0 - MODEL_PRIOR))


@dataclass(slots=True)
class _Tenant:
    """Attributes:
    odds: likeness -> the logarithm of odds, and in which step it was so.
    best: the highest of all, and in which step it was so; None: not known.
    """

    odds: dict[int, tuple[float, int]] = field(default_factory=dict)
    best: tuple[float, int] | None = None


class UsualChances:
    """How often a tenant's drafts held lately, by what they are like.

    Of text: by how many of the newest tokens were found before it, each draft that holds being one
    more. Of a draft model's: by its place. Short answers that nothing repeats would each pay anew
    for finding that out. Tenants are kept apart: how many drafts one gets, and so how its steps are
    cut, says nothing of another's texts.

    Attributes:
        step: so many steps were planned; what was found out grows old with them.
    """

    def __init__(self, longest_match: int) -> None:
        """`longest_match`: of those that are looked for; 0: a model draws them."""
        self.drawn = not longest_match
        self.step = 0
        self._prior = drawn_odds if self.drawn else matched_odds
        self._kinds = range(1) if self.drawn else range(1, longest_match + 1)
        #: The tenant that noted something last is the last.
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()

    def odds(self, tenant: str, alike: int) -> float:
        """Logarithm of the odds of a tenant's next draft of this likeness."""
        prior, known = self._prior(alike), self._tenants.get(tenant)
        if known is None or alike not in known.odds:
            return prior
        value, at = known.odds[alike]
        return prior + (value - prior) * exp(_TENANT_FORGETS * (at - self.step))

    def best(self, tenant: str) -> float:
        """The highest of its odds, of drafts that there may be."""
        known = self._tenants.get(tenant)
        if known is None:
            return max(map(self._prior, self._kinds))
        if known.best is None or self.step - known.best[1] > _BEST_HOLDS:
            kinds = {*self._kinds, *known.odds}
            known.best = max(self.odds(tenant, alike) for alike in kinds), self.step
        return known.best[0]

    def move(self, tenant: str, alike: int, surprise: float) -> None:
        """A draft held, or didn't, by so much more than was expected, in [-1, 1]."""
        moved = _bounded(self.odds(tenant, alike) + _TENANT_MOVES * surprise)
        known = self._tenants.setdefault(tenant, _Tenant())
        known.odds[alike], known.best = (moved, self.step), None
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > MOST_TENANTS:
            self._tenants.popitem(last=False)


class Chances:
    """Of one sequence's drafts: those of its tenant, and by how much it is better or worse."""

    def __init__(self, usual: UsualChances, tenant: str) -> None:
        self._usual, self._tenant = usual, tenant
        self._was_better, self._at = 0.0, usual.step

    def best_odds(self) -> float:
        """Logarithm of the odds of its next draft at best, before anybody looks for one."""
        return self._usual.best(self._tenant) + self._better

    def of(self, matched: int, count: int, caution: float = 0.0) -> list[float]:
        """The chances that the first, the first two, ... of `count` drafts hold; as many as may
        well hold.
        """
        held, chances = 1.0, list[float]()
        better, usual, tenant = self._better - caution, self._usual, self._tenant
        for alike in self._alike(matched, count):
            held *= _chance(usual.odds(tenant, alike) + better)
            if held < _LEAST and chances:
                break
            chances.append(held)
        return chances

    def at_worst(self, matched: int, count: int) -> list[float]:
        """The same, and less: drafts aren't to be checked for seeming likelier than they are."""
        return self.of(matched, count, _CAUTION)

    def note(self, matched: int, num_drafts: int, num_accepted: int) -> None:
        """So many of its drafts held; those behind the first that didn't say nothing."""
        compared = min(num_drafts, num_accepted + 1)
        for place, alike in enumerate(self._alike(matched, compared)):
            surprise = (place < num_accepted) - self._next(alike)
            self._was_better = _bounded(self._better + _SEQUENCE_MOVES * surprise)
            self._at = self._usual.step
            self._usual.move(self._tenant, alike, surprise)

    @property
    def _better(self) -> float:
        """By so much it is likelier than its tenant's others; less so the longer ago."""
        return self._was_better * exp(_SEQUENCE_FORGETS * (self._at - self._usual.step))

    def _alike(self, matched: int, count: int) -> Iterable[int]:
        """What each draft is like."""
        first = 0 if self._usual.drawn else max(1, matched)
        return (min(first + place, MOST_ALIKE) for place in range(count))

    def _next(self, alike: int) -> float:
        return _chance(self._usual.odds(self._tenant, alike) + self._better)


def _chance(odds: float) -> float:
    return 1.0 / (1.0 + exp(-odds))


def _bounded(odds: float) -> float:
    return min(max(odds, -_SUREST), _SUREST)
