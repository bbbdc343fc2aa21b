"""Estimated probabilities that drafts are accepted, by tenant."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import exp, log

#: Maximum number of tenants with an estimate; the least recently used ones are dropped.
MAX_TENANTS = 1024
#: Longer matches, and later positions, count as this kind.
MAX_KIND = 16
#: Initial acceptance probability of drafts from a draft model or head. It is high, since only
#: verification corrects it: with a low one a good model might never be tried.
MODEL_PRIOR = 0.8
#: Change of the log odds per verified draft, for its tenant's drafts of that kind and for its
#: sequence, and the rate at which both return to their priors with each step.
_TENANT_RATE, _SEQUENCE_RATE = 0.25, 0.5
_TENANT_DECAY, _SEQUENCE_DECAY = 0.0006, 0.01
#: Correction of the log odds for selection bias: the best of many drafts look better than they are.
_SELECTION_BIAS = 0.4
MAX_LOG_ODDS = 4.0
#: Drafts with a lower acceptance probability are dropped.
_MIN_CHANCE = 0.02
#: Number of steps for which a tenant's best log odds are cached, unless a draft is verified before.
_BEST_CACHED_STEPS = 64


def match_log_odds(match_length: int) -> float:
    """Return the prior log odds that text continues as it did after `match_length` >= 1 equal
    tokens: it does in m of m + 2 cases.
    """
    return log(match_length / 2)


def model_log_odds(_: int) -> float:
    """Return the prior log odds of a model's draft at any position."""
    return log(MODEL_PRIOR / (1.0 - MODEL_PRIOR))


@dataclass(slots=True)
class _TenantOdds:
    """Log odds by kind, and the best of all kinds, each with the step of its update."""

    by_kind: dict[int, tuple[float, int]] = field(default_factory=dict)
    best: tuple[float, int] | None = None


class TenantAcceptance:
    """Acceptance of each tenant's recent drafts by kind, as ratings in log odds (Elo).

    The kind of a draft from text is the number of matching tokens before it, including drafts; that
    of a model's draft is its position. Tenants are separate: neither drafts nor timing reveal what
    others wrote.

    Attributes:
        step: number of steps planned so far; ratings decay with it.
    """

    def __init__(self, max_match: int) -> None:
        """`max_match`: maximum match length of lookups; 0: drafts come from a model."""
        self.is_model = not max_match
        self.step = 0
        self._prior = model_log_odds if self.is_model else match_log_odds
        self._kinds = range(1) if self.is_model else range(1, max_match + 1)
        #: In order of their last update, oldest first.
        self._tenants: OrderedDict[str, _TenantOdds] = OrderedDict()

    def log_odds(self, tenant: str, kind: int) -> float:
        """Return the log odds of a tenant's next draft of this kind."""
        prior, odds = self._prior(kind), self._tenants.get(tenant)
        if odds is None or kind not in odds.by_kind:
            return prior
        value, step = odds.by_kind[kind]
        return prior + (value - prior) * exp(_TENANT_DECAY * (step - self.step))

    def best(self, tenant: str) -> float:
        """Return the highest log odds of a tenant's drafts over all kinds."""
        odds = self._tenants.get(tenant)
        if odds is None:
            return max(map(self._prior, self._kinds))
        if odds.best is None or self.step - odds.best[1] > _BEST_CACHED_STEPS:
            kinds = {*self._kinds, *odds.by_kind}
            odds.best = max(self.log_odds(tenant, kind) for kind in kinds), self.step
        return odds.best[0]

    def update(self, tenant: str, kind: int, error: float) -> None:
        """Update the log odds by `error`: a draft's outcome (0 or 1) minus its probability."""
        value = _clamp(self.log_odds(tenant, kind) + _TENANT_RATE * error)
        odds = self._tenants.setdefault(tenant, _TenantOdds())
        odds.by_kind[kind], odds.best = (value, self.step), None
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)


class AcceptanceEstimate:
    """Acceptance probabilities of one sequence's drafts: its tenant's log odds plus an offset."""

    def __init__(self, acceptance: TenantAcceptance, tenant: str) -> None:
        self._acceptance, self._tenant = acceptance, tenant
        self._last_offset, self._last_step = 0.0, acceptance.step

    @property
    def _offset(self) -> float:
        decay = exp(_SEQUENCE_DECAY * (self._last_step - self._acceptance.step))
        return self._last_offset * decay

    def best_log_odds(self) -> float:
        """Return an upper bound of the log odds of the next draft, without looking one up."""
        return self._acceptance.best(self._tenant) + self._offset

    def chances(self, match_length: int, count: int, bias: float = 0.0) -> list[float]:
        """Return the probability that the first n drafts are accepted, for n = 1 ... `count`."""
        accepted, chances, offset = 1.0, list[float](), self._offset - bias
        for kind in self._kinds(match_length, count):
            accepted *= _chance(self._acceptance.log_odds(self._tenant, kind) + offset)
            if accepted < _MIN_CHANCE and chances:
                break
            chances.append(accepted)
        return chances

    def cautious_chances(self, match_length: int, count: int) -> list[float]:
        """Return `chances` corrected for the bias of selecting the most likely drafts."""
        return self.chances(match_length, count, _SELECTION_BIAS)

    def update(self, match_length: int, num_drafts: int, num_accepted: int) -> None:
        """Record verified drafts; those after the first rejected one carry no information."""
        num_compared = min(num_drafts, num_accepted + 1)
        for position, kind in enumerate(self._kinds(match_length, num_compared)):
            chance = _chance(self._acceptance.log_odds(self._tenant, kind) + self._offset)
            error = (position < num_accepted) - chance
            self._last_offset = _clamp(self._offset + _SEQUENCE_RATE * error)
            self._last_step = self._acceptance.step
            self._acceptance.update(self._tenant, kind, error)

    def _kinds(self, match_length: int, count: int) -> Iterable[int]:
        first = 0 if self._acceptance.is_model else max(1, match_length)
        return (min(first + position, MAX_KIND) for position in range(count))


def _chance(log_odds: float) -> float:
    return 1.0 / (1.0 + exp(-log_odds))


def _clamp(log_odds: float) -> float:
    return min(max(log_odds, -MAX_LOG_ODDS), MAX_LOG_ODDS)
