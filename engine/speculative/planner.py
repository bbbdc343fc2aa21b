"""`Planner`: which drafts of a step pay."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, log
from typing import NamedTuple

from engine.speculative.purses import Purses, Spending
from engine.speculative.step_costs import StepCosts

#: Drafts must promise so many times the tokens per second: what is measured is never exact.
_WORTH = 1.03
#: One step in so many goes without, to see what it takes: of those in which drafts promise less
#: than so many times the tokens per second, and of others.
_SURE, _PLAIN_UNSURE, _PLAIN = 1.2, 6, 48


class Step(NamedTuple):
    """A step that may get drafts: its rows that decode, the most drafts, prompts' tokens, and the
    seconds that it takes the host to give it drafts of a model.
    """

    width: int
    most: int
    beside: int
    planning: float = 0.0


class Promise(NamedTuple):
    """A draft: how likely it holds, its place behind others of its sequence (0, -1, ...), whose it
    is, and the seconds that go into reading that sequence first, which so many tokens are to pay.
    """

    chance: float
    place: int
    seq_id: int
    tenant: str
    reading: float = 0.0
    gaining: int = 1


class Planner:
    """Adds drafts, the likeliest first, up to where tokens per second are highest, or where their
    tenant could not bear that none of them holds (`Purses`).

    Attributes:
        pays: whether any of the drafts that were promised last would pay.
        poor: whether none was chosen last since a tenant could bear none.
        lent: sequences among those chosen last that are read on credit.
    """

    def __init__(
        self, costs: StepCosts, drawing: StepCosts | None, purses: Purses, most: int
    ) -> None:
        """`drawing`: of a draft model; `most`: drafts of a row."""
        self._costs, self._model, self._purses, self._most = costs, drawing, purses, most
        self._drafted = 0
        self.pays = self.poor = False
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

    def choose(self, promised: list[Promise], step: Step) -> list[Promise]:
        """Those that pay, and are paid for here: of each sequence the first ones."""
        promised.sort(reverse=True)
        width, costs = step.width, self._costs
        now = costs.seconds(width)
        at_best = now * (1.0 - costs.doubt(width))
        tokens, best, taken = float(width), _WORTH * width / at_best, 0
        chosen: list[Promise] = []
        most = min(step.most, len(promised))
        wide = costs.with_each(width, most, step.beside)
        spent, begun, unread = Spending(self._purses), set[int](), set[int]()
        depth, drawing, reading, count = 0, step.planning, 0.0, 1
        for left, each in enumerate(promised, -len(promised)):
            chance, place, seq_id, tenant, to_read, gaining = each
            if seq_id in unread:
                continue
            new = seq_id not in begun
            drawn = drawing
            if new or place <= -depth:
                drawn = step.planning + self._drawing(max(depth, 1 - place), len(begun) + new)
            wider, read = wide[count - 1], reading + new * to_read / gaining
            seconds = wider * (1.0 + costs.doubt(width + count)) + drawn + read
            if (tokens - left * chance) / seconds <= best:
                break  # even if all that are left were as likely, and free
            price = max(0.0, (wider + drawn) / now - 1.0) * width / count
            if new and not spent.reads(tenant, seq_id, to_read * width / now, price):
                unread.add(seq_id)  # and so are those behind it
                continue
            if not spent.takes(tenant, price):
                continue
            begun.add(seq_id)
            depth, drawing, reading = max(depth, 1 - place), drawn, read
            tokens += chance
            chosen.append(each)
            if tokens / seconds > best:
                best, taken = tokens / seconds, count
            if count == most:
                break
            count += 1
        self.pays, self.poor, self.lent = taken > 0, count == 1 and spent.refused, spent.lent
        if self.pays:
            self._drafted += 1
            often = _PLAIN_UNSURE if best < _SURE * width / at_best else _PLAIN
            taken = 0 if self._drafted % often == 0 else taken
        self._charge(chosen[:taken], step)
        return chosen[:taken]

    def _drawing(self, depth: int, rows: int) -> float:
        """Seconds that a draft model takes to draw so many drafts for each of `rows`."""
        return 0.0 if self._model is None else depth * self._model.seconds(rows)

    def _charge(self, chosen: list[Promise], step: Step) -> None:
        """Each draft pays for its part of the wider step; a draft model's time is known later."""
        if not chosen:
            return
        now, total = self._costs.seconds(step.width), len(chosen)
        wider = self._costs.with_drafts(step.width, total, step.beside)
        price = max(0.0, wider / now - 1.0) * step.width / total
        for each in chosen:
            self._purses.pay(each.tenant, price)
