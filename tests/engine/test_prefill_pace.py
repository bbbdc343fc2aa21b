"""How the share of prompts beside decodes follows the machine's speed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.scheduler.prefill_budget import PrefillBudget, PrefillLimits, PrefillLoad, PrefillPace
from engine.scheduler.step_builder import StepBuilder
from tests.engine.helpers import Driver

DECODES = 8


def paced(seconds_per_token: float, seconds_per_read: float = 0.0) -> PrefillPace:
    """A pace that allows 0.1 s, beside eight decodes that take 10 ms."""
    limits = Driver(
        100, 512, prefill_limits=PrefillLimits(1, saturation_decodes=32)
    ).scheduler.limits
    pace = PrefillPace(limits, seconds_per_token, 0.1, seconds_per_read)
    for _ in range(50):
        pace.update(PrefillLoad(), DECODES, 0.01)
    return pace


def record_steps(pace: PrefillPace, tokens: int, per_token: float, context: int = 0) -> None:
    """A step whose prompt tokens take so long each, and 1 us more for each token before them."""
    load = PrefillLoad()
    load.add(tokens, context)
    pace.update(
        load, DECODES, 0.01 + tokens * per_token + load.context_reads * 1e-6 * bool(context)
    )


@pytest.mark.parametrize("at_first", [0.0001, 0.001, 0.01])
def test_the_most_becomes_what_is_computed_in_the_limit(at_first: float) -> None:
    pace = paced(at_first)
    for _ in range(150):
        record_steps(pace, 64, 0.0005)
    assert pace.seconds_per_token == pytest.approx(0.0005, rel=0.05)
    assert pace._limits.share.max_prompt_tokens == pytest.approx(200, rel=0.05)
    assert pace._limits.share.saturation_decodes == 32


def test_one_step_that_was_held_up_changes_little() -> None:
    pace = paced(0.0005)
    record_steps(pace, 64, 0.5)
    assert pace._limits.share.max_prompt_tokens > 180


def test_a_few_tokens_say_nothing() -> None:
    pace = paced(0.0005)
    record_steps(pace, 8, 0.01)
    assert pace.seconds_per_token == 0.0005


def test_a_slow_machine_keeps_the_least() -> None:
    assert paced(1.0)._limits.share.max_prompt_tokens == 32


@pytest.mark.parametrize("at_first", [2e-8, 2e-5])
def test_what_context_costs_is_told_from_what_tokens_cost(at_first: float) -> None:
    pace = paced(0.001, at_first)
    for _ in range(300):
        for context in (1, 300, 4000):
            record_steps(pace, 64, 0.0005, context)
    assert pace.seconds_per_token == pytest.approx(0.0005, rel=0.1)
    assert pace.seconds_per_context_token == pytest.approx(1e-6, rel=0.1)
    assert pace._limits.share.context_cost_tokens == pytest.approx(500, rel=0.2)


def test_a_model_that_reads_no_context_is_never_past_learning() -> None:
    pace = paced(0.0005, 1e-6)
    for _ in range(300):
        for context in (0, 4000):
            load = PrefillLoad()
            load.add(64, context)
            pace.update(load, DECODES, 0.01 + 64 * 0.0005)
    assert pace.seconds_per_token == pytest.approx(0.0005, rel=0.3)
    assert 12_000 < pace._limits.share.context_cost_tokens <= 1 << 14


def test_a_short_step_is_as_long_as_prompts_may_take() -> None:
    pace = paced(0.0005)
    for _ in range(150):
        record_steps(pace, 64, 0.001)
    # 72 tokens take 74 ms.
    assert pace._limits.share.target_step_tokens == pytest.approx(0.1 / 0.074 * 72, rel=0.05)
    for _ in range(150):
        pace.update(PrefillLoad(), 100, 0.05)
    assert pace._limits.share.target_step_tokens == pytest.approx(200, rel=0.05)


def test_what_a_step_takes_beyond_its_prompts_and_decodes_is_its_encoders() -> None:
    """Such a step says nothing of prompts, and vectors share the time that these may take."""
    pace = paced(0.0005)
    share = pace._limits.share
    assert share.vector_cost_tokens == 1.0  # not measured yet
    for per_vector in (0.1, *[0.002] * 40):  # the first one builds caches
        load = PrefillLoad()
        load.add(64, 0)
        pace.update(load, DECODES, 0.01 + 64 * 0.0005 + 20 * per_vector, num_vectors=20)
    measured = pace._limits.share
    assert pace.seconds_per_token == 0.0005
    assert measured.max_prompt_tokens == share.max_prompt_tokens
    assert measured.target_step_tokens == share.target_step_tokens
    assert measured.vector_cost_tokens == pytest.approx(4.0, rel=0.05)
    pace.update(PrefillLoad(), DECODES, 0.001, num_vectors=20)  # faster than decodes alone
    assert pace._limits.share.vector_cost_tokens > 3.0


def test_encoders_and_prompts_share_the_time_of_a_step() -> None:
    budget = PrefillBudget(100, tokens_per_vector=4.0)
    assert budget.num_vectors == 25
    budget.consume(20, 0, starts=True)
    budget.consume_vectors(10)
    assert (budget.num_vectors, budget.tokens(0)) == (10, 40)
    budget.consume_vectors(30)
    assert (budget.num_vectors, budget.tokens(0)) == (0, 0)
    assert PrefillBudget(100).num_vectors is None


def test_heavy_tenants_encode_in_their_own_share_of_a_short_step() -> None:
    """The rest of the step is for the prompts and pictures of other tenants."""
    step = StepBuilder(0, 100, PrefillBudget(40, tokens_per_vector=2.0))
    heavy: Any = SimpleNamespace(name="heavy")
    step.split_prompt_budget([heavy], 20)
    sequences: list[Any] = [
        SimpleNamespace(request=SimpleNamespace(message=SimpleNamespace(tenant=tenant)))
        for tenant in ("heavy", "light")
    ]
    step.budget_of(sequences[0]).consume_vectors(9)
    assert [step.budget_of(sequence).num_vectors for sequence in sequences] == [1, 20]
