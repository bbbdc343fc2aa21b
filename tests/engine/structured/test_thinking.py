"""Reasoning before structured output, and its budget."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import InvalidRequest
from engine.contract.reasoning import ReasoningParams, ReasoningPhase, ReasoningState
from engine.contract.sampling_params import SamplingParams
from engine.core.engine_core import EngineCore
from engine.offline.llm import LLM
from tests.engine.structured.conftest import PROMPT, SETTINGS, finish, params, request, tokens

START, END = [7], [5, 6]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def phases(thinking: ReasoningState, tokens: list[int]) -> list[ReasoningPhase]:
    phases = []
    for token in tokens:
        thinking.advance(token)
        phases.append(thinking.phase)
    return phases


def test_reasoning_ends_with_its_mark() -> None:
    thinking = ReasoningState(ReasoningParams(end=[END]))
    assert phases(thinking, [1, 5, 1, 5, 6, 1])[3:] == [
        ReasoningPhase.INSIDE,
        ReasoningPhase.PAST,
        ReasoningPhase.PAST,
    ]
    assert not thinking.advance(1)


def test_an_output_that_begins_otherwise_has_none() -> None:
    inside = ReasoningState(ReasoningParams(end=[END], start=START))
    assert phases(inside, [7, 1]) == [ReasoningPhase.INSIDE, ReasoningPhase.INSIDE]
    past = ReasoningState(ReasoningParams(end=[END], start=START, budget=0))
    assert not past.advance(1)
    assert past.phase is ReasoningPhase.PAST


def test_the_budget_forces_the_end() -> None:
    thinking = ReasoningState(ReasoningParams(end=[END], close=[9, 5, 6], budget=2))
    assert phases(thinking, [1, 2]) == [ReasoningPhase.INSIDE, ReasoningPhase.CLOSING]
    forced = []
    while (token := thinking.forced_token) is not None:
        forced.append(token)
        thinking.advance(token)
    assert (forced, thinking.phase) == ([9, 5, 6], ReasoningPhase.PAST)
    assert ReasoningState(ReasoningParams(end=[END], budget=0)).forced_token == 5


@pytest.mark.parametrize(
    "fields",
    [
        {"end": []},
        {"end": [[]]},
        {"end": [[-1]]},
        {"end": [END], "budget": -1},
        {"end": [END], "close": [5]},
        {"end": [END], "start": [2**40]},
        {"end": [list(range(100))]},
    ],
)
def test_bad_params_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        ReasoningParams(**fields)
    assert (refusal.value.param or "").startswith("thinking")


def generate(llm: LLM, sampling: SamplingParams) -> Any:
    return llm.generate([PROMPT], sampling, use_tqdm=False)[0].outputs[0]


def marks(llm: LLM) -> tuple[list[int], list[int]]:
    """Token ids that stand for the tags."""
    tokenizer = llm.get_tokenizer()
    return tokenizer.encode("<a", add_special_tokens=False), tokenizer.encode(
        "</a>", add_special_tokens=False
    )


@pytest.mark.parametrize("budget", [0, 1, 9])
def test_json_comes_after_the_reasoning(llm: LLM, budget: int) -> None:
    _, end = marks(llm)
    thinking = ReasoningParams(end=[end], budget=budget)
    for seed in range(3):
        sampling = params(seed, json=SCHEMA, temperature=1.0, max_tokens=120)
        sampling.thinking = thinking
        output = generate(llm, sampling)
        ids = list(output.token_ids)
        assert ids[budget : budget + len(end)] == end
        answer = llm.get_tokenizer().decode(ids[budget + len(end) :])
        if output.finish_reason == "stop":
            assert isinstance(json.loads(answer)["a"], int)
        else:
            assert answer.lstrip().startswith("{") or not answer.strip()


def test_without_a_grammar_the_budget_holds_all_the_same(llm: LLM) -> None:
    _, end = marks(llm)
    free = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    baseline_token_ids = list(generate(llm, free).token_ids)
    bounded = free.clone()
    bounded.thinking = ReasoningParams(end=[end], budget=6)
    ids = list(generate(llm, bounded).token_ids)
    assert ids[:6] == baseline_token_ids[:6]
    assert ids[6 : 6 + len(end)] == end
    assert len(ids) == 20
    unbounded = free.clone()
    unbounded.thinking = ReasoningParams(end=[end])
    assert list(generate(llm, unbounded).token_ids) == baseline_token_ids


def test_a_grammar_holds_at_once_where_no_reasoning_begins(llm: LLM) -> None:
    start, end = marks(llm)
    sampling = params(1, json=SCHEMA, temperature=1.0, max_tokens=120)
    sampling.thinking = ReasoningParams(end=[end], start=start, budget=3)
    sampling.logit_bias = {start[0]: -100.0}
    text = generate(llm, sampling).text
    assert text.lstrip().startswith("{")
    sampling.logit_bias = {start[0]: 100.0}
    ids = list(generate(llm, sampling).token_ids)
    assert ids[: len(start)] == start
    assert ids[len(start) + 3 :][: len(end)] == end


def test_marks_outside_of_the_vocabulary_are_refused(llm: LLM) -> None:
    sampling = SamplingParams(thinking=ReasoningParams(end=[[10**9]]))
    with pytest.raises(InvalidRequest, match="vocabulary"):
        generate(llm, sampling)


def thoughtful(seed: int, core: EngineCore, *, form: bool, budget: int | None) -> SamplingParams:
    tokenizer = core.tokenizer
    assert tokenizer is not None
    fields: dict[str, Any] = {"regex": "[ab]{3,9}!"} if form else {}
    sampling = params(seed, max_tokens=40, **fields)
    end = tokenizer.encode("</a>", add_special_tokens=False)
    sampling.thinking = ReasoningParams(end=[end], budget=budget)
    return sampling


@pytest.fixture(params=[False, True], ids=["plain", "async"])
def core(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> EngineCore:
    settings = {**SETTINGS, "async_scheduling": request.param}
    return EngineCore(EngineConfig(model=str(model_folder("llama")), **settings))


def test_a_batch_gives_what_each_gives_alone(core: EngineCore) -> None:
    mixed = [(form, budget) for form in (False, True) for budget in (0, 3, 12)]
    messages = [
        request(thoughtful(seed, core, form=form, budget=budget), f"r{seed}")
        for seed, (form, budget) in enumerate([*mixed, (True, None)])
    ]
    isolated = {}
    for message in messages:
        core.add_request(message)
        isolated |= {key: tokens(deltas) for key, deltas in finish(core).items()}
    for message in messages:
        core.add_request(message)
    assert {key: tokens(deltas) for key, deltas in finish(core).items()} == isolated


@pytest.mark.parametrize("form", [False, True])
def test_an_output_goes_on_elsewhere_wherever_it_stood(core: EngineCore, form: bool) -> None:
    sampling = thoughtful(5, core, form=form, budget=6)
    core.add_request(request(sampling, "whole"))
    full_tokens = tokens(finish(core)["whole", 0])
    for index in range(1, len(full_tokens) - 1):
        core.add_request(request(sampling, f"rest{index}", resume_token_ids=[full_tokens[:index]]))
    outputs = finish(core)
    for index in range(1, len(full_tokens) - 1):
        assert full_tokens[:index] + tokens(outputs[f"rest{index}", 0]) == full_tokens
