"""How likely drafts hold: what is expected of a sequence that has had none yet."""

from __future__ import annotations

from collections import OrderedDict

#: Tenants whose chances are known; those that said nothing for longest are forgotten.
MOST_TENANTS = 1024
#: What is expected of drafts copied from text before any were compared with what came.
PRIOR = 0.5
#: The same of a draft model's or head's, which was made for it: nothing is learned of these but by
#: checking some, so a good one must be expected, or it would never be tried.
MODEL_PRIOR = 0.8
#: The weight of one checked draft in the average over all sequences.
_NEW = 0.05
#: How fast it comes back to the first expectation with each sequence that gets no drafts for it.
_DRIFT = 0.0003


def moved(value: float, num_drafts: int, num_accepted: int, weight: float) -> float:
    """An average after a row's drafts, of which the first ones held; those behind the first that
    didn't say nothing.
    """
    for _ in range(num_accepted):
        value += weight * (1.0 - value)
    return value - weight * value if num_accepted < num_drafts else value


class UsualChances:
    """How often a tenant's drafts held lately, by how many of the newest tokens were found where
    they were copied from (0: they weren't copied).

    Short answers that nothing repeats would each pay anew for finding that out. Tenants are kept
    apart: how many drafts one gets, and so how its steps are cut, says nothing of another's texts.
    """

    def __init__(self, prior: float = PRIOR) -> None:
        """`prior`: what is expected of a tenant of which nothing is known, in [0, 1]."""
        self._prior = prior
        #: Tenant -> matched -> chance; the tenant that noted something last is the last.
        self._values: OrderedDict[str, dict[int, float]] = OrderedDict()

    def of(self, tenant: str, matched: int) -> float:
        """In [0, 1]."""
        return self._values.get(tenant, {}).get(matched, self._prior)

    def note(self, tenant: str, matched: int, num_drafts: int, num_accepted: int) -> None:
        """A row's drafts were checked."""
        value = moved(self.of(tenant, matched), num_drafts, num_accepted, _NEW)
        self._values.setdefault(tenant, {})[matched] = value
        self._values.move_to_end(tenant)
        if len(self._values) > MOST_TENANTS:
            self._values.popitem(last=False)

    def drift(self, tenant: str, matched: int) -> None:
        """A row got no drafts: what was found out grows old."""
        known = self._values.get(tenant)
        if known is not None and matched in known:
            known[matched] += _DRIFT * (self._prior - known[matched])
