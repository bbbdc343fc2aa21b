"""How likely drafts are to be accepted, by tenant."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import exp, log

#: Maximum number of tenants that are remembered; the least recently used are forgotten.
MAX_TENANTS = 1024
#: Longer matches, and later positions, count as this one.
MAX_KIND = 16
#: Chance of a draft model's or head's draft before any was checked: only checks tell, so a low one
#: would keep a good model from ever being tried.
MODEL_PRIOR = 0.8
#: By how much one checked draft moves the log odds of its tenant's drafts of that kind, and of its
#: sequence; and by which part both return to their priors with each step.
_TENANT_RATE, _SEQUENCE_RATE = 0.25, 0.5
_TENANT_DECAY, _SEQUENCE_DECAY = 0.0006, 0.01
#: The drafts chosen of many seem likelier than they are, by these log odds.
_SELECTION_BIAS = 0.4
MAX_LOG_ODDS = 4.0
#: Drafts less likely than this are dropped.
_MIN_CHANCE = 0.02
#: A tenant's best log odds are cached for this many steps, or until a draft is checked.
_BEST_CACHED_STEPS = 64


def match_log_odds(match_length: int) -> float:
    """Log odds that text goes on as it did behind `match_length` >= 1 equal tokens, before any
    draft was checked: m times in m + 2.
    """
    return log(match_length / 2)


def model_log_odds(_: int) -> float:
    """Log odds of a model's draft at any position, before any was checked."""
    return log(MODEL_PRIOR / (1.0 - MODEL_PRIOR))


@dataclass(slots=True)
class _TenantOdds:
    """Log odds by kind, and the highest of all, each with the step in which it was updated."""

    by_kind: dict[int, tuple[float, int]] = field(default_factory=dict)
    best: tuple[float, int] | None = None


class TenantAcceptance:
    """Acceptance of each tenant's recent drafts, by kind, as ratings in log odds (Elo).

    The kind of a draft from text is the number of matching tokens before it, drafts included; that
    of a model's draft its position. Tenants are kept apart: neither drafts nor their timing tell
    one what others wrote.

    Attributes:
        step: number of steps planned so far, by which ratings decay.
    """

    def __init__(self, max_match: int) -> None:
        """`max_match`: longest match that is looked up; 0: a model draws the drafts."""
        self.is_model = not max_match
        self.step = 0
        self._prior = model_log_odds if self.is_model else match_log_odds
        self._kinds = range(1) if self.is_model else range(1, max_match + 1)
        #: Least recently updated first.
        self._tenants: OrderedDict[str, _TenantOdds] = OrderedDict()

    def log_odds(self, tenant: str, kind: int) -> float:
        """Log odds of a tenant's next draft of this kind."""
        prior, odds = self._prior(kind), self._tenants.get(tenant)
        if odds is None or kind not in odds.by_kind:
            return prior
        value, step = odds.by_kind[kind]
        return prior + (value - prior) * exp(_TENANT_DECAY * (step - self.step))

    def best(self, tenant: str) -> float:
        """Highest log odds of a tenant's drafts of any kind."""
        odds = self._tenants.get(tenant)
        if odds is None:
            return max(map(self._prior, self._kinds))
        if odds.best is None or self.step - odds.best[1] > _BEST_CACHED_STEPS:
            kinds = {*self._kinds, *odds.by_kind}
            odds.best = max(self.log_odds(tenant, kind) for kind in kinds), self.step
        return odds.best[0]

    def update(self, tenant: str, kind: int, error: float) -> None:
        """Move the log odds by a draft's outcome (0 or 1) less its chance."""
        value = _clamp(self.log_odds(tenant, kind) + _TENANT_RATE * error)
        odds = self._tenants.setdefault(tenant, _TenantOdds())
        odds.by_kind[kind], odds.best = (value, self.step), None
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)


class AcceptanceEstimate:
    """Chances of one sequence's drafts: its tenant's log odds and its own offset."""

    def __init__(self, acceptance: TenantAcceptance, tenant: str) -> None:
        self._acceptance, self._tenant = acceptance, tenant
        self._last_offset, self._last_step = 0.0, acceptance.step

    @property
    def _offset(self) -> float:
        decay = exp(_SEQUENCE_DECAY * (self._last_step - self._acceptance.step))
        return self._last_offset * decay

    def best_log_odds(self) -> float:
        """Highest log odds of its next draft, before any is looked for."""
        return self._acceptance.best(self._tenant) + self._offset

    def chances(self, match_length: int, count: int, bias: float = 0.0) -> list[float]:
        """Chances that the first, the first two ... of at most `count` drafts are accepted."""
        accepted, chances, offset = 1.0, list[float](), self._offset - bias
        for kind in self._kinds(match_length, count):
            accepted *= _chance(self._acceptance.log_odds(self._tenant, kind) + offset)
            if accepted < _MIN_CHANCE and chances:
                break
            chances.append(accepted)
        return chances

    def cautious_chances(self, match_length: int, count: int) -> list[float]:
        """`chances` less the bias of choosing the likeliest."""
        return self.chances(match_length, count, _SELECTION_BIAS)

    def update(self, match_length: int, num_drafts: int, num_accepted: int) -> None:
        """Record checked drafts; those behind the first rejected one say nothing."""
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
