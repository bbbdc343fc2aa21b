"""`Planner`: which drafts of a step pay."""

from __future__ import annotations

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
    is, and a step's part of the seconds that go into reading that sequence first.
    """

    chance: float
    place: int
    seq_id: int
    tenant: str
    reading: float = 0.0


class Planner:
    """Adds drafts, the likeliest first, up to where tokens per second are highest, or where their
    tenant could not bear that none of them holds (`Purses`).

    Attributes:
        pays: whether any of the drafts that were promised last would pay.
    """

    def __init__(
        self, costs: StepCosts, drawing: StepCosts | None, purses: Purses, most: int
    ) -> None:
        """`drawing`: of a draft model; `most`: drafts of a row."""
        self._costs, self._model, self._purses, self._most = costs, drawing, purses, most
        self._drafted = 0
        self.pays = False

    def needed_odds(self, step: Step, looking: float) -> float:
        """Logarithm of the odds with which each draft would have to hold; inf: they can't pay.

        `looking`: seconds that looking for drafts takes.
        """
        width, costs, beside = step.width, self._costs, step.beside
        now, count = costs.seconds(width) / _WORTH, min(step.most, width * self._most)
        needed = 1.0
        for more, depth in ((1, 1), (count, -(-count // width))):
            seconds = costs.with_drafts(width, more, beside)
            seconds += looking + step.planning + self._drawing(depth, min(more, width))
            needed = min(needed, width * (seconds / now - 1.0) / more)
        if needed <= 0.0:
            return -inf
        return log(needed / (1.0 - needed)) if needed < 1.0 else inf

    def choose(self, promised: list[Promise], step: Step) -> list[Promise]:
        """Those that pay, and are paid for here: of each sequence the first ones."""
        promised.sort(reverse=True)
        width, costs = step.width, self._costs
        now = costs.seconds(width)
        at_best = now * (1.0 - costs.doubt(width))
        tokens, best, taken = float(width), _WORTH * width / at_best, 0
        chosen: list[Promise] = []
        spent, rows, depth, reading = Spending(self._purses), set[int](), 0, 0.0
        for left, each in enumerate(promised, -len(promised)):
            if len(chosen) == step.most:
                break
            if each.seq_id not in rows:
                rows.add(each.seq_id)
                reading += each.reading
            depth = max(depth, 1 - each.place)
            count = len(chosen) + 1
            drawing = self._drawing(depth, len(rows)) + step.planning
            wider = costs.with_drafts(width, count, step.beside)
            seconds = wider * (1.0 + costs.doubt(width + count)) + drawing + reading
            if (tokens - left * each.chance) / seconds <= best:
                break  # even if all that are left were as likely, and free
            price = max(0.0, (wider + drawing) / now - 1.0) * width / count
            if not spent.takes(each.tenant, price):
                continue
            tokens += each.chance
            chosen.append(each)
            if tokens / seconds > best:
                best, taken = tokens / seconds, len(chosen)
        self.pays = taken > 0
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
