"""`Planner`: which drafts of a step pay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from math import inf, log
from operator import itemgetter
from typing import NamedTuple

from engine.speculative.estimates import LossBound, StepTimes

# -- What a `Planner` chooses from, and for which step.


class DraftStep(NamedTuple):
    """A step that may get drafts: its rows that decode, the most drafts, prompts' tokens, and the
    seconds that it takes the host to give it drafts of a model.
    """

    width: int
    most: int
    beside: int
    planning: float = 0.0


class DraftOffer(NamedTuple):
    """Drafts of a sequence: how likely the first, the first two ... hold; whose it is, and the
    seconds that go into reading it first, which so many tokens are to pay.
    """

    chances: list[float]
    seq_id: int
    tenant: str
    reading: float = 0.0
    gaining: int = 1


#: Drafts must promise so many times the tokens per second: what is measured is never exact.
_WORTH = 1.03
#: So many steps have drafts at most before one goes without, to see what it takes: of those in
#: which drafts promise less than so many times the tokens per second, and of others.
_SURE, _PLAIN_UNSURE, _PLAIN = 1.2, 6, 48
#: The part of steps' time that may go into seeing what wider ones, and a draft, take by now.
_TRIALS = 0.003
#: The chance that a draft holds, its place among its sequence's, and whose it is.
_Draft = tuple[float, int, DraftOffer]


class Planner:
    """Adds drafts, the likeliest first, up to where tokens per second are highest, or where their
    tenant could not bear that none of them holds (`LossBound`).

    Attributes:
        pays: whether any of the drafts that were promised last would pay.
        poor: whether none was chosen last since a tenant could bear none.
        trying: whether those chosen last don't pay, and are a trial alone.
        paid: those chosen last, by sequence, that aren't a trial.
    """

    def __init__(
        self, costs: StepTimes, drawing: StepTimes | None, losses: LossBound, most: int
    ) -> None:
        """`drawing`: of a draft model; `most`: drafts of a row."""
        self._costs, self._model, self._losses, self._most = costs, drawing, losses, most
        #: Steps with drafts since one went without, and after how many one is to.
        self._drafted, self._run = 0, 1
        self.paid = Counter[int]()
        self.pays = self.poor = self.trying = False

    def may_pay_off(self, step: DraftStep) -> bool:
        """Whether drafts would pay if all held, and nothing but the wider step took time."""
        return self._needed(step) < 1.0

    def needed_odds(self, step: DraftStep, looking: float) -> float:
        """Logarithm of the odds with which each draft would have to hold; inf: they can't pay.

        `looking`: seconds that looking for drafts takes.
        """
        needed = self._needed(step, looking + step.planning, self._drawing)
        if needed <= 0.0:
            return -inf
        return log(needed / (1.0 - needed)) if needed < 1.0 else inf

    def _needed(
        self,
        step: DraftStep,
        beside: float = 0.0,
        drawing: Callable[[int, int], float] = lambda depth, rows: 0.0,
    ) -> float:
        """How often each draft would have to hold, where finding them takes so many seconds."""
        width, costs = step.width, self._costs
        now, count = costs.seconds(width) / _WORTH, min(step.most, width * self._most)
        needed = 1.0
        for more, depth in ((1, 1), (count, -(-count // width))):
            seconds = costs.seconds_with_drafts(width, more, step.beside)
            seconds += beside + drawing(depth, min(more, width))
            needed = min(needed, width * (seconds / now - 1.0) / more)
        return needed

    def num_trial_drafts(self, step: DraftStep, taken: int = 0, reading: float = 0.0) -> int:
        """How many drafts more than the `taken` that pay a step is to have, to see what that takes
        by now; 0: none. `reading`: seconds that go into reading a sequence for them.

        What is old says little. But each row more could have a step of its own instead: so it's
        taken to cost as much as the others, and no more rows are tried than there are.
        """
        width, drawn, each = step.width + taken, 0, 0.0
        if self._model is not None and not taken:
            drawn, each = self._model.num_trials_due(0), self._drawing(1, 1)
            reading += step.planning
        age = max(self._costs.num_trials_due(width), drawn)
        if not age or step.beside:
            return 0
        each += self._costs.seconds(width) / width
        allowed = _TRIALS * age * self._costs.seconds(step.width) - reading
        return max(0, min(int(allowed / each), width, step.most - taken))

    def choose(self, offers: list[DraftOffer], step: DraftStep) -> Counter[int]:
        """How many of each sequence's first ones pay; a few more may be a trial."""
        counts = Counter([offer.seq_id for _, _, offer in self._paying(offers, step)])
        self.paid = counts.copy()
        tried = self._tried(offers, counts, step)
        self.trying = bool(tried and not counts)
        counts.update(tried)
        return counts

    def _paying(self, offers: list[DraftOffer], step: DraftStep) -> list[_Draft]:
        """The drafts that pay, the likeliest first."""
        costs, width = self._costs, step.width
        at_best = costs.seconds(width) * (1.0 - costs.uncertainty(width))
        readable, left = self._readable(offers, step)
        self.poor = len(readable) < len(offers)
        drafts, best = self._best(readable, left, step, _WORTH * width / at_best)
        self.pays, self.poor = bool(drafts), self.poor and not drafts
        if not drafts:
            return []
        often = _PLAIN_UNSURE if best < _SURE * width / at_best else _PLAIN
        return [] if self._drafted >= min(often, self._run) else drafts

    def _readable(
        self, offers: list[DraftOffer], step: DraftStep
    ) -> tuple[list[DraftOffer], dict[str, float]]:
        """The offers that nothing has to be read for, and as many of the others, the likeliest, as
        their tenants may owe for; and what drafts may then cost each tenant.
        """
        losses, tenants = self._losses, {offer.tenant for offer in offers}
        budgets = {tenant: losses.budget(tenant) for tenant in tenants}
        if not any(offer.reading for offer in offers):
            return offers, budgets
        price, readable = step.width / self._costs.seconds(step.width), list[DraftOffer]()
        pending = dict.fromkeys(tenants, 0.0)
        for offer in sorted(offers, key=lambda offer: offer.chances[:1], reverse=True):
            if not offer.reading or losses.can_read(offer.tenant, pending[offer.tenant]):
                pending[offer.tenant] += offer.reading * price
                readable.append(offer)
        return readable, budgets

    def _best(
        self, offers: list[DraftOffer], left: dict[str, float], step: DraftStep, least: float
    ) -> tuple[list[_Draft], float]:
        """The drafts that give the most tokens per second, and how many; none where that isn't more
        than `least`. Those of a tenant cost no more than what it has left.
        """
        costs, width, now = self._costs, step.width, self._costs.seconds(step.width)
        drafts = [
            (chance, place, offer) for offer in offers for place, chance in enumerate(offer.chances)
        ]
        drafts.sort(key=itemgetter(0), reverse=True)  # a row's stay in order
        most = min(step.most, len(drafts))
        wide, doubted = costs.with_each(width, most, step.beside)
        while drafts:
            drawing, reading = self._before(drafts[:most], step)
            held = accumulate([draft[0] for draft in drafts[:most]], initial=width)
            next(held)
            rates = [
                tokens / (seconds + drawn + read)
                for tokens, seconds, drawn, read in zip(
                    held, doubted, drawing, reading, strict=False
                )
            ]
            best = max(rates)
            if best <= least:
                break
            chosen = drafts[: rates.index(best) + 1]
            prices = [
                max(0.0, (seconds + drawn) / now - 1.0) * width / count
                for count, (seconds, drawn) in enumerate(zip(wide, drawing, strict=False), 1)
            ]
            drafts = _affordable(chosen, prices, left)
            if len(drafts) == len(chosen):
                return chosen, best
            self.poor = True
        return [], least

    def _before(self, drafts: list[_Draft], step: DraftStep) -> tuple[list[float], list[float]]:
        """Of the first one, two ... of these: seconds that planning and drawing them take, and the
        step's part of reading.
        """
        if self._model is None:
            return [step.planning] * len(drafts), [0.0] * len(drafts)
        rows = list(accumulate([not place for _, place, _ in drafts]))
        depths = accumulate([place + 1 for _, place, _ in drafts], max)
        each = [self._model.seconds(count) for count in range(rows[-1] + 1)]
        drawing = [step.planning + depth * each[n] for depth, n in zip(depths, rows, strict=True)]
        reading = [0.0 if place else offer.reading / offer.gaining for _, place, offer in drafts]
        return drawing, list(accumulate(reading))

    def _tried(self, offers: list[DraftOffer], counts: Counter[int], step: DraftStep) -> list[int]:
        """The sequences whose drafts beyond the first so many are a trial, one by one. A model
        draws them for one, of which it has to read least.
        """
        taken = counts.total()
        if not self.num_trial_drafts(step, taken):
            return []
        rows = sorted((each for each in offers if each.chances), key=lambda each: each.reading)
        if self._model is not None:
            rows = [each for each in rows if counts[each.seq_id]] if taken else rows[:1]
        others = [each.seq_id for each in rows for _ in each.chances[counts[each.seq_id] :]]
        reading = rows[0].reading if rows and not taken else 0.0
        others = others[: self.num_trial_drafts(step, taken, reading)]
        if others:
            self._costs.note_trial(step.width + taken, len(others))
        if others and self._model is not None and not taken:
            self._model.note_trial(0, 1)
        return others

    def _drawing(self, depth: int, rows: int) -> float:
        """Seconds that a draft model takes to draw so many drafts for each of `rows`."""
        return 0.0 if self._model is None else depth * self._model.seconds(rows)

    def note(self, num_drafts: int) -> None:
        """A step in which all rows decoded was run, with so many drafts."""
        if num_drafts:
            self._drafted += 1
        elif self._drafted:
            self._drafted, self._run = 0, min(2 * self._run, _PLAIN)

    def extra_seconds(self, step: DraftStep, num_drafts: int) -> float:
        """Tokens that each of a step's drafts cost."""
        now = self._costs.seconds(step.width)
        wider = self._costs.seconds_with_drafts(step.width, num_drafts, step.beside)
        return max(0.0, wider / now - 1.0) * step.width / num_drafts


def _affordable(
    drafts: list[_Draft], prices: list[float], budgets: dict[str, float]
) -> list[_Draft]:
    """The drafts that their tenants can bear; `prices`: of each of the first one, two ..."""
    counts, exhausted, affordable = Counter[str](), set[str](), list[_Draft]()
    for draft, price in zip(drafts, prices, strict=False):
        tenant = draft[2].tenant
        if (counts[tenant] + 1) * price > budgets[tenant]:
            exhausted.add(tenant)
        if tenant not in exhausted:
            counts[tenant] += 1
            affordable.append(draft)
    return affordable
