"""`Planner`: chooses the drafts of a step that pay."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from math import inf, log
from operator import itemgetter
from typing import NamedTuple

from engine.speculative.loss_bound import LossBound
from engine.speculative.step_times import StepTimes


class DraftStep(NamedTuple):
    """A step that may get drafts.

    Attributes:
        width: number of decoding rows.
        max_drafts: maximum number of drafts.
        prompt_tokens: number of prompt tokens in the step.
        planning: seconds of planning a model's drafts.
    """

    width: int
    max_drafts: int
    prompt_tokens: int
    planning: float = 0.0


class DraftOffer(NamedTuple):
    """Possible drafts of a sequence.

    Attributes:
        chances: probability that the first n drafts are accepted, for n = 1, 2 ...
        reading: seconds that the draft model takes to read the sequence first.
        reading_tokens: number of tokens over which that must pay off.
    """

    chances: list[float]
    seq_id: int
    tenant: str
    reading: float = 0.0
    reading_tokens: int = 1


#: Minimum factor by which drafts must raise the expected tokens per second, as a safety margin.
_MIN_GAIN = 1.03
#: Maximum number of steps with drafts before one without, for comparison: if drafts promise a gain
#: of less than `_SURE_GAIN`, and otherwise.
_SURE_GAIN, _MAX_UNSURE_RUN, _MAX_RUN = 1.2, 6, 48
#: Maximum fraction of the steps' time for trials of wider steps and of drawing.
_TRIAL_SHARE = 0.003
#: Acceptance probability, position among the sequence's drafts, and the offer.
_Draft = tuple[float, int, DraftOffer]


class Planner:
    """Adds drafts in order of probability, as long as tokens per second grow and the tenant could
    afford the rejection of all of its drafts (`LossBound`).

    Attributes:
        pays: whether any draft of the last call would pay.
        is_exhausted: whether the last call chose none because no tenant had enough budget.
        is_trial: whether the drafts chosen last don't pay and are a trial.
        charged: number of drafts chosen last by sequence, without trials.
    """

    def __init__(
        self, costs: StepTimes, drawing: StepTimes | None, losses: LossBound, max_drafts: int
    ) -> None:
        """`drawing`: times of a draft model's steps; `max_drafts`: maximum per row."""
        self._costs, self._drawing, self._losses = costs, drawing, losses
        self._max_drafts = max_drafts
        #: Number of steps with drafts since the last one without, and the limit before the next.
        self._num_drafted, self._run = 0, 1
        self.charged = Counter[int]()
        self.pays = self.is_exhausted = self.is_trial = False

    def can_pay(self, step: DraftStep) -> bool:
        """Whether drafts would pay if all were accepted and drawing them took no time."""
        return self._min_chance(step, None) < 1.0

    def min_log_odds(self, step: DraftStep, lookup_seconds: float) -> float:
        """Return the log odds that each draft needs to pay; inf: none can."""
        chance = self._min_chance(step, self._drawing, lookup_seconds + step.planning)
        if chance <= 0.0:
            return -inf
        return log(chance / (1.0 - chance)) if chance < 1.0 else inf

    def _min_chance(
        self, step: DraftStep, drawing: StepTimes | None, extra_seconds: float = 0.0
    ) -> float:
        """Return the probability that each draft needs to pay, for one draft or the maximum."""
        width, costs = step.width, self._costs
        now = costs.seconds(width) / _MIN_GAIN
        count = min(step.max_drafts, width * self._max_drafts)
        chance = 1.0
        for num_drafts, depth in ((1, 1), (count, -(-count // width))):
            seconds = costs.seconds_with_drafts(width, num_drafts, step.prompt_tokens)
            seconds += extra_seconds
            if drawing is not None:
                seconds += depth * drawing.seconds(min(num_drafts, width))
            chance = min(chance, width * (seconds / now - 1.0) / num_drafts)
        return chance

    def num_trial_drafts(self, step: DraftStep, num_paying: int = 0, reading: float = 0.0) -> int:
        """Return how many drafts to add to the `num_paying` to measure wider steps; 0: none.

        Each is assumed to cost as much as a row, since old measurements are unreliable; so there
        are at most as many as rows. `reading`: seconds of reading a sequence for them.
        """
        width, draw_age, seconds = step.width + num_paying, 0, 0.0
        if self._drawing is not None and not num_paying:
            draw_age, seconds = self._drawing.trial_age(0), self._drawing.seconds(1)
            reading += step.planning
        age = max(self._costs.trial_age(width), draw_age)
        if not age or step.prompt_tokens:
            return 0
        seconds += self._costs.seconds(width) / width
        budget = _TRIAL_SHARE * age * self._costs.seconds(step.width) - reading
        return max(0, min(int(budget / seconds), width, step.max_drafts - num_paying))

    def choose(self, offers: list[DraftOffer], step: DraftStep) -> Counter[int]:
        """Return the number of drafts by sequence: those that pay, plus those of a due trial."""
        counts = Counter([offer.seq_id for _, _, offer in self._paying(offers, step)])
        self.charged = counts.copy()
        trials = self._trials(offers, counts, step)
        self.is_trial = bool(trials and not counts)
        counts.update(trials)
        return counts

    def _paying(self, offers: list[DraftOffer], step: DraftStep) -> list[_Draft]:
        """Return the drafts that pay, most probable first."""
        costs, width = self._costs, step.width
        budgets = {offer.tenant: self._losses.budget(offer.tenant) for offer in offers}
        readable = self._readable(offers, step)
        self.is_exhausted = len(readable) < len(offers)
        rate = width / (costs.seconds(width) * (1.0 - costs.uncertainty(width)))
        drafts, best = self._best(readable, budgets, step, _MIN_GAIN * rate)
        self.pays, self.is_exhausted = bool(drafts), self.is_exhausted and not drafts
        max_run = _MAX_UNSURE_RUN if best < _SURE_GAIN * rate else _MAX_RUN
        return [] if self._num_drafted >= min(max_run, self._run) else drafts

    def _readable(self, offers: list[DraftOffer], step: DraftStep) -> list[DraftOffer]:
        """Return offers without reading, and the most probable others that tenants can afford."""
        if not any(offer.reading for offer in offers):
            return offers
        token_rate = step.width / self._costs.seconds(step.width)
        readable, pending = list[DraftOffer](), dict[str, float]()
        for offer in sorted(offers, key=lambda offer: offer.chances[:1], reverse=True):
            tokens = pending.get(offer.tenant, 0.0)
            if not offer.reading or self._losses.can_read(offer.tenant, tokens):
                pending[offer.tenant] = tokens + offer.reading * token_rate
                readable.append(offer)
        return readable

    def _best(
        self,
        offers: list[DraftOffer],
        budgets: dict[str, float],
        step: DraftStep,
        min_rate: float,
    ) -> tuple[list[_Draft], float]:
        """Return the drafts with the most tokens per second within the tenants' budgets, and that
        rate; no drafts unless it exceeds `min_rate`.
        """
        costs, width, now = self._costs, step.width, self._costs.seconds(step.width)
        drafts = [
            (chance, position, offer)
            for offer in offers
            for position, chance in enumerate(offer.chances)
        ]
        drafts.sort(key=itemgetter(0), reverse=True)  # stable: keeps the order within a row
        drafts = drafts[: step.max_drafts]
        counts = range(1, len(drafts) + 1)
        verifying = [costs.seconds_with_drafts(width, n, step.prompt_tokens) for n in counts]
        pessimistic = [
            seconds * (1.0 + costs.uncertainty(width + n))
            for n, seconds in zip(counts, verifying, strict=True)
        ]
        while drafts:
            drawing, reading = self._draft_seconds(drafts, step)
            tokens = list(accumulate([draft[0] for draft in drafts], initial=width))[1:]
            rates = [
                n / (verify + draw + read)
                for n, verify, draw, read in zip(
                    tokens, pessimistic, drawing, reading, strict=False
                )
            ]
            best = max(rates)
            if best <= min_rate:
                break
            chosen = drafts[: rates.index(best) + 1]
            prices = [
                max(0.0, (verify + draw) / now - 1.0) * width / n
                for n, verify, draw in zip(counts, verifying, drawing, strict=False)
            ]
            drafts = _affordable(chosen, prices, budgets)
            if len(drafts) == len(chosen):
                return chosen, best
            self.is_exhausted = True
        return [], min_rate

    def _draft_seconds(
        self, drafts: list[_Draft], step: DraftStep
    ) -> tuple[list[float], list[float]]:
        """Return seconds for the first n drafts, n = 1, 2 ...: of planning and drawing them, and
        the step's share of reading.
        """
        if self._drawing is None:
            return [step.planning] * len(drafts), [0.0] * len(drafts)
        rows = list(accumulate([not position for _, position, _ in drafts]))
        depths = accumulate([position + 1 for _, position, _ in drafts], max)
        draw = [self._drawing.seconds(count) for count in range(rows[-1] + 1)]
        drawing = [step.planning + depth * draw[n] for depth, n in zip(depths, rows, strict=True)]
        reading = [
            0.0 if position else offer.reading / offer.reading_tokens
            for _, position, offer in drafts
        ]
        return drawing, list(accumulate(reading))

    def _trials(self, offers: list[DraftOffer], counts: Counter[int], step: DraftStep) -> list[int]:
        """Return the sequence id of each trial draft. A model drafts for one sequence only, the one
        with the least to read.
        """
        num_paying = counts.total()
        if not self.num_trial_drafts(step, num_paying):
            return []
        rows = sorted((offer for offer in offers if offer.chances), key=lambda row: row.reading)
        if self._drawing is not None:
            rows = [row for row in rows if counts[row.seq_id]] if num_paying else rows[:1]
        trials = [row.seq_id for row in rows for _ in row.chances[counts[row.seq_id] :]]
        reading = rows[0].reading if rows and not num_paying else 0.0
        trials = trials[: self.num_trial_drafts(step, num_paying, reading)]
        if trials:
            self._costs.record_trial(step.width + num_paying, len(trials))
            if self._drawing is not None and not num_paying:
                self._drawing.record_trial(0, 1)
        return trials

    def record(self, num_drafts: int) -> None:
        """Record a step in which all rows decoded."""
        if num_drafts:
            self._num_drafted += 1
        elif self._num_drafted:
            self._num_drafted, self._run = 0, min(2 * self._run, _MAX_RUN)

    def draft_tokens(self, step: DraftStep) -> float:
        """Return the cost in tokens of each draft of a step with `max_drafts` drafts."""
        now, count = self._costs.seconds(step.width), step.max_drafts
        wider = self._costs.seconds_with_drafts(step.width, count, step.prompt_tokens)
        return max(0.0, wider / now - 1.0) * step.width / count


def _affordable(
    drafts: list[_Draft], prices: list[float], budgets: dict[str, float]
) -> list[_Draft]:
    """Return the drafts that tenants can afford; `prices[n - 1]`: of each of the first n drafts."""
    counts, exhausted, affordable = Counter[str](), set[str](), list[_Draft]()
    for draft, price in zip(drafts, prices, strict=False):
        tenant = draft[2].tenant
        if (counts[tenant] + 1) * price > budgets[tenant]:
            exhausted.add(tenant)
        if tenant not in exhausted:
            counts[tenant] += 1
            affordable.append(draft)
    return affordable
