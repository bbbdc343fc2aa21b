"""What a tenant's drafts may cost it."""

from __future__ import annotations

from math import inf

import pytest

from engine.speculative import estimates as module
from engine.speculative.estimates import DraftBudgets, StepTimes
from engine.speculative.planner import DraftOffer, DraftStep, Planner


def filled(step: int = 1, **rows: int) -> DraftBudgets:
    purses = DraftBudgets()
    purses.fill(step, rows)
    return purses


def test_a_new_tenant_may_try_a_little_for_each_of_its_rows() -> None:
    purses = filled(a=1, b=8)
    assert 0.0 < purses.left_for_looks("a") < purses.left("a") < 1.0
    assert purses.left("b") == pytest.approx(8 * purses.left("a"))


def test_looks_cost_what_there_is_for_them_and_what_drafts_brought() -> None:
    purses = filled(a=4)
    for_looks, drafts = purses.left_for_looks("a"), purses.left("a")
    purses.earn("a", 1.0)
    purses.pay_looks("a", for_looks)
    assert purses.left("a") == pytest.approx(drafts + 1.0)  # drafts keep what they brought
    purses.pay_looks("a", 0.75)
    assert purses.left_for_looks("a") == pytest.approx(0.25)
    assert purses.left("a") == pytest.approx(drafts + 0.25)
    purses.pay_looks("a", 1.0)
    assert purses.left_for_looks("a") < 0.0 < purses.left("a")  # and their own credit
    purses.fill(400, {"a": 4})
    assert purses.left_for_looks("a") > 0.0


def test_what_drafts_cost_comes_back_with_a_small_part_of_each_token() -> None:
    purses = filled(a=2)
    purses.pay("a", 2.0)
    assert purses.left("a") < 0.0
    purses.fill(300, {"a": 2})
    back = purses.left("a")
    purses.fill(301, {"a": 2})
    assert 0.0 < purses.left("a") - back < 0.02 * 2
    assert back > 0.0


def test_of_what_drafts_brought_a_tenant_keeps_little_and_the_sequence_the_rest() -> None:
    """Its next text may be another."""
    purses = filled(a=1)
    before = purses.left("a")
    rest = purses.earn("a", 1000.0)
    assert purses.left("a") - before == pytest.approx(1000.0 - rest)
    assert before < purses.left("a") < 1.0
    assert purses.earn("a", 1.0) == 1.0
    purses.pay("a", 0.2)
    assert purses.earn("a", 1.0) == pytest.approx(0.8)
    assert purses.earn("nobody", 1.0) == 0.0


def test_a_debt_of_many_rows_is_not_one_rows() -> None:
    purses = filled(a=64)
    purses.pay("a", 64.0)
    purses.fill(2, {"a": 1})
    assert purses.left("a") > -1.0


def owing(rows: int, drafts: float, read: float) -> DraftBudgets:
    """A tenant whose many rows owe so much, and of which one alone was left since."""
    purses = filled(a=rows)
    purses.pay("a", drafts)
    purses.pay_reading("a", read)
    purses.fill(2, {"a": 1})
    return purses


def test_but_it_is_theirs_again_once_they_are_as_many() -> None:
    """Batches that begin and end together would get new credit each."""
    purses = filled(a=32)
    may_read = purses.left_to_read("a")
    for step in range(2, 6, 2):
        purses.pay("a", 15.0)
        purses.pay_reading("a", 100.0)
        purses.fill(step, {"a": 1})
        assert purses.left_to_read("a") > -8.0
        for rows in (12, 32):
            purses.fill(step + 1, {"a": rows})
    assert purses.left("a") == pytest.approx(filled(a=32).left("a") - 30.0, abs=0.5)
    assert purses.left_to_read("a") == pytest.approx(may_read - 200.0, abs=1.5)


def test_what_few_rows_have_no_use_for_pays_what_many_owed() -> None:
    """In time, or as soon as drafts bring it."""
    patient, lucky = owing(32, 20.0, 20.0), owing(32, 20.0, 20.0)
    patient.fill(6000, {"a": 1})
    rest = lucky.earn("a", 100.0)
    assert 58.0 < rest < 62.0
    lucky.fill(3, {"a": 1})
    for purses in (patient, lucky):
        may_read = purses.left_to_read("a")
        purses.fill(6001, {"a": 1})
        purses.fill(6002, {"a": 32})
        assert purses.left("a") > filled(a=32).left("a") - 10.0
        assert purses.left_to_read("a") > may_read
    assert lucky.left("a") > filled(a=32).left("a") - 0.1


