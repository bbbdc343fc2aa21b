"""Which drafts pay is found alike one by one and all at once."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from engine.speculative import planner as module
from engine.speculative.at_once import paying_at_once
from engine.speculative.offers import Found, Offer, Step
from engine.speculative.planner import Planner
from engine.speculative.purses import Purses
from engine.speculative.step_costs import StepCosts


def _costs(rng: random.Random) -> StepCosts:
    """Of a machine whose steps are never the same twice, mostly not wholly known."""
    costs, slope = StepCosts(), rng.choice([0.0, 0.01, 0.05, 0.3])
    for _ in range(rng.randint(3, 9)):
        for width in (1, 3, 8, 17, 40, 90)[: rng.randint(3, 6)]:
            costs.note(width, max(0.1, 1.0 + slope * width + rng.gauss(0.0, 0.05)))
    return costs


def _purses(rng: random.Random, tenants: Counter[str]) -> Purses:
    purses = Purses()
    purses.fill(1, tenants)
    for tenant in tenants:
        purses.earn(tenant, rng.choice([0.0, 0.3, 2.0, 50.0]))
    return purses


def _offers(rng: random.Random, tenants: int) -> list[Offer]:
    offers = []
    for seq_id in range(rng.choice([2, 8, 32])):
        chances, held = list[float](), 1.0
        for _ in range(rng.randint(0, 8)):
            held *= rng.choice([0.3, 0.8, 0.9, 1.0])
            chances.append(held)
        offers.append(Offer(chances, seq_id, str(seq_id % tenants)))
    return offers


def _chosen(seed: int) -> tuple[dict[int, int], bool, bool, dict[str, float]]:
    rng = random.Random(seed)
    offers = _offers(rng, rng.choice([1, 1, 2, 5]))
    costs, purses = _costs(rng), _purses(rng, Counter(each.tenant for each in offers))
    planner = Planner(costs, None, purses, most=8)
    step = Step(len(offers), rng.choice([1, 5, 1000]), rng.choice([0, 0, 30]))
    counts = planner.choose(offers, step)
    left = {each.tenant: purses.left(each.tenant) for each in offers}
    return dict(counts), planner.pays, planner.poor, left


def test_many_at_once_are_chosen_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found, at_once = [], list[Found | None]()

    def recorded(*args: Any) -> Found | None:
        at_once.append(paying_at_once(*args))
        return at_once[-1]

    monkeypatch.setattr(module, "paying_at_once", recorded)
    for many in (10**9, 0):
        assert not at_once
        monkeypatch.setattr(module, "_MANY", many)
        found.append([_chosen(seed) for seed in range(300)])
    assert found[0] == found[1]
    assert sum(pays for _, pays, _, _ in found[0]) > 80
    assert any(poor for _, _, poor, _ in found[0])
    assert len(at_once) > 250
    assert at_once.count(None) > 5  # one of several tenants can't bear all
