"""`Planner`: chooses the drafts of a step that pay."""

from __future__ import annotations

from collections import Counter
from math import exp
from operator import attrgetter
from typing import NamedTuple

from engine.speculative.loss_bound import LossBound
from engine.speculative.step_times import StepTimes

#: Minimum factor by which drafts must raise the expected tokens per second, as a safety margin.
_MIN_GAIN = 1.05
#: Maximum number of steps with drafts before one without, for comparison.
_MAX_RUN = 48
#: Number of steps without drafts after which what they cost counts only 1/e: the machine may have
#: been busy when it was measured. So drafts are tried again in time.
_DOUBT_STEPS = 100


class DraftStep(NamedTuple):
    """A step that may get drafts.

    Attributes:
        width: number of decoding rows.
        max_drafts: maximum number of drafts.
        prompt_tokens: number of prompt tokens in the step.
    """

    width: int
    max_drafts: int
    prompt_tokens: int


class DraftOffer(NamedTuple):
    """Possible drafts of a sequence.

    Attributes:
        chances: probability that the first n drafts are accepted, for n = 1, 2 ...
        reading: seconds that the draft model takes to read the sequence first, as this step's share
            of them.
    """

    chances: list[float]
    seq_id: int
    tenant: str
    reading: float = 0.0


class _Draft(NamedTuple):
    """A possible draft: its probability, and its position among those of its sequence."""

    chance: float
    position: int
    offer: DraftOffer


class Planner:
    """Chooses the most probable drafts, as many as give the most tokens per second, within the
    tenants' budgets (`LossBound`).
    """

    def __init__(
        self, costs: StepTimes, drawing: StepTimes | None, losses: LossBound, max_drafts: int
    ) -> None:
        """`drawing`: times of a draft model's steps; `max_drafts`: maximum per row."""
        self._costs, self._drawing, self._losses = costs, drawing, losses
        self._max_drafts = max_drafts
        #: Number of steps with drafts since the last one without, and the limit before the next.
        self._num_drafted, self._run = 0, 1
        #: Number of steps without drafts since the last one with drafts.
        self._num_undrafted = 0

    def can_pay(self, step: DraftStep) -> bool:
        """Whether drafts would pay if all were accepted and drawing them took no time."""
        return any(
            (step.width + count) / self._seconds(step, count) > _MIN_GAIN * self._rate(step)
            for count in (1, min(step.max_drafts, step.width * self._max_drafts))
        )

    def choose(self, offers: list[DraftOffer], step: DraftStep) -> Counter[int]:
        """Return the number of paying drafts by sequence."""
        if self._num_drafted >= self._run:
            return Counter()
        drafts = [
            _Draft(chance, position, offer)
            for offer in offers
            for position, chance in enumerate(offer.chances)
        ]
        drafts.sort(key=attrgetter("chance"), reverse=True)  # stable: keeps the order within a row
        drafts = self._best(drafts[: step.max_drafts], step)
        while len(affordable := self._affordable(drafts, step)) < len(drafts):
            drafts = self._best(affordable, step)
        return Counter([draft.offer.seq_id for draft in drafts])

    def _best(self, drafts: list[_Draft], step: DraftStep) -> list[_Draft]:
        """Return the first of these drafts, as many as give the most tokens per second; none unless
        that is clearly more than without.
        """
        best, best_rate = 0, _MIN_GAIN * self._rate(step)
        tokens, reading, depth, rows = float(step.width), 0.0, 0, 0
        for count, (chance, position, offer) in enumerate(drafts, 1):
            tokens += chance
            depth = max(depth, position + 1)
            if position == 0:
                rows += 1
                reading += offer.reading
            drawing = 0.0 if self._drawing is None else depth * self._drawing.seconds(rows)
            rate = tokens / (self._seconds(step, count, drawing) + reading)
            if rate > best_rate:
                best, best_rate = count, rate
        return drafts[:best]

    def _affordable(self, drafts: list[_Draft], step: DraftStep) -> list[_Draft]:
        """Return the drafts whose rejection the tenants can afford."""
        counts, affordable = Counter[str](), list[_Draft]()
        price = min(1.0, self.price(step, len(drafts), self._drawing_seconds(drafts)))
        for draft in drafts:
            tenant = draft.offer.tenant
            counts[tenant] += 1
            if counts[tenant] * price <= self._losses.budget(tenant):
                affordable.append(draft)
        return affordable

    def _rate(self, step: DraftStep) -> float:
        """Return tokens per second without drafts."""
        return step.width / self._costs.seconds(step.width)

    def _seconds(self, step: DraftStep, count: int, drawing: float = 0.0) -> float:
        """Return the seconds of the step with `count` drafts, as far as they are believed."""
        without = self._costs.seconds(step.width)
        more = self._costs.seconds_with_drafts(step.width, count, step.prompt_tokens) - without
        return without + (more + drawing) * exp(-self._num_undrafted / _DOUBT_STEPS)

    def price(self, step: DraftStep, count: int, drawing: float = 0.0) -> float:
        """Return the cost in tokens of each of `count` drafts that take `drawing` seconds."""
        if not count:
            return 0.0
        wider = self._costs.seconds_with_drafts(step.width, count, step.prompt_tokens) + drawing
        return max(0.0, wider / self._costs.seconds(step.width) - 1.0) * step.width / count

    def _drawing_seconds(self, drafts: list[_Draft]) -> float:
        """Return the seconds that a model takes for these drafts."""
        if self._drawing is None:
            return 0.0
        num_rows = sum(draft.position == 0 for draft in drafts)
        depth = 1 + max((draft.position for draft in drafts), default=0)
        return depth * self._drawing.seconds(num_rows)

    def record(self, num_drafts: int) -> None:
        """Record a step in which all rows decoded."""
        if num_drafts:
            self._num_drafted, self._num_undrafted = self._num_drafted + 1, 0
            return
        if self._num_drafted:
            self._num_drafted, self._run = 0, min(2 * self._run, _MAX_RUN)
        self._num_undrafted += 1
