"""How long steps take by their width."""

from __future__ import annotations

import itertools
import random

import pytest

from engine.speculative.step_times import StepTimes


def measured(*steps: tuple[int, float]) -> StepTimes:
    """So often that they are known."""
    costs = StepTimes()
    for width, seconds in steps:
        for _ in range(3):
            costs.record(width, seconds)
    return costs


def test_between_two_widths_it_is_as_a_line_goes_and_so_it_goes_on() -> None:
    assert StepTimes().seconds(7) == 1.0
    assert StepTimes(is_draft=True).seconds(7) == 0.0
    costs = measured((1, 0.010), (5, 0.018))
    assert costs.seconds(1) == 0.010
    assert costs.seconds(3) == pytest.approx(0.014)
    assert costs.seconds(5) == 0.018
    assert costs.seconds(9) == pytest.approx(0.026)
    assert (costs.widest, costs.max_width) == (5, 9)
    assert measured((7, 0.010), (8, 0.020)).seconds(9) == 0.020  # too near to tell
    assert measured((4, 0.020), (8, 0.010)).seconds(9) == 0.010
    assert measured((64, 0.1)).max_width == 72


def test_beside_prompts_a_draft_takes_what_a_token_takes_wide_steps() -> None:
    """Narrow steps are read for, and not the longer for a few tokens more; these are."""
    costs = measured((1, 0.010), (8, 0.010), (16, 0.020), (32, 0.040))
    assert costs.seconds_with_drafts(1, 4) == 0.010
    assert costs.seconds_with_drafts(1, 4, prompt_tokens=100) == pytest.approx(0.015)
    assert measured((4, 0.010)).seconds_with_drafts(1, 4, prompt_tokens=100) == pytest.approx(0.020)


def test_one_slow_step_moves_an_average_by_little() -> None:
    costs = StepTimes()
    for _ in range(10):
        costs.record(4, 0.010)
    costs.record(4, 10.0)
    assert costs.seconds(4) < 0.0121


def test_what_a_width_takes_is_known_beside_others_however_slow_the_machine_is() -> None:
    """Wide steps were measured while something else ran, and narrow ones go on without it."""
    costs = StepTimes()
    for slower in [1.0] * 50 + [3.0] * 50:
        for width in (8, 16):
            costs.record(width, slower * 0.001 * width)
    assert costs.seconds(16) == pytest.approx(0.048, rel=0.02)
    for _ in range(50):
        costs.record(8, 0.008)
    assert costs.seconds(8) == pytest.approx(0.008, rel=0.02)
    assert costs.seconds(16) == pytest.approx(0.016, rel=0.1)


def test_a_draft_models_steps_become_faster_with_its_targets_though_it_rests() -> None:
    """Both were measured on a busy machine; drafts didn't pay, and now it is idle."""
    model = StepTimes(is_draft=True)
    target = StepTimes(speed=model.speed)
    for slower in [1.0] * 50 + [3.0] * 50:
        target.record(1, slower * 0.010)
        model.record(1, slower * 0.004)
    assert model.seconds(1) == pytest.approx(0.012, rel=0.02)
    for _ in range(50):
        target.record(1, 0.010)
    assert target.seconds(1) == pytest.approx(0.010, rel=0.02)
    assert model.seconds(1) == pytest.approx(0.004, rel=0.1)


def test_a_draft_models_steps_are_known_beside_its_targets() -> None:
    """Its first ones were slow, and the machine's pace is not to be blamed for it."""
    model = StepTimes(is_draft=True)
    target = StepTimes(speed=model.speed)
    for seconds in [0.020] * 3 + [0.004] * 60:
        target.record(1, 0.010)
        model.record(1, seconds)
    assert target.seconds(1) == pytest.approx(0.010, rel=0.05)
    assert model.seconds(1) == pytest.approx(0.004, rel=0.15)


def test_what_few_steps_have_told_is_in_doubt() -> None:
    costs = measured((4, 0.010))
    assert costs.uncertainty(4) > 0.1
    for _ in range(1000):
        costs.record(4, 0.010)
    assert costs.uncertainty(4) < 0.02
    assert costs.uncertainty(8) > 0.1


