"""`Planner`: which drafts of a step pay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from heapq import heapify, heappop, heapreplace
from math import inf, log

from engine.speculative.at_once import paying_at_once
from engine.speculative.offers import Found, Offer, Step
from engine.speculative.purses import Bills, Purses
from engine.speculative.step_costs import StepCosts

#: Drafts must promise so many times the tokens per second: what is measured is never exact.
_WORTH = 1.03
#: One step in so many goes without, to see what it takes: of those in which drafts promise less
#: than so many times the tokens per second, and of others.
_SURE, _PLAIN_UNSURE, _PLAIN = 1.2, 6, 48
#: More drafts from text than this are looked at all at once: fewer take less time one by one.
_MANY = 40
#: The part of steps' time that may go into seeing what wider ones, and a draft, take by now.
_TRIALS = 0.003


class Planner:
    """Adds drafts, the likeliest first, up to where tokens per second are highest, or where their
    tenant could not bear that none of them holds (`Purses`).

    Attributes:
        pays: whether any of the drafts that were promised last would pay.
        poor: whether none was chosen last since a tenant could bear none.
        trying: whether those chosen last don't pay, and are a trial alone.
        lent: sequences among those chosen last that are read on credit.
    """

    def __init__(
        self, costs: StepCosts, drawing: StepCosts | None, purses: Purses, most: int
    ) -> None:
        """`drawing`: of a draft model; `most`: drafts of a row."""
        self._costs, self._model, self._purses, self._most = costs, drawing, purses, most
        self._drafted = 0
        self.pays = self.poor = self.trying = False
        self.lent: set[int] = set()

    def could_pay(self, step: Step) -> bool:
        """Whether drafts would pay if all held, and nothing but the wider step took time."""
        return self._needed(step) < 1.0

    def needed_odds(self, step: Step, looking: float) -> float:
        """Logarithm of the odds with which each draft would have to hold; inf: they can't pay.

        `looking`: seconds that looking for drafts takes.
        """
        needed = self._needed(step, looking + step.planning, self._drawing)
        if needed <= 0.0:
            return -inf
        return log(needed / (1.0 - needed)) if needed < 1.0 else inf

    def _needed(
        self,
        step: Step,
        beside: float = 0.0,
        drawing: Callable[[int, int], float] = lambda depth, rows: 0.0,
    ) -> float:
        """How often each draft would have to hold, where finding them takes so many seconds."""
        width, costs = step.width, self._costs
        now, count = costs.seconds(width) / _WORTH, min(step.most, width * self._most)
        needed = 1.0
        for more, depth in ((1, 1), (count, -(-count // width))):
            seconds = costs.with_drafts(width, more, step.beside)
            seconds += beside + drawing(depth, min(more, width))
            needed = min(needed, width * (seconds / now - 1.0) / more)
        return needed

    def trial(self, step: Step, taken: int = 0, reading: float = 0.0) -> int:
        """How many drafts more than the `taken` that pay a step is to have, to see what that takes
        by now; 0: none. `reading`: seconds that go into reading a sequence for them.

        What is old says little. But each row more could have a step of its own instead: so it's
        taken to cost as much as the others, and no more rows are tried than there are.
        """
        width, drawn, each = step.width + taken, 0, 0.0
        if self._model is not None and not taken:
            drawn, each = self._model.due(0), self._drawing(1, 1)
            reading += step.planning
        age = max(self._costs.due(width), drawn)
        if not age or step.beside:
            return 0
        each += self._costs.seconds(width) / width
        allowed = _TRIALS * age * self._costs.seconds(step.width) - reading
        return max(0, min(int(allowed / each), width, step.most - taken))

    def choose(self, offers: list[Offer], step: Step) -> dict[int, int]:
        """How many of each sequence's first ones pay, and are paid for here."""
        counts = Counter(self._paying(offers, step))
        self._charge(offers, counts, step)
        tried = self._tried(offers, counts, step)
        self.trying = bool(tried and not counts)
        counts.update(tried)
        return counts

    def _paying(self, offers: list[Offer], step: Step) -> list[int]:
        """The sequences whose drafts pay, one by one."""
        costs, width = self._costs, step.width
        at_best = costs.seconds(width) * (1.0 - costs.doubt(width))
        best, found = _WORTH * width / at_best, None
        if self._model is None and sum(len(each.chances) for each in offers) > _MANY:
            found = paying_at_once(offers, step, costs, self._purses, best)
        chosen, taken, best, self.poor, self.lent = found or self._one_by_one(offers, step, best)
        self.pays = taken > 0
        if self.pays:
            self._drafted += 1
            often = _PLAIN_UNSURE if best < _SURE * width / at_best else _PLAIN
            taken = 0 if self._drafted % often == 0 else taken
        return chosen[:taken]

    def _one_by_one(self, offers: list[Offer], step: Step, best: float) -> Found:
        """See `Found`; `best`: tokens per second that have to be surpassed."""
        costs, width, left = self._costs, step.width, sum(len(each.chances) for each in offers)
        now, tokens, taken = costs.seconds(width), float(width), 0
        chosen: list[int] = []
        most = min(step.most, left)
        wide, doubted = costs.with_each(width, most, step.beside)
        bills, begun, unread = Bills(self._purses), set[int](), set[int]()
        depth, drawing, reading, count = 0, step.planning, 0.0, 1
        queue = [(-each.chances[0], 0, -each.seq_id, each) for each in offers if each.chances]
        heapify(queue)
        while queue:
            below, place, order, offer = queue[0]
            seq_id, behind = -order, place + 1
            if behind < len(offer.chances):
                heapreplace(queue, (-offer.chances[behind], behind, order, offer))
            else:
                heappop(queue)
            left -= 1
            if seq_id in unread:
                continue
            new, drawn, read = seq_id not in begun, drawing, reading
            if new or place >= depth:
                drawn = step.planning + self._drawing(max(depth, behind), len(begun) + new)
            if new:
                read += offer.reading / offer.gaining
            seconds = doubted[count - 1] + drawn + read
            if (tokens - (left + 1) * below) / seconds <= best:
                break  # even if all that are left were as likely, and free
            price = max(0.0, (wide[count - 1] + drawn) / now - 1.0) * width / count
            bill = bills[offer.tenant]
            if new and not bill.reads(seq_id, offer.reading * width / now, price):
                unread.add(seq_id)  # and so are those behind it
                continue
            if not bill.takes(price):
                continue
            begun.add(seq_id)
            depth, drawing, reading = max(depth, behind), drawn, read
            tokens -= below
            chosen.append(seq_id)
            if tokens / seconds > best:
                best, taken = tokens / seconds, count
            if count == most:
                break
            count += 1
        return Found(chosen, taken, best, count == 1 and bills.refused, bills.lent)

    def _tried(self, offers: list[Offer], counts: Counter[int], step: Step) -> list[int]:
        """The sequences whose drafts beyond the first so many are a trial, one by one. A model
        draws them for one, of which it has to read least.
        """
        taken = counts.total()
        if not self.trial(step, taken):
            return []
        rows = sorted((each for each in offers if each.chances), key=lambda each: each.reading)
        if self._model is not None:
            rows = [each for each in rows if counts[each.seq_id]] if taken else rows[:1]
        others = [each.seq_id for each in rows for _ in each.chances[counts[each.seq_id] :]]
        reading = rows[0].reading if rows and not taken else 0.0
        others = others[: self.trial(step, taken, reading)]
        if others:
            self._costs.note_trial(step.width + taken, len(others))
        if others and self._model is not None and not taken:
            self._model.note_trial(0, 1)
        return others

    def _drawing(self, depth: int, rows: int) -> float:
        """Seconds that a draft model takes to draw so many drafts for each of `rows`."""
        return 0.0 if self._model is None else depth * self._model.seconds(rows)

    def _charge(self, offers: list[Offer], counts: Counter[int], step: Step) -> None:
        """Each draft pays for its part of the wider step; a draft model's time is known later."""
        if not counts:
            return
        now, total = self._costs.seconds(step.width), counts.total()
        wider = self._costs.with_drafts(step.width, total, step.beside)
        price = max(0.0, wider / now - 1.0) * step.width / total
        for each in offers:
            self._purses.pay(each.tenant, counts[each.seq_id] * price)