def test_what_is_read_keeps_no_draft_back_but_little_more_is_read_until_drafts_brought_it() -> None:
    purses = filled(a=1)
    before, to_read = purses.left("a"), purses.left_to_read("a")
    assert 0.0 < to_read < 1.0
    purses.pay_reading("a", 2.0)
    assert purses.left("a") == before
    assert purses.left_to_read("a") == pytest.approx(to_read - 2.0)
    purses.earn("a", 1.9)
    purses.fill(2, {"a": 1})
    assert purses.left("a") == pytest.approx(before, abs=0.01)  # it goes into what is owed
    assert 0.0 < purses.left_to_read("a") < to_read
    purses.earn("a", 1.0)
    purses.fill(3, {"a": 1})
    brought = purses.left_to_read("a") - to_read
    assert brought == pytest.approx(0.3)
    purses.pay_reading("a", 0.5)
    assert purses.left_to_read("a") == pytest.approx(to_read + brought - 0.5)


def test_what_was_read_for_nothing_is_forgiven_in_time() -> None:
    purses = filled(a=1)
    purses.pay_reading("a", 2.0)
    purses.fill(100, {"a": 1})
    assert purses.left_to_read("a") < 0.0
    purses.fill(400, {"a": 1})
    assert purses.left_to_read("a") > 0.0


def test_tenants_pay_for_themselves_alone() -> None:
    purses, untouched = filled(a=1, b=1), filled(a=1, b=1)
    purses.pay("a", 5.0)
    purses.fill(50, {"a": 1, "b": 1})
    untouched.fill(50, {"a": 1, "b": 1})
    assert purses.left("b") == untouched.left("b")
    assert purses.left("a") < untouched.left("a")


def test_tenants_that_are_long_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_TENANTS", 2)
    purses = filled(a=1, b=1)
    purses.earn("a", 2.0)
    purses.fill(2, {"a": 1, "c": 1})
    purses.earn("b", 2.0)  # it's nobody's
    purses.fill(3, {"b": 1})
    assert purses.left("b") == filled(b=1).left("b")


def test_the_time_that_planning_takes_is_a_drafts_too() -> None:
    """A draft that is sure to hold brings half as much as the step of two rows."""
    costs, drawing = StepTimes(), StepTimes()
    for _ in range(100):
        for width in (1, 2, 3, 4):
            costs.note(width, 0.01)
        drawing.note(1, 0.001)
    purses = DraftBudgets()
    purses.fill(1, {"a": 2})
    planner = Planner(costs, drawing, purses, most=1)
    for planning, paid in ((0.001, True), (0.02, False)):
        step = DraftStep(2, 4, 0, planning)
        planner.choose([DraftOffer([1.0], 7, "a")], step)
        assert planner.pays is paid
        assert (planner.needed_odds(step, 0.0) < inf) is paid


def test_a_head_follows_no_prompt_while_its_last_ones_are_owed_and_leaves_who_owes_more() -> None:
    purses = filled(a=1)
    assert purses.may_follow("a", 0.4, 0.0)
    assert not purses.may_follow("a", 0.4, 0.6)  # others of the same step
    purses.pay_reading("a", 0.5)
    assert not purses.may_follow("a", 0.4, 0.0)
    assert purses.may_go_on("a")
    purses.pay_reading("a", 0.4)
    assert not purses.may_go_on("a")
    purses.earn("a", 2.0)
    assert purses.may_go_on("a")
    assert purses.may_follow("a", 0.4, 0.0)


def test_a_full_batch_is_lent_little() -> None:
    """Whether a tenant's drafts hold is known after a few: 32 rows of 40 tokens each may owe one
    percent of them for drafts, half of one for what is read, and one prompt's reading more.
    """
    full, one = filled(a=32), filled(a=1)
    assert full.left("a") < 0.01 * 32 * 40
    assert full.left_to_read("a") < 0.005 * 32 * 40
    assert filled(a=16).left("a") == pytest.approx(16 * one.left("a"))
    assert filled(a=8).left_to_read("a") == pytest.approx(8 * one.left_to_read("a"))


def test_what_a_long_prompt_took_is_owed_whole() -> None:
    """However few rows there are: such prompts would be followed again and again."""
    purses = filled(a=1)
    assert purses.may_follow("a", 90.0, 0.0)
    purses.pay_reading("a", 90.0)
    purses.fill(2, {"a": 1})
    assert purses.left_to_read("a") == pytest.approx(-89.6, abs=0.1)
    purses.note_prompt("a", 10_000.0)
    assert -60.0 < purses.left_to_read("a") < -40.0


def test_a_step_that_has_few_of_the_rows_forgives_no_debt_of_the_others() -> None:
    purses = filled(a=8)
    purses.pay("a", 8.0)
    before = purses.left("a")
    purses.fill_beside(2, {"a": 1, "b": 2})
    assert purses.left("a") == pytest.approx(before, abs=0.1)
    assert purses.left("b") == filled(b=2).left("b")
