"""How the share of prompts beside decodes follows the machine's speed."""

from __future__ import annotations

import pytest

from engine.contract.sampling_params import SamplingParams
from engine.scheduler.plan import NewSequence, StepPlan
from engine.scheduler.prefill_pace import PrefillPace
from engine.scheduler.prefill_share import PrefillShare
from tests.engine.helpers import Driver

DECODES = 8


def paced(seconds_per_token: float) -> PrefillPace:
    """A pace that allows 0.1 s, beside eight decodes that take 10 ms."""
    scheduler = Driver(100, 512, prefill_share=PrefillShare(1, full_at=32)).scheduler
    pace = PrefillPace(scheduler, seconds_per_token, limit=0.1)
    for _ in range(50):
        pace.note(plan(0), 0.01)
    return pace


def plan(prompt_tokens: int) -> StepPlan:
    """A step of the decodes and a prompt."""
    counts = [1] * DECODES + [prompt_tokens] * bool(prompt_tokens)
    return StepPlan(1, list(range(len(counts))), counts)


@pytest.mark.parametrize("at_first", [0.0001, 0.001, 0.01])
def test_the_most_becomes_what_is_computed_in_the_limit(at_first: float) -> None:
    pace = paced(at_first)
    for _ in range(150):
        pace.note(plan(64), 0.01 + 64 * 0.0005)
    assert pace.seconds_per_token == pytest.approx(0.0005, rel=0.02)
    assert pace._scheduler.limits.share.most == pytest.approx(200, rel=0.03)
    assert pace._scheduler.limits.share.full_at == 32


def test_one_step_that_was_held_up_changes_little() -> None:
    pace = paced(0.0005)
    pace.note(plan(64), 30.0)
    assert pace._scheduler.limits.share.most > 180


def test_a_few_tokens_say_nothing() -> None:
    pace = paced(0.0005)
    pace.note(plan(8), 0.1)
    assert pace.seconds_per_token == 0.0005


def test_a_slow_machine_keeps_the_least() -> None:
    assert paced(1.0)._scheduler.limits.share.most == 32


def test_a_start_counts_as_more_than_its_last_token() -> None:
    pace = paced(0.0005)
    step = StepPlan(1, list(range(DECODES + 40)), [1] * (DECODES + 40))
    step.new = [
        NewSequence(seq_id, [], 0, 0, [], SamplingParams(), 0) for seq_id in range(DECODES, 48)
    ]
    for _ in range(150):
        pace.note(step, 0.01 + 40 * 8 * 0.001)
    assert pace.seconds_per_token == pytest.approx(0.001, rel=0.02)