def test_a_quiet_machine_leaves_less_in_doubt_than_a_busy_one() -> None:
    doubts = []
    for noise in (0.01, 0.3):
        rng, costs = random.Random(0), StepTimes()
        for _ in range(100):
            costs.record(1, 0.010 * (1.0 + rng.uniform(-noise, noise)))
        for _ in range(4):
            costs.record(4, 0.010)
        doubts.append(costs.uncertainty(4))
    assert doubts[0] < 0.03 < 0.1 < doubts[1]


def test_a_width_is_known_by_several_steps_so_that_one_slow_one_ends_nothing() -> None:
    costs = measured((1, 0.010))
    for widest, seconds in ((1, 0.300), (1, 0.012), (9, 0.011)):
        costs.record(9, seconds)
        assert costs.widest == widest
    assert costs.seconds(9) == 0.012


def test_what_was_measured_long_ago_is_tried_again_and_later_each_time() -> None:
    costs, tries = measured((1, 0.010), (9, 0.100)), []
    for step in range(5000):
        costs.record(1, 0.010)
        if costs.trial_age(1):
            tries.append(step)
            costs.record_trial(1, 8)
            costs.record(9, 0.100)
    gaps = [after - initial for initial, after in itertools.pairwise(tries)]
    assert 100 < tries[0] < 150
    assert all(1.9 < later / gap < 2.1 for gap, later in itertools.pairwise(gaps))
    assert len(gaps) > 3
    assert not costs.trial_age(9)  # nothing wider is known


def test_a_trial_between_widths_counts_for_both_though_its_step_was_not_as_wide() -> None:
    costs = measured((8, 0.010), (9, 0.012), (10, 0.014), (16, 0.020))
    for _ in range(200):
        costs.record(8, 0.010)
    assert costs.trial_age(8)
    costs.record_trial(8, 4)
    assert not any(costs.trial_age(width) for width in (8, 9, 10))
    costs.record(8, 0.010)  # whoever had the drafts has left
    assert not costs.trial_age(8)


def test_what_takes_far_less_than_long_ago_tells_that_the_machine_was_busy_then() -> None:
    """Wide steps were; what was measured since stays."""
    costs = measured((1, 0.010), (2, 0.040), (8, 0.060), (16, 0.080))
    for _ in range(200):
        costs.record(1, 0.010)
        costs.record(16, 0.020)
    costs.record(2, 0.0101)
    assert costs.seconds(2) == pytest.approx(0.0101)
    assert costs.seconds(9) == pytest.approx(0.015, rel=0.05)
    for _ in range(200):
        costs.record(1, 0.010)
    costs.record(10, 0.0105)  # a narrower step can't take more
    assert costs.seconds(2) == pytest.approx(0.0101)
    assert costs.widest == 10
    assert costs.seconds(10) == pytest.approx(0.0105)


@pytest.mark.parametrize("slower", [0.8, 1.0, 3.0])
def test_what_takes_about_as_long_or_longer_ends_nothing(slower: float) -> None:
    costs = measured((1, 0.010), (2, 0.020), (8, 0.060))
    for _ in range(200):
        costs.record(1, 0.010)
    costs.record(2, slower * 0.020)
    assert costs.widest == 8
    assert costs.seconds(2) == pytest.approx(0.020, rel=0.5)


def test_wide_steps_share_places() -> None:
    costs = StepTimes()
    widths = [*range(256, 512)] * 4
    random.Random(0).shuffle(widths)
    for width in widths:
        costs.record(width, 0.001 * width)
    assert costs.widest == 496
    assert costs.seconds(300) == pytest.approx(0.3, rel=0.1)


def test_a_draft_models_steps_are_old_once_its_target_has_gone_on_alone() -> None:
    """They seem nine times as long as they are; its target's are as they were."""
    target = StepTimes()
    drawing = StepTimes(is_draft=True, speed=target.speed)
    for _ in range(3):
        target.record(1, 1.0)
        for rows in (1, 4):
            drawing.record(rows, 0.9 * rows)
    assert not drawing.trial_age(0)
    for _ in range(200):
        target.record(1, 1.0)
    assert drawing.trial_age(0) >= 200
    assert not target.trial_age(0)
    drawing.record(1, 0.1)
    assert drawing.seconds(1) == pytest.approx(0.1)
    assert drawing.seconds(4) == pytest.approx(0.1)  # as if more rows were free
    assert target.seconds(1) == pytest.approx(1.0)
