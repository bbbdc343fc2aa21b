"""Steps in one call: they run where they can, step aside where not, and change no token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine import LLM, SamplingParams
from engine.sampling.request_state import RequestSamplingState
from engine.sampling.sampler import Sampler, SamplerOutput
from engine.scheduler.plan import StepPlan, StepResult
from engine.worker.compiled_step import CompiledStepRunner
from kernels import get
from tests.engine.models import FAMILIES, VOCAB, Oracle
from tests.engine.plain_paths import without_compiled_steps
from tests.engine.test_token_equality import OUTPUT, make, mixed_prompts, run

Folder = Callable[[str], Path]
PROMPTS = mixed_prompts(6)


pytestmark = pytest.mark.usefixtures("compiler")


@pytest.fixture
def compiled_steps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each step, whether it ran in one call."""
    matches: list[bool] = []
    inner = CompiledStepRunner.run

    def spy(self: CompiledStepRunner, plan: StepPlan) -> StepResult | None:
        result = inner(self, plan)
        if plan.seq_ids:
            matches.append(result is not None)
        return result

    monkeypatch.setattr(CompiledStepRunner, "run", spy)
    return matches


def outputs(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    results = llm.generate(PROMPTS[: len(params)], params, use_tqdm=False)
    return [result.outputs[0].token_ids for result in results]


def sampling(**options: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": OUTPUT, "ignore_eos": True, "temperature": 0, **options})


@pytest.mark.parametrize("family", FAMILIES)
def test_all_steps_but_the_prompts_run_in_one_call(
    family: str, model_folder: Folder, oracle: Callable[[str], Oracle], compiled_steps: list[bool]
) -> None:
    outputs = run(make(model_folder(family)), PROMPTS)
    assert outputs == oracle(family).greedy_all(PROMPTS, OUTPUT, outputs)
    assert sum(compiled_steps) >= OUTPUT - 1
    assert not compiled_steps[0]
    steps = len(compiled_steps)
    with without_compiled_steps():
        assert run(make(model_folder(family)), PROMPTS) == outputs
    assert len(compiled_steps) == steps


MIXED = [
    sampling(temperature=1.0, seed=1),
    sampling(temperature=0.7, top_p=0.8, seed=2**62 + 7),
    sampling(),
    sampling(temperature=1.3, top_k=9, min_p=0.05, seed=3, max_tokens=5),
]


def test_draws_are_the_same(model_folder: Folder, compiled_steps: list[bool]) -> None:
    folder = model_folder("llama")
    with without_compiled_steps():
        expected = outputs(make(folder), MIXED)
    assert not compiled_steps
    assert outputs(make(folder), MIXED) == expected
    assert any(compiled_steps)


WISHES: list[dict[str, object]] = [
    {"logprobs": 2}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.3, "temperature": 1.0},
    {"min_tokens": 4, "ignore_eos": False}, {"logit_bias": {5: 2.0}}, {"prompt_logprobs": 1},
    {"bad_words_token_ids": [[5, 6], [7]]}, {"allowed_token_ids": [3, 4, 5], "logprobs": 0},
    {"use_beam_search": True, "n": 2},
    {"logits_processors": [lambda output, logits: logits.roll(len(output))]},
]  # fmt: skip


CHOSEN_IN_THE_CALL: list[dict[str, object]] = [
    {"logprobs": 3, "frequency_penalty": 0.4, "temperature": 1.0},
    {"min_tokens": 4, "ignore_eos": False},
    {"bad_words_token_ids": [[5, 6], [7]], "logit_bias": {5: 2.0, 9: -3.0}},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3, "min_p": 0.1, "temperature": 0.8},
    {"allowed_token_ids": [3, 4, 5, 10, 11, 12], "logprobs": 0},
]


def scored(llm: LLM, params: list[SamplingParams]) -> list[object]:
    results = llm.generate(PROMPTS[: len(params)], params, use_tqdm=False)
    return [
        (result.outputs[0].token_ids, result.outputs[0].logprobs, result.prompt_logprobs)
        for result in results
    ]


@pytest.mark.parametrize("wish", WISHES, ids=lambda wish: "-".join(wish))
def test_one_unusual_sequence_leaves_the_others_in_the_call(
    wish: dict[str, object], model_folder: Folder, compiled_steps: list[bool]
) -> None:
    folder = model_folder("llama")
    params = [*MIXED, sampling(seed=9, **wish), sampling(**wish, max_tokens=4)]
    with without_compiled_steps():
        expected = scored(make(folder), params)
    assert not compiled_steps
    assert scored(make(folder), params) == expected
    # The prompts fill the first steps; from then on nothing leaves the call, unless a beam that
    # goes on from another one computes its last block anew.
    assert all(compiled_steps[compiled_steps.index(True) :]) != ("use_beam_search" in wish)
    assert sum(compiled_steps) >= OUTPUT - 1 or "use_beam_search" in wish


def test_only_what_asks_python_leaves_the_call(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    inner = Sampler.sample

    def spy(self: Sampler, logits: Tensor, *args: Any) -> SamplerOutput:
        seen.append(len(logits))
        return inner(self, logits, *args)

    monkeypatch.setattr(Sampler, "sample", spy)
    llm = make(model_folder("llama"))
    wish = sampling(logits_processors=[lambda output, logits: logits], max_tokens=5)
    outputs(llm, [wish, *(sampling(**options) for options in CHOSEN_IN_THE_CALL)])
    # The prompts' step; then the one that asks Python, until it ends.
    count = 1 + len(CHOSEN_IN_THE_CALL)
    assert sum(seen) == 4 + count
    assert seen[-4:] == [1] * 4


def test_the_sampler_is_plain_where_python_is_not_asked() -> None:
    sampler = Sampler([2], get("cpu", use_compiled=False))
    asks = ("use_beam_search", "logits_processors", "logprob_token_ids")
    for wish in (*WISHES, {"logprob_token_ids": [5]}):
        state = RequestSamplingState(sampling(**wish), [5, 6], [], 0)
        assert sampler.can_use_kernels(state) != any(option in wish for option in asks), wish
    assert not Sampler([2]).can_use_kernels(RequestSamplingState(sampling(), [5], [], 0))
    isolated_step_choice = sampler.step_choice(
        [RequestSamplingState(sampling(logit_bias={}), [5], [], 0)], VOCAB
    )
    assert isolated_step_choice is None


def test_tokens_are_the_same_under_preemption(
    model_folder: Folder, compiled_steps: list[bool]
) -> None:
    folder = model_folder("llama")
    llm = make(folder, num_gpu_blocks_override=12, block_size=8, max_model_len=64)
    prompts = [prompt[:24] for prompt in PROMPTS]
    with without_compiled_steps():
        expected = run(make(folder), prompts)
    assert run(llm, prompts) == expected
    assert any(compiled_steps)
    assert llm.core.stats.num_preemptions_total or llm.core.snapshot().num_preemptions_total


def test_a_larger_step_runs_part_by_part(
    model_folder: Folder, compiled_steps: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder("llama")
    expected = run(make(folder), PROMPTS)
    compiled_steps.clear()
    llm = make(folder)
    monkeypatch.setattr(llm.core.executor.worker._runner._compiled_step, "_max_rows", 3)
    assert run(llm, PROMPTS) == expected
    assert not any(compiled_steps)
