"""How likely drafts hold, by what they are like and whose they are."""

from __future__ import annotations

import math
import random

import pytest

from engine.speculative.acceptance import AcceptanceEstimate, TenantAcceptance


def _chances(usual: TenantAcceptance | None = None) -> AcceptanceEstimate:
    return AcceptanceEstimate(usual or TenantAcceptance(max_match=4), "tenant")


def _best(estimate: AcceptanceEstimate) -> float:
    return 1.0 / (1.0 + math.exp(-estimate.best_log_odds()))


def test_the_more_tokens_match_the_likelier_a_draft_holds() -> None:
    estimate = _chances()
    first = [estimate.chances(matched, 1)[0] for matched in (1, 2, 4, 8, 16)]
    assert first == sorted(first)
    assert first[0] == pytest.approx(1 / 3)


def test_a_draft_behind_one_that_held_has_a_longer_match() -> None:
    estimate = _chances()
    one, two = estimate.chances(2, 2)
    assert two == pytest.approx(one * estimate.chances(3, 1)[0])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_it_comes_to_what_holds(p: float) -> None:
    rng, usual, estimates = random.Random(0), TenantAcceptance(max_match=4), []
    for _ in range(300):
        estimate = _chances(usual)
        for _ in range(10):
            estimates.append(estimate.chances(3, 1)[0])
            estimate.update(3, 1, int(rng.random() < p))
    assert sum(estimates[1000:]) / len(estimates[1000:]) == pytest.approx(p, abs=0.05)


def test_a_sequence_that_repeats_itself_is_told_from_its_tenants_others() -> None:
    usual = TenantAcceptance(max_match=4)
    dull, lively = _chances(usual), _chances(usual)
    for _ in range(6):
        dull.update(4, 4, 4)
        lively.update(4, 4, 0)
    assert dull.chances(1, 1)[0] > 0.6 > 0.2 > lively.chances(1, 1)[0]


def test_short_matches_that_fail_say_nothing_of_long_ones_to_other_sequences() -> None:
    usual = TenantAcceptance(max_match=4)
    initial = _chances(usual).chances(8, 1)
    for _ in range(40):
        _chances(usual).update(1, 8, 0)
    assert _chances(usual).chances(8, 1) == initial
    assert _chances(usual).chances(1, 1)[0] < 0.1


def test_a_heads_later_drafts_are_known_by_their_place() -> None:
    usual = TenantAcceptance(max_match=0)
    for _ in range(40):
        _chances(usual).update(0, 3, 1)  # the first holds, the second never does
    one, two, _ = _chances(usual).chances(0, 3)
    assert one > 0.85
    assert two < 0.2


def test_the_best_is_no_less_than_any_that_may_come_and_follows_what_is_seen() -> None:
    usual = TenantAcceptance(max_match=4)
    estimate = _chances(usual)
    assert _best(estimate) == max(estimate.chances(matched, 1)[0] for matched in (1, 2, 3, 4))
    for _ in range(60):
        _chances(usual).update(4, 1, 0)
        _chances(usual).update(3, 1, 0)
    assert _best(estimate) == pytest.approx(estimate.chances(2, 1)[0])


def test_what_was_found_out_grows_old() -> None:
    usual = TenantAcceptance(max_match=4)
    estimate, expected = _chances(usual), _chances().chances(2, 1)[0]
    for _ in range(20):
        estimate.update(2, 1, 0)
    low = estimate.chances(2, 1)[0]
    usual.step += 20_000
    assert low < 0.1
    assert estimate.chances(2, 1)[0] == pytest.approx(expected, abs=0.01)
    assert _best(estimate) == pytest.approx(_best(_chances()), abs=0.01)


def test_the_likeliest_of_many_drafts_are_no_likelier_than_they_were_taken_for() -> None:
    """All rows are alike: those that seem better only had luck so far."""
    rng, usual = random.Random(0), TenantAcceptance(max_match=4)
    rows, seemed, cautious, num_accepted = [_chances(usual) for _ in range(8)], 0.0, 0.0, 0
    for _ in range(1000):
        best = max(rows, key=lambda estimate: estimate.chances(3, 1)[0])
        seemed += best.chances(3, 1)[0]
        cautious += best.cautious_chances(3, 1)[0]
        for row in rows:
            holds = int(rng.random() < 0.5)
            num_accepted += holds if row is best else 0
            row.update(3, 1, holds)
    assert seemed > 1.3 * num_accepted
    assert cautious < 1.2 * num_accepted
