"""What a tenant's drafts may cost it."""

from __future__ import annotations

from math import inf

import pytest

from engine.speculative import loss_bound as module
from engine.speculative.loss_bound import LossBound
from engine.speculative.planner import DraftOffer, DraftStep, Planner
from engine.speculative.step_times import StepTimes


def started(step: int = 1, **rows: int) -> LossBound:
    losses = LossBound()
    losses.begin_step(step, rows)
    return losses


def test_a_new_tenant_may_lose_a_little_for_each_of_its_rows() -> None:
    losses = started(a=1, b=8)
    assert 0.0 < losses.budget("a") < 1.0
    assert losses.budget("b") == pytest.approx(8 * losses.budget("a"))


def test_a_full_batch_may_lose_little() -> None:
    """32 rows of 40 tokens each: 1.5 % of them."""
    assert started(a=32).budget("a") < 0.015 * 32 * 40


def test_looks_end_before_drafts_have_no_budget_left() -> None:
    losses = started(a=4)
    assert losses.can_look_up("a", 1.0)
    losses.charge("a", 1.8)
    assert not losses.can_look_up("a", 0.0)
    assert losses.budget("a") > 0.0
    losses.begin_step(100, {"a": 4})
    assert losses.can_look_up("a", 0.1)


def test_a_loss_is_reduced_by_a_small_part_of_each_token() -> None:
    losses = started(a=2)
    losses.charge("a", 2.0)
    assert losses.budget("a") < 0.0
    losses.begin_step(300, {"a": 2})
    initial_budget = losses.budget("a")
    losses.begin_step(301, {"a": 2})
    assert 0.0 < losses.budget("a") - initial_budget < 0.02 * 2
    assert initial_budget > 0.0


def test_savings_beyond_a_few_tokens_do_not_count() -> None:
    """And fewer behind the sequence that brought them: the tenant's next text may be another."""
    losses = started(a=1)
    initial_budget = losses.budget("a")
    losses.charge("a", -1000.0)
    losses.begin_step(2, {"a": 1})
    assert 2.0 < losses.budget("a") < 3.0
    losses.end_sequence("a")
    assert initial_budget < losses.budget("a") < 1.0
    losses.charge("unknown", -1000.0)
    losses.end_sequence("unknown")


def test_few_rows_do_not_begin_with_the_loss_of_many_nor_many_with_new_credit() -> None:
    losses = started(a=64)
    losses.charge("a", 32.0)
    losses.begin_step(2, {"a": 1})
    assert 0.0 < losses.budget("a") < 0.1
    losses.begin_step(3, {"a": 64})
    assert losses.budget("a") == pytest.approx(started(a=64).budget("a") - 32.0, abs=1.0)


def test_reading_leaves_drafts_their_budget_and_nothing_more_is_read_until_they_paid_it() -> None:
    losses = started(a=1)
    initial_budget = losses.budget("a")
    assert losses.can_read("a")
    assert not losses.can_read("a", 0.6)  # others of the same step
    losses.charge_reading("a", 2.0)
    assert losses.budget("a") == pytest.approx(initial_budget)
    assert losses.can_draft("a")
    assert not losses.can_read("a")
    losses.charge("a", initial_budget)
    assert not losses.can_draft("a")
    losses.charge("a", -2.4)
    assert losses.can_draft("a")
    assert losses.can_read("a")
    losses.begin_step(50, {"a": 1})
    losses.begin_step(51, {"a": 1})
    assert losses.budget("a") < initial_budget + 1.0  # what was read is paid


def test_reading_that_brings_nothing_is_tried_again_in_time() -> None:
    losses = started(a=1)
    losses.charge_reading("a", 2.0)
    losses.begin_step(100, {"a": 1})
    assert not losses.can_read("a")
    losses.begin_step(400, {"a": 1})
    assert losses.can_read("a")


def test_tenants_pay_for_themselves_alone() -> None:
    losses, untouched = started(a=1, b=1), started(a=1, b=1)
    losses.charge("a", 5.0)
    losses.begin_step(50, {"a": 1, "b": 1})
    untouched.begin_step(50, {"a": 1, "b": 1})
    assert losses.budget("b") == untouched.budget("b")
    assert losses.budget("a") < untouched.budget("a")


def test_tenants_that_are_long_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TENANTS", 2)
    losses = started(a=1, b=1)
    losses.charge("b", 2.0)
    losses.begin_step(2, {"a": 1, "c": 1})
    losses.charge("b", 2.0)  # unknown by now
    losses.begin_step(3, {"b": 1})
    assert losses.budget("b") == started(b=1).budget("b")


def test_the_time_that_planning_takes_is_a_drafts_too() -> None:
    """A draft that is sure to hold brings half as much as the step of two rows."""
    costs, drawing = StepTimes(), StepTimes()
    for _ in range(100):
        for width in (1, 2, 3, 4):
            costs.record(width, 0.01)
        drawing.record(1, 0.001)
    planner = Planner(costs, drawing, started(a=2), max_drafts=1)
    for planning, paid in ((0.001, True), (0.02, False)):
        step = DraftStep(2, 4, 0, planning)
        planner.choose([DraftOffer([1.0], 7, "a")], step)
        assert planner.pays is paid
        assert (planner.min_log_odds(step, 0.0) < inf) is paid
