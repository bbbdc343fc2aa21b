"""What an offline prompt may hold, and what `LLM` leaves alone of the process it lives in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.contract.config import EngineConfig
from engine.contract.errors import InvalidRequest

PROMPT = "the quick brown fox jumps over the lazy dog and the quick brown fox jumps again"


@pytest.fixture(scope="module")
def llm(model_folder: Callable[[str], Path]) -> Iterator[LLM]:
    made = LLM(
        str(model_folder("llama")), num_gpu_blocks_override=200, max_model_len=128, block_size=4
    )
    yield made
    made.core.check_integrity()


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
    before = torch.get_num_threads()
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
        torch.set_num_threads(before)
