"""What an offline prompt may hold, and what `LLM` leaves alone of the process it lives in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    LLMEngine,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import EngineFault, InvalidRequest, QuireError

PROMPT = "the quick brown fox jumps over the lazy dog and the quick brown fox jumps again"


@pytest.fixture(scope="module")
def llm(model_folder: Callable[[str], Path]) -> Iterator[LLM]:
    llm = LLM(
        str(model_folder("llama")), num_gpu_blocks_override=200, max_model_len=128, block_size=4
    )
    yield llm
    llm.core.check_integrity()


def one(llm: LLM, prompt: Any) -> Any:
    return llm.generate(prompt, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)[0]


@pytest.mark.parametrize(
    "key",
    ["multi_modal_data", "mm_processor_kwargs", "encoder_prompt", "promt", "cache-salt"],
)
def test_fault_58_unknown_keys_of_a_prompt_are_refused_by_name(llm: LLM, key: str) -> None:
    for prompt in ({"prompt": "the"}, {"prompt_token_ids": [4, 5]}):
        with pytest.raises(InvalidRequest) as refusal:
            one(llm, {**prompt, key: {"image": "a picture"}})
        assert refusal.value.param == key
        assert key in refusal.value.message or "models" in refusal.value.message
    pooled = {"prompt": "the", key: "x"}
    with pytest.raises(InvalidRequest):
        llm.generate([{"prompt": "the"}, pooled], use_tqdm=False)


def test_keys_that_say_nothing_are_no_fault(llm: LLM) -> None:
    assert one(llm, {"prompt": "the", "multi_modal_data": None}).outputs[0].token_ids


def test_fault_58_prefixes_are_shared_only_under_the_same_salt(llm: LLM) -> None:
    assert one(llm, {"prompt": PROMPT, "cache_salt": "a"}).num_cached_tokens == 0
    assert one(llm, {"prompt": PROMPT, "cache_salt": "b"}).num_cached_tokens == 0
    assert one(llm, {"prompt": PROMPT}).num_cached_tokens == 0
    assert one(llm, {"prompt": PROMPT, "cache_salt": "a"}).num_cached_tokens > 0
    for salt in ("", 7):
        with pytest.raises(InvalidRequest) as refusal:
            one(llm, {"prompt": PROMPT, "cache_salt": salt})
        assert refusal.value.param == "cache_salt"


def test_more_prompts_than_a_server_would_queue(llm: LLM) -> None:
    count = 16_400
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    results = llm.generate([[4 + n % 50] for n in range(count)], params, use_tqdm=False)
    assert [result.prompt_token_ids for result in results] == [[4 + n % 50] for n in range(count)]
    assert all(len(result.outputs[0].token_ids) == 1 for result in results)


def test_max_num_seqs_that_was_asked_for_stays() -> None:
    assert EngineConfig(max_num_seqs=256, max_num_batched_tokens=64).max_num_seqs == 256
    assert EngineConfig(max_num_batched_tokens=64).max_num_seqs == 64
    assert EngineConfig().max_num_seqs == 256
    again = EngineConfig.from_mapping(EngineConfig(max_num_batched_tokens=64).to_mapping())
    assert again.max_num_seqs == 64


def test_torch_keeps_its_threads(model_folder: Callable[[str], Path]) -> None:
    initial_num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        llm = LLM(str(model_folder("llama")), num_gpu_blocks_override=50, max_model_len=64)
        assert torch.get_num_threads() == 2
        one(llm, "the")
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        one(llm, "the")
        assert torch.get_num_threads() == 1
        with pytest.raises(InvalidRequest):
            one(llm, [10**6])
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(initial_num_threads)


def _not_finite(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Spoils a request's logits after two tokens."""
    return logits * float("nan") if len(output) == 2 else logits


GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
NOT_FINITE = SamplingParams(
    temperature=0, max_tokens=6, ignore_eos=True, logits_processors=[_not_finite]
)
#: The grammar becomes too complex after some tokens.
GROWING = SamplingParams(
    temperature=1,
    seed=0,
    min_tokens=30,
    max_tokens=60,
    structured_outputs=StructuredOutputsParams(
        regex="".join(f"(a?b?){{{count}}}" for count in range(1, 200))
    ),
)
PROMPTS = [[5, 6, 7], [8, 9], [40, 41, 42, 43, 44], [5, 6, 7, 8]]
MIXED = [GREEDY, NOT_FINITE, GROWING, GREEDY]


def greedy(llm: LLM, prompt: list[int]) -> list[int]:
    return llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    """Tokens of the requests of `MIXED` that don't fail."""
    return [greedy(llm, PROMPTS[0]), greedy(llm, PROMPTS[3])]


def check_mixed(results: list[RequestOutput], expected: list[list[int]]) -> None:
    first, spoiled, broken, last = results
    assert [output.outputs[0].token_ids for output in (first, last)] == expected
    assert (first.error, last.error) == (None, None)
    assert isinstance(spoiled.error, EngineFault)
    assert "logits hold NaN" in spoiled.error.message
    assert len(spoiled.outputs[0].token_ids) == 2
    assert isinstance(broken.error, InvalidRequest)
    assert (broken.error.code, broken.error.param) == ("grammar_too_complex", "structured_outputs")
    assert [output.outputs[0].finish_reason for output in results] == [
        *("length", "error", "error", "length")
    ]
    assert all(output.finished for output in results)


