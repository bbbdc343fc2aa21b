"""`paying_at_once`: which of many drafts pay, by a few operations on all of them."""

from __future__ import annotations

from itertools import zip_longest
from math import nan

import numpy as np
import numpy.typing as npt

from engine.speculative.offers import Found, Offer, Step
from engine.speculative.purses import Purses
from engine.speculative.step_costs import StepCosts


def paying_at_once(
    offers: list[Offer], step: Step, costs: StepCosts, purses: Purses, best: float
) -> Found | None:
    """What `Planner` finds one by one, of drafts that nobody has to draw or read for, and at least
    one; None where that has to be done, since one of several tenants can't bear all.
    """
    rows = sorted(offers, key=lambda each: -each.seq_id)
    # By places, the last id first: so equally likely ones are in order.
    chances = np.array(list(zip_longest(*(each.chances for each in rows), fillvalue=nan))).ravel()
    total = int(np.count_nonzero(~np.isnan(chances)))
    most = min(step.most, total)
    order = np.argsort(-chances, kind="stable")[:most]
    chances, whose = chances[order], order % len(rows)
    wide, doubted = map(np.array, costs.with_each(step.width, most, step.beside))
    seconds, counts = doubted + step.planning, np.arange(1, most + 1)
    tokens = np.cumsum(np.concatenate(([float(step.width)], chances)))
    rates = tokens[1:] / seconds
    before = np.maximum.accumulate(np.concatenate(([best], rates)))[:-1]
    # Behind this none pays, even if all that are left were as likely, and free.
    end = _first((tokens[:-1] + (total + 1 - counts) * chances) / seconds <= before)
    prices = np.maximum(0.0, (wide + step.planning) / costs.seconds(step.width) - 1.0)
    prices = prices * step.width / counts
    refused = end
    tenants = {each.tenant for each in offers}
    for tenant in tenants:
        own = np.array([each.tenant == tenant for each in rows])[whose]
        beyond = own & (np.cumsum(own) * prices > purses.left(tenant))
        refused = min(refused, _first(beyond))
    if refused < end and len(tenants) > 1:
        return None
    taken = 0
    if refused and rates[:refused].max() > best:
        taken = int(rates[:refused].argmax()) + 1
        best = float(rates[taken - 1])
    chosen = np.array([each.seq_id for each in rows])[whose[:taken]].tolist()
    return Found(chosen, taken, best, refused == 0 < end, set())


def _first(true: npt.NDArray[np.bool_]) -> int:
    """The place of the first that is true; behind all, if none is."""
    at = int(true.argmax())
    return at if true[at] else len(true)
