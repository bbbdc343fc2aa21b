"""Which drafts of a step are chosen."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

import pytest

from engine.speculative.loss_bound import LossBound
from engine.speculative.planner import DraftOffer, DraftStep, Planner
from engine.speculative.step_times import StepTimes


def _costs(rng: random.Random) -> StepTimes:
    """Of a machine whose steps are never the same twice, mostly not wholly known."""
    costs, slope = StepTimes(), rng.choice([0.0, 0.01, 0.05, 0.3])
    for _ in range(rng.randint(3, 9)):
        for width in (1, 3, 8, 17, 40, 90)[: rng.randint(3, 6)]:
            costs.record(width, max(0.1, 1.0 + slope * width + rng.gauss(0.0, 0.05)))
    return costs


def _offers(rng: random.Random, rows: int, max_offers: int, tenants: int) -> list[DraftOffer]:
    offers = []
    for seq_id in range(rows):
        chances, chance = list[float](), 1.0
        for _ in range(rng.randint(0, max_offers)):
            chance *= rng.uniform(0.2, 1.0)
            chances.append(chance)
        offers.append(DraftOffer(chances, seq_id, str(seq_id % tenants)))
    return offers


def _rich(offers: list[DraftOffer], tokens: float = 50.0) -> LossBound:
    losses = LossBound()
    rows = Counter(offer.tenant for offer in offers)
    losses.begin_step(1, rows)
    for tenant in rows:
        losses.charge(tenant, -tokens)
    return losses


def _linear_times(slope: float, widest: int = 64) -> StepTimes:
    """Steps without noise: 1 second, and `slope` for each token more."""
    costs = StepTimes()
    for _ in range(1000):
        for width in (1, 2, 4, 8, 16, 32, widest):
            costs.record(width, 1.0 + slope * (width - 1))
    return costs


@pytest.mark.parametrize("seed", range(40))
def test_no_other_choice_gives_more_tokens_per_second(seed: int) -> None:
    rng = random.Random(seed)
    offers, costs = _offers(rng, rng.randint(1, 4), 4, 2), _costs(rng)
    drawing = StepTimes(is_draft=True) if seed % 2 else None
    for _ in range(50 if drawing else 0):
        for rows in (1, 2, 4):
            drawing.record(rows, 0.05 * rows)  # type: ignore[union-attr]
    step = DraftStep(len(offers), rng.choice([3, 100]), rng.choice([0, 30]))
    doubted = [
        costs.seconds_with_drafts(step.width, n, step.prompt_tokens)
        * (1.0 + costs.uncertainty(step.width + n))
        for n in range(1, 101)
    ]

    def rate(counts: tuple[int, ...]) -> float:
        total, depth = sum(counts), max(counts)
        allocated_total = sum(
            sum(offer.chances[:n]) for offer, n in zip(offers, counts, strict=True)
        )
        drawn = depth * drawing.seconds(sum(map(bool, counts))) if drawing and total else 0.0
        seconds = doubted[total - 1] if total else costs.seconds(step.width)
        return (step.width + allocated_total) / (seconds + drawn)

    chosen = Planner(costs, drawing, _rich(offers), max_drafts=8)._paying(offers, step)
    counts = Counter(offer.seq_id for _, _, offer in chosen)
    chosen_counts = tuple(counts[offer.seq_id] for offer in offers)
    best = max(
        (
            combination
            for combination in product(*(range(len(offer.chances) + 1) for offer in offers))
            if sum(combination) <= step.max_drafts
        ),
        key=rate,
    )
    if drawing is None:
        bar = 1.03 * step.width / (costs.seconds(step.width) * (1 - costs.uncertainty(step.width)))
        assert rate(chosen_counts) == pytest.approx(rate(best)) or (
            not chosen and rate(best) <= bar
        )
    elif chosen:  # a row that begins late is worth less than its depth: nearly the best
        assert rate(chosen_counts) > 0.95 * rate(best)


@pytest.mark.parametrize("seed", range(60))
def test_no_tenants_drafts_cost_more_than_it_has_left(seed: int) -> None:
    rng = random.Random(seed)
    tenants = rng.choice([1, 1, 2, 5])
    offers, costs = _offers(rng, rng.choice([2, 8, 32]), 8, tenants), _costs(rng)
    losses = _rich(offers, 0.0)
    for tenant_number in range(tenants):
        losses.charge(str(tenant_number), -rng.choice([0.0, 0.3, 2.0, 50.0]))
    budgets = {offer.tenant: losses.budget(offer.tenant) for offer in offers}
    planner = Planner(costs, None, losses, max_drafts=8)
    step = DraftStep(len(offers), rng.choice([5, 1000]), rng.choice([0, 0, 30]))
    chosen = planner._paying(offers, step)
    counts = Counter[str]()
    for count, (_, _, offer) in enumerate(chosen, 1):
        counts[offer.tenant] += 1
        wide = costs.seconds_with_drafts(step.width, count, step.prompt_tokens)
        price = max(0.0, wide / costs.seconds(step.width) - 1.0) * step.width / count
        assert counts[offer.tenant] * price <= budgets[offer.tenant]


def test_a_tenant_that_can_bear_none_keeps_no_others_drafts_back() -> None:
    offers = [DraftOffer([0.95, 0.9], 0, "poor"), DraftOffer([0.9, 0.8], 1, "rich")]
    losses = _rich(offers, 0.0)
    losses.charge("rich", -50.0)
    losses.charge("poor", 0.9)
    planner = Planner(_linear_times(0.05), None, losses, max_drafts=2)
    assert planner.choose(offers, DraftStep(2, 4, 0)) == {1: 2}
    assert planner.pays
    assert not planner.is_exhausted
    losses.charge("rich", 60.0)
    assert planner.choose(offers, DraftStep(2, 4, 0)) == {}
    assert not planner.pays
    assert planner.is_exhausted
    assert planner.choose([DraftOffer([0.01], 0, "poor")], DraftStep(2, 4, 0)) == {}
    assert not planner.is_exhausted  # it wouldn't pay, whoever paid


def test_as_many_drafts_as_a_tenant_can_bear_are_the_likeliest() -> None:
    offers = [DraftOffer([0.9, 0.6], 0, "a"), DraftOffer([0.8, 0.7], 1, "a")]
    losses, costs = _rich(offers, 0.0), _linear_times(0.1)
    price = (costs.seconds(4) / costs.seconds(2) - 1.0) * 2 / 2
    losses.charge("a", losses.budget("a") - 2.5 * price)
    assert Planner(costs, None, losses, max_drafts=2).choose(offers, DraftStep(2, 4, 0)) == {
        0: 1,
        1: 1,
    }


def test_the_first_steps_with_drafts_are_followed_by_one_without_and_later_ones_seldom() -> None:
    planner = Planner(_linear_times(0.0), None, _rich([DraftOffer([], 0, "a")]), max_drafts=1)
    runs, run = [], 0
    for _ in range(200):
        chosen = planner.choose([DraftOffer([0.9], 0, "a")], DraftStep(1, 1, 0)).total()
        planner.record(chosen)
        run += chosen
        if not chosen:
            runs, run = [*runs, run], 0
    assert runs == [1, 2, 4, 8, 16, 32, 48, 48]


def test_the_likeliest_are_read_on_credit_as_far_as_it_goes() -> None:
    costs, drawing = _linear_times(0.0), StepTimes(is_draft=True)
    drawing.record(1, 1e-6)
    offers = [
        *(DraftOffer([0.9 - 0.1 * n], n, "a", reading=0.5, reading_tokens=64) for n in range(3)),
        DraftOffer([0.5], 3, "a"),
        DraftOffer([0.4], 4, "b", reading=0.5, reading_tokens=64),
    ]
    losses = _rich(offers, 0.0)
    planner = Planner(costs, drawing, losses, max_drafts=1)
    assert planner.choose(offers, DraftStep(5, 5, 0)) == {0: 1, 3: 1, 4: 1}
    losses.charge_reading("a", 4.0)
    assert planner.choose(offers[:3], DraftStep(5, 5, 0)) == {}
    assert planner.is_exhausted
    losses.charge("a", -5.2)
    assert planner.choose(offers[:3], DraftStep(5, 5, 0)) == {0: 1, 1: 1}
