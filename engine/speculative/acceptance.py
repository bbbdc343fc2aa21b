"""Average acceptance of drafts, by tenant."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from math import exp

#: Maximum number of tenants with averages; the least recently used ones are dropped.
MAX_TENANTS = 1024
#: Longer matches, and later positions, count as this kind.
MAX_KIND = 16
#: Expected acceptance of a model's or head's drafts. High, since only verified drafts correct it.
_MODEL_PRIOR = 0.8
#: Weight of a verified draft in the averages of its tenant and its sequence, and the rate at which
#: these return to their priors with each step, so that drafts are tried again.
_TENANT_RATE, _SEQUENCE_RATE = 0.1, 0.15
_TENANT_DECAY, _SEQUENCE_DECAY = 0.0006, 0.01
#: Bounds of a probability. Drafts that are accepted less often than the lower one are dropped.
_MIN_CHANCE, _MAX_CHANCE = 0.02, 0.98


class TenantAcceptance:
    """Average acceptance of each tenant's recent drafts, by kind.

    The kind of a draft from text is the number of matching tokens before it, including drafts; that
    of a model's draft is its position. Tenants are separate: neither drafts nor timing reveal what
    others wrote.

    Attributes:
        step: number of steps planned so far; averages decay with it.
    """

    def __init__(self, *, is_model: bool) -> None:
        """`is_model`: drafts come from a model or head, not from text."""
        self.is_model = is_model
        self.step = 0
        #: Of each tenant and kind the average and the step of its update; tenants in order of their
        #: last update, oldest first.
        self._averages: OrderedDict[str, dict[int, tuple[float, int]]] = OrderedDict()

    def average(self, tenant: str, kind: int) -> float:
        """Return the expected acceptance of a tenant's next draft of this kind."""
        # Text continues as it did after m equal tokens in m of m + 2 cases.
        prior = _MODEL_PRIOR if self.is_model else kind / (kind + 2)
        value, step = self._averages.get(tenant, {}).get(kind, (prior, 0))
        return prior + (value - prior) * exp(_TENANT_DECAY * (step - self.step))

    def update(self, tenant: str, kind: int, *, accepted: bool) -> None:
        """Record a verified draft."""
        average = self.average(tenant, kind)
        average += _TENANT_RATE * (accepted - average)
        self._averages.setdefault(tenant, {})[kind] = average, self.step
        self._averages.move_to_end(tenant)
        if len(self._averages) > MAX_TENANTS:
            self._averages.popitem(last=False)


class AcceptanceEstimate:
    """Acceptance of one sequence's drafts: its tenant's average, plus the average difference of the
    sequence's own drafts from it.
    """

    def __init__(self, acceptance: TenantAcceptance, tenant: str) -> None:
        self._acceptance, self._tenant = acceptance, tenant
        self._last_difference, self._last_step = 0.0, acceptance.step

    def chances(self, match_length: int, count: int) -> list[float]:
        """Return the probability that the first n drafts are accepted, for n = 1 ... `count`."""
        accepted, chances = 1.0, list[float]()
        for kind in self._kinds(match_length, count):
            accepted *= self._chance(kind)
            if accepted < _MIN_CHANCE and chances:
                break
            chances.append(accepted)
        return chances

    def update(self, match_length: int, num_drafts: int, num_accepted: int) -> None:
        """Record verified drafts; those after the first rejected one carry no information."""
        num_compared = min(num_drafts, num_accepted + 1)
        for position, kind in enumerate(self._kinds(match_length, num_compared)):
            accepted = position < num_accepted
            error = accepted - self._chance(kind)
            self._last_difference = self._difference + _SEQUENCE_RATE * error
            self._last_step = self._acceptance.step
            self._acceptance.update(self._tenant, kind, accepted=accepted)

    @property
    def _difference(self) -> float:
        age = self._acceptance.step - self._last_step
        return self._last_difference * exp(-_SEQUENCE_DECAY * age)

    def _chance(self, kind: int) -> float:
        chance = self._acceptance.average(self._tenant, kind) + self._difference
        return min(max(chance, _MIN_CHANCE), _MAX_CHANCE)

    def _kinds(self, match_length: int, count: int) -> Iterable[int]:
        first = 0 if self._acceptance.is_model else max(1, match_length)
        return (min(first + position, MAX_KIND) for position in range(count))
