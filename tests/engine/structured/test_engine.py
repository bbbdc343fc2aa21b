"""Structured output beside everything else that a sequence may want or suffer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import InvalidRequest
from engine.contract.reasoning import ReasoningParams
from engine.contract.sampling_params import SamplingParams
from engine.core.engine_core import EngineCore
from engine.offline.llm import LLM
from engine.scheduler import StepPlan, StepResult
from tests.engine.plain_paths import without_compiled_steps
from tests.engine.structured.conftest import PROMPT, SETTINGS, finish, params, request, tokens

Folder = Callable[[str], Path]
PATTERN = r"[a-z]{3,9} [0-9]{4,20}!"
GRAMMAR = """
root ::= expr
expr ::= term (("+" | "-") term)*
term ::= [0-9]{1,3} | "(" expr ")"
"""
TAG = json.dumps(
    {
        "structures": [{"begin": "<f=a>", "schema": {"const": [1, 2]}, "end": "</f>"}],
        "triggers": ["<f="],
    }
)


def one(llm: LLM, sampling: SamplingParams) -> Any:
    return llm.generate([PROMPT], sampling, use_tqdm=False)[0].outputs[0]


@pytest.fixture
def core(model_folder: Folder) -> EngineCore:
    return EngineCore(EngineConfig(model=str(model_folder("llama")), **SETTINGS))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_regex_choice_and_grammar(llm: LLM, temperature: float) -> None:
    choices = ["yes", "no", "yes, but", 'a "quoted" \\ one', "新しい"]
    for seed in range(3):
        output = one(llm, params(seed, regex=PATTERN, temperature=temperature))
        assert output.finish_reason == "stop"
        assert re.fullmatch(PATTERN, output.text)
        output = one(llm, params(seed, choice=choices, temperature=temperature))
        assert output.finish_reason == "stop"
        assert output.text in choices
        output = one(llm, params(seed, grammar=GRAMMAR, temperature=temperature, max_tokens=99))
        if output.finish_reason == "stop":
            assert re.fullmatch(r"[-+()0-9]+", output.text)
            assert output.text.count("(") == output.text.count(")")


def test_every_choice_can_come(llm: LLM) -> None:
    choices = ["a", "b", "c"]
    expected_params = [params(seed, choice=choices, temperature=50.0) for seed in range(40)]
    results = llm.generate([PROMPT] * 40, expected_params, use_tqdm=False)
    assert {result.outputs[0].text for result in results} == set(choices)


def test_behind_a_grammars_end_eos_comes_whatever_else_forbids_it(llm: LLM) -> None:
    letters = list(range(3, llm.core.facts.vocab_size))
    assert not set(llm.core.facts.eos_token_ids) & set(letters)
    for against in ({"allowed_token_ids": letters}, {"min_tokens": 30}):
        # With log probabilities EOS is sampled; without them it's known to follow.
        output = one(llm, params(choice=["yes"], logprobs=0, **against))
        assert (output.text, output.finish_reason) == ("yes", "stop")


def test_a_structural_tag_binds_after_its_trigger_only(llm: LLM) -> None:
    bias = dict.fromkeys(llm.get_tokenizer().encode("<f="), 90.0)
    expected_params = [
        params(seed, structural_tag=TAG, max_tokens=80, logit_bias=bias, temperature=2.0)
        for seed in range(6)
    ]
    texts = [r.outputs[0].text for r in llm.generate([PROMPT] * 6, expected_params, use_tqdm=False)]
    assert any("<f=" in text for text in texts)
    for text in texts:
        for tail in text.split("<f=")[1:]:
            written = "a>[1,2]</f>"
            baseline_text = "".join(tail.split())
            assert baseline_text.startswith(written) or written.startswith(baseline_text)


def test_neighbours_without_a_grammar_keep_their_tokens(llm: LLM) -> None:
    baseline_params = [
        params(seed, temperature=temperature, max_tokens=24, ignore_eos=True)
        for seed, temperature in enumerate((0.0, 1.0, 0.0, 1.0))
    ]
    isolated_token_ids = [one(llm, request_params).token_ids for request_params in baseline_params]
    mixed: list[SamplingParams] = []
    for seed, item in enumerate(baseline_params):
        mixed += [params(seed, regex=PATTERN), item, params(seed, json_object=True)]
    results = llm.generate([PROMPT] * len(mixed), mixed, use_tqdm=False)
    assert [result.outputs[0].token_ids for result in results[1::3]] == isolated_token_ids


def test_structured_outputs_do_not_depend_on_their_neighbours(llm: LLM) -> None:
    expected_params = [params(seed, regex=PATTERN) for seed in range(6)]
    isolated_texts = [one(llm, request_params).text for request_params in expected_params]
    together = llm.generate([PROMPT] * 6, expected_params, use_tqdm=False)
    assert [result.outputs[0].text for result in together] == isolated_texts


def test_each_of_n_outputs_has_its_own_place_in_the_grammar(llm: LLM) -> None:
    result = llm.generate([PROMPT], params(regex=PATTERN, n=5), use_tqdm=False)[0]
    texts = [output.text for output in result.outputs]
    assert all(re.fullmatch(PATTERN, text) for text in texts)
    assert len(set(texts)) > 1


def test_logprobs_are_the_models_own_and_every_token_has_them(llm: LLM) -> None:
    free = one(llm, SamplingParams(temperature=0, max_tokens=1, logprobs=3))
    bound = one(llm, params(choice=["yes"], temperature=0, logprobs=3))
    quiet = one(llm, params(choice=["yes"], temperature=0))
    assert bound.token_ids == quiet.token_ids
    assert len(bound.logprobs) == len(bound.token_ids)
    raw = {token: entry.logprob for token, entry in free.logprobs[0].items()}
    top = {token: e.logprob for token, e in bound.logprobs[0].items() if token in raw}
    assert top == pytest.approx({token: raw[token] for token in top})
    assert len(top) >= 3


def test_a_complete_output_ends_whatever_min_tokens_and_ignore_eos_say(llm: LLM) -> None:
    for extra in ({"min_tokens": 40}, {"ignore_eos": True}, {"ignore_eos": True, "logprobs": 0}):
        output = one(llm, params(regex="[ab]{3}", **extra))
        assert output.finish_reason == "stop"
        assert re.fullmatch("[ab]{3}", output.text)


def test_eos_waits_for_min_tokens_where_the_grammar_could_end_sooner(llm: LLM) -> None:
    for seed in range(4):
        output = one(llm, params(seed, regex="a*", min_tokens=9, max_tokens=30))
        assert len(output.token_ids) >= 9
        assert set(output.text) == {"a"}
    output = one(llm, params(regex="a*", ignore_eos=True, max_tokens=12))
    assert (output.finish_reason, len(output.token_ids)) == ("length", 12)


def test_an_output_that_is_cut_ends_by_length(llm: LLM) -> None:
    output = one(llm, params(regex="[ab]{30}", max_tokens=5))
    assert (output.finish_reason, len(output.token_ids)) == ("length", 5)
    assert re.fullmatch("[ab]{5,}", output.text)


def test_penalties_biases_and_filters_choose_among_what_is_allowed(llm: LLM) -> None:
    extras: list[dict[str, Any]] = [
        {"repetition_penalty": 2.0, "presence_penalty": 2.0},
        {"top_k": 1},
        {"top_p": 0.1},
        {"min_p": 0.9},
        {"logit_bias": {5: 100.0, 2: 100.0}},
    ]
    for extra in extras:
        output = one(llm, params(regex=PATTERN, **extra))
        assert output.finish_reason == "stop"
        assert re.fullmatch(PATTERN, output.text)


def test_preempted_sequences_go_on_where_they_were(model_folder: Folder, llm: LLM) -> None:
    expected_params = [
        params(seed, regex="[a-z]{1,80}", max_tokens=40, min_tokens=30) for seed in range(6)
    ]
    expected = [
        result.outputs[0].token_ids for result in llm.generate([PROMPT] * 6, expected_params)
    ]
    small = LLM(str(model_folder("llama")), num_gpu_blocks_override=24, block_size=4)
    results = small.generate([PROMPT] * 6, expected_params, use_tqdm=False)
    assert small.core.scheduler.num_preemptions > 0
    assert [result.outputs[0].token_ids for result in results] == expected


@pytest.mark.parametrize("index", [1, 4, 9])
def test_another_replica_goes_on_after_the_tokens_so_far(core: EngineCore, index: int) -> None:
    sampling = params(7, regex=PATTERN)
    core.add_request(request(sampling, "whole"))
    full_tokens = tokens(finish(core)["whole", 0])
    assert len(full_tokens) > index
    core.add_request(request(sampling, "rest", resume_token_ids=[full_tokens[:index]]))
    deltas = finish(core)["rest", 0]
    assert full_tokens[:index] + tokens(deltas) == full_tokens
    assert deltas[0].start == index
    assert deltas[-1].finish_reason == "stop"


def test_a_resumed_output_that_is_complete_ends_at_once(core: EngineCore) -> None:
    sampling = params(regex="[ab]{3}")
    core.add_request(request(sampling, "whole"))
    full_tokens = tokens(finish(core)["whole", 0])
    core.add_request(request(sampling, "rest", resume_token_ids=[full_tokens[:-1]]))
    deltas = finish(core)["rest", 0]
    assert tokens(deltas) == full_tokens[-1:]
    assert deltas[-1].finish_reason == "stop"


def test_tokens_that_break_the_grammar_cannot_be_resumed(core: EngineCore) -> None:
    sampling = params(regex="[ab]{3}")
    for request_id in ("first", "cached"):
        message = request(sampling, request_id, resume_token_ids=[[50]])
        if request_id == "first":
            core.add_request(message)
            (delta,) = finish(core)[request_id, 0]
            assert delta.error is not None
            assert (delta.error.status, delta.error.param) == (400, "resume_token_ids")
        else:
            with pytest.raises(InvalidRequest):
                core.add_request(message)
    assert not core.requests


def test_a_failed_step_takes_nothing_from_the_grammar(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [request(params(seed, regex=PATTERN), f"r{seed}") for seed in range(3)]
    for message in messages:
        core.add_request(message)
    expected = {key: tokens(deltas) for key, deltas in finish(core).items()}
    execute, calls = core.executor.execute, []

    def fail_sometimes(plan: StepPlan) -> StepResult:
        calls.append(plan.step)
        if len(plan.seq_ids) > 1 and len(calls) % 5 == 0:
            raise RuntimeError("broken step")
        return execute(plan)

    monkeypatch.setattr(core.executor, "execute", fail_sometimes)
    for message in messages:
        core.add_request(message)
    assert {key: tokens(deltas) for key, deltas in finish(core).items()} == expected


def test_aborts_while_the_grammar_compiles_and_while_it_runs(core: EngineCore) -> None:
    core.add_request(request(params(regex=PATTERN, n=2), "early"))
    assert core.has_work
    (one_remaining,) = core.abort("early", 1)
    assert (one_remaining.index, one_remaining.finish_reason) == (1, "abort")
    assert [delta.finish_reason for delta in core.abort("early")] == ["abort"]
    assert (core.requests, core.structured.num_waiting) == ({}, 0)
    core.add_request(request(params(regex="[ab]{50}"), "running"))
    while not any(core.step()):
        assert core.has_work
    core.abort("running")
    assert finish(core) == {}


def test_a_model_without_a_tokenizer_refuses(model_folder: Folder) -> None:
    folder = str(model_folder("llama"))
    core = EngineCore(EngineConfig(model=folder, skip_tokenizer_init=True, **SETTINGS))
    with pytest.raises(InvalidRequest, match="tokenizer") as error:
        core.add_request(request(params(regex="a")))
    assert error.value.param == "structured_outputs"
    assert not core.requests
    assert not core.has_work


def test_a_compiled_step_masks_no_row_but_its_own(
    model_folder: Folder,
) -> None:
    """Grammars and limits on reasoning beside plain sequences, which are chosen in the call."""
    end = [61, 62]
    all_params = [
        params(1, regex=PATTERN),
        params(2),
        params(3, thinking=ReasoningParams(end=[end], budget=3), temperature=0.0),
        params(4, temperature=0.0),
    ]
    token_ids = []
    for path in (nullcontext, without_compiled_steps):
        with path():
            llm = LLM(str(model_folder("llama")), **SETTINGS)
        results = llm.generate([PROMPT] * len(all_params), all_params, use_tqdm=False)
        token_ids.append([result.outputs[0].token_ids for result in results])
    assert token_ids[0] == token_ids[1]
    assert re.fullmatch(PATTERN, results[0].outputs[0].text)
    assert results[2].outputs[0].token_ids[3:5] == end
