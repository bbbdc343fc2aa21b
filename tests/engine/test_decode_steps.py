"""Steps in one call: they run where they can, step aside where not, and change no token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from engine.scheduler.plan import StepPlan, StepResult
from engine.worker.decode import DecodeSteps
from tests.engine.models import FAMILIES, Oracle
from tests.engine.test_token_equality import OUTPUT, make, mixed_prompts, run

Folder = Callable[[str], Path]
PROMPTS = mixed_prompts(6)


pytestmark = pytest.mark.usefixtures("compiler")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each step, whether it ran in one call."""
    found: list[bool] = []
    inner = DecodeSteps.run

    def spy(self: DecodeSteps, plan: StepPlan) -> StepResult | None:
        result = inner(self, plan)
        if plan.seq_ids:
            found.append(result is not None)
        return result

    monkeypatch.setattr(DecodeSteps, "run", spy)
    return found


def outputs(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    results = llm.generate(PROMPTS[: len(params)], params, use_tqdm=False)
    return [result.outputs[0].token_ids for result in results]


def sampling(**options: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": OUTPUT, "ignore_eos": True, "temperature": 0, **options})


@pytest.mark.parametrize("family", FAMILIES)
def test_all_steps_but_the_prompts_run_in_one_call(
    family: str, model_folder: Folder, oracle: Callable[[str], Oracle], taken: list[bool]
) -> None:
    expected = [oracle(family).greedy(prompt, OUTPUT) for prompt in PROMPTS]
    assert run(make(model_folder(family)), PROMPTS) == expected
    assert sum(taken) >= OUTPUT - 1
    assert not taken[0]
    steps = len(taken)
    assert run(make(model_folder(family), compiled_step=False), PROMPTS) == expected
    assert len(taken) == steps


MIXED = [
    sampling(temperature=1.0, seed=1),
    sampling(temperature=0.7, top_p=0.8, seed=2**62 + 7),
    sampling(),
    sampling(temperature=1.3, top_k=9, min_p=0.05, seed=3, max_tokens=5),
]


def test_draws_are_the_same(model_folder: Folder, taken: list[bool]) -> None:
    folder = model_folder("llama")
    expected = outputs(make(folder, compiled_step=False), MIXED)
    assert not taken
    assert outputs(make(folder), MIXED) == expected
    assert any(taken)


@pytest.mark.parametrize(
    "wish",
    [
        {"logprobs": 2}, {"presence_penalty": 0.5}, {"min_tokens": 4, "ignore_eos": False},
        {"logit_bias": {5: 2.0}}, {"prompt_logprobs": 1}, {"bad_words": ["a"]},
    ],
)  # fmt: skip
def test_they_step_aside_for_what_python_does(
    wish: dict[str, object], model_folder: Folder, taken: list[bool]
) -> None:
    folder = model_folder("llama")
    # Alone after the others have ended, the last one needs Python no more.
    params = [sampling(**wish, max_tokens=4), sampling(max_tokens=8)]
    assert outputs(make(folder), params) == outputs(make(folder, compiled_step=False), params)
    assert not any(taken[:4])
    assert all(taken[4:])


def test_tokens_are_the_same_under_preemption(model_folder: Folder, taken: list[bool]) -> None:
    folder = model_folder("llama")
    llm = make(folder, num_gpu_blocks_override=12, block_size=8, max_model_len=64)
    assert run(llm, [prompt[:24] for prompt in PROMPTS]) == run(
        make(folder, compiled_step=False), [prompt[:24] for prompt in PROMPTS]
    )
    assert any(taken)
    assert llm.core.stats.num_preemptions_total or llm.core.snapshot().num_preemptions_total


def test_a_larger_step_runs_part_by_part(
    model_folder: Folder, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder("llama")
    expected = run(make(folder), PROMPTS)
    taken.clear()
    llm = make(folder)
    monkeypatch.setattr(llm.core.executor._runner._decodes, "_most", 3)
    assert run(llm, PROMPTS) == expected
    assert not any(taken)