def test_fault_64_of_a_batch_the_others_results_come(
    llm: LLM, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_mixed(llm.generate(PROMPTS, MIXED, use_tqdm=False), expected)
    assert "2 of 4 requests failed" in caplog.text
    llm.enqueue(PROMPTS, MIXED, use_tqdm=False)
    check_mixed(llm.wait_for_completion(use_tqdm=False), expected)
    assert not llm.core.requests
    assert greedy(llm, PROMPTS[0]) == expected[0]


def test_fault_64_where_all_fail_the_first_error_is_raised(
    llm: LLM, expected: list[list[int]]
) -> None:
    with pytest.raises(EngineFault, match="logits hold NaN"):
        llm.generate(PROMPTS[1:3], MIXED[1:3], use_tqdm=False)
    with pytest.raises(InvalidRequest, match="can't go on under its grammar"):
        llm.generate(PROMPTS[2], GROWING, use_tqdm=False)
    assert not llm.core.requests
    assert greedy(llm, PROMPTS[0]) == expected[0]


def test_fault_64_all_outputs_of_a_request_end_with_it(llm: LLM) -> None:
    several = SamplingParams(
        temperature=0, max_tokens=6, n=3, ignore_eos=True, logits_processors=[_not_finite]
    )
    failed, other = llm.generate(PROMPTS[:2], [several, GREEDY], use_tqdm=False)
    assert [output.finish_reason for output in failed.outputs] == ["error"] * 3
    assert other.outputs[0].finish_reason == "length"
    assert not llm.core.requests


def test_fault_64_a_step_hands_over_what_others_got_in_it(
    llm: LLM, expected: list[list[int]]
) -> None:
    engine: LLMEngine = llm.llm_engine
    for index, (prompt, params) in enumerate(zip(PROMPTS, MIXED, strict=True)):
        engine.add_request(str(index), prompt, params)
    finished_results: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        for result in engine.step():
            assert isinstance(result, RequestOutput)
            if result.finished:
                assert result.request_id not in finished_results
                finished_results[result.request_id] = result
    check_mixed([finished_results[str(index)] for index in range(4)], expected)


def test_fault_64_of_several_searches_one_fails(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
    (isolated,) = llm.beam_search([{"prompt_token_ids": PROMPTS[0]}], params)
    execute = llm.core.executor.execute

    def failing(plan: Any) -> Any:
        # The second search's beams: they are its only sequences in the end.
        if any(new.token_ids[:2] == PROMPTS[1] for new in plan.new):
            raise RuntimeError("The device hiccups.")
        return execute(plan)

    monkeypatch.setattr(llm.core.executor, "execute", failing)
    outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in PROMPTS[:2]], params)
    assert [sequence.tokens for sequence in outputs[0].sequences] == [
        sequence.tokens for sequence in isolated.sequences
    ]
    assert outputs[1].sequences == []
    assert "hiccups" in str(outputs[1].error)


def test_fault_64_of_several_searches_one_cant_be_decoded(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
    tokenizer = llm.llm_engine.tokenizer_of(None)
    assert tokenizer is not None
    decode = tokenizer.decode

    def failing(ids: Any, skip_special_tokens: bool = True) -> str:
        # Only a beam's whole text begins with its prompt.
        if list(ids)[:2] == PROMPTS[1][:2]:
            raise EngineFault("The model's tokenizer can't decode its tokens: it panics.")
        return decode(ids, skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", failing)
    first, second = llm.beam_search(
        [{"prompt_token_ids": PROMPTS[0]}, {"prompt_token_ids": PROMPTS[1]}], params
    )
    assert len(first.sequences) == 2
    assert first.error is None
    assert second.sequences == []
    assert "panics" in str(second.error)
    with pytest.raises(EngineFault, match="panics"):
        llm.beam_search([{"prompt_token_ids": PROMPTS[1]}], params)


async def _results(engine: AsyncLLM, prompt: list[int], params: SamplingParams) -> list[int]:
    async for result in engine.generate(prompt, params):
        tokens = result.outputs[0].token_ids
    return tokens


@pytest.mark.asyncio
async def test_fault_64_coroutines_hear_of_their_own_failures_alone(
    model_folder: Callable[[str], Path], expected: list[list[int]]
) -> None:
    engine = AsyncLLM(
        EngineConfig(
            model=str(model_folder("llama")),
            num_gpu_blocks_override=200,
            max_model_len=128,
            block_size=4,
        )
    )
    try:
        for _ in range(2):
            first, spoiled, broken, last = await asyncio.gather(
                *(_results(engine, *inputs) for inputs in zip(PROMPTS, MIXED, strict=True)),
                return_exceptions=True,
            )
            assert [first, last] == expected
            assert isinstance(spoiled, EngineFault)
            assert isinstance(broken, QuireError)
            assert broken.code == "grammar_too_complex"
            assert not engine.engine.has_unfinished_requests()
        await engine.check_health()
    finally:
        engine.shutdown()
