"""The engine's greedy tokens equal `transformers`' on the same float32 weights, however run."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from tests.engine.models import FAMILIES, VOCAB, Oracle

OUTPUT = 8
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
Folder = Callable[[str], Path]


def mixed_prompts(count: int = 18, seed: int = 5) -> list[list[int]]:
    """Prompts of 1 to 90 tokens; some share a prefix."""
    rng = random.Random(seed)
    stem = [rng.randrange(4, VOCAB) for _ in range(40)]
    lengths = [1, 2, 15, 16, 17, 31, 32, 33] + [rng.randint(3, 90) for _ in range(count - 8)]
    return [
        stem[: rng.choice((0, 0, 20, 40))] + [rng.randrange(4, VOCAB) for _ in range(length)]
        for length in lengths
    ]


@pytest.fixture(scope="module")
def expected(oracle: Callable[[str], Oracle]) -> Callable[..., list[list[int]]]:
    """family, what was said -> the oracle's tokens for `mixed_prompts()`, whatever was."""

    def get(family: str, guesses: list[list[int]] | None = None) -> list[list[int]]:
        return oracle(family).greedy_all(mixed_prompts(), OUTPUT, guesses)

    return get


def run(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    llm.core.check_integrity()
    assert llm.core.scheduler.kv.pool.num_free_blocks == llm.core.capacity.num_blocks
    return [output.outputs[0].token_ids for output in outputs]


def make(folder: Path, **settings: Any) -> LLM:
    defaults = {"num_gpu_blocks_override": 400, "max_model_len": 256, "dtype": "float32"}
    return LLM(str(folder), **{**defaults, **settings})


@pytest.mark.parametrize("family", FAMILIES)
def test_together_alone_and_with_a_warm_cache(
    family: str, model_folder: Folder, expected: Callable[..., list[list[int]]]
) -> None:
    llm = make(model_folder(family))
    outputs = run(llm, mixed_prompts())
    assert outputs == expected(family, outputs)
    warm = llm.generate(mixed_prompts(), GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in warm] == expected(family)
    assert sum(output.num_cached_tokens for output in warm) > 250
    llm.core.reset_prefix_cache()
    isolated = [run(llm, [prompt])[0] for prompt in mixed_prompts()[:8]]
    assert isolated == expected(family)[:8]


@pytest.mark.parametrize("family", FAMILIES)
def test_with_chunked_prefill_of_16_tokens(
    family: str, model_folder: Folder, expected: Callable[[str], list[list[int]]]
) -> None:
    llm = make(model_folder(family), max_num_batched_tokens=16)
    assert run(llm, mixed_prompts()) == expected(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_so_few_blocks_that_sequences_are_preempted(
    family: str, model_folder: Folder, expected: Callable[[str], list[list[int]]]
) -> None:
    # A model with three KV cache groups has blocks of a third of the size.
    blocks = 80 if family == "qwen2-window" else 40
    llm = make(
        model_folder(family),
        num_gpu_blocks_override=blocks,
        block_size=4,
        max_num_batched_tokens=64,
    )
    assert run(llm, mixed_prompts()) == expected(family)
    assert llm.core.scheduler.num_preemptions > 2


@pytest.mark.parametrize("block_size", [4, 32, 128])
def test_with_every_block_size(
    block_size: int, model_folder: Folder, expected: Callable[[str], list[list[int]]]
) -> None:
    llm = make(model_folder("mistral"), block_size=block_size)
    assert run(llm, mixed_prompts()) == expected("mistral")


def test_without_prefix_caching_and_without_the_compiled_kernels(
    model_folder: Folder, expected: Callable[[str], list[list[int]]]
) -> None:
    llm = make(model_folder("qwen3"), enable_prefix_caching=False, cpu_kernels=False)
    assert run(llm, mixed_prompts()) == expected("qwen3")


def test_with_priority_scheduling_under_preemption(
    model_folder: Folder, expected: Callable[[str], list[list[int]]]
) -> None:
    llm = make(
        model_folder("llama"),
        scheduling_policy="priority",
        num_gpu_blocks_override=40,
        block_size=4,
        max_num_batched_tokens=64,
    )
    prompts = mixed_prompts()
    outputs = llm.generate(
        prompts, GREEDY, use_tqdm=False, priority=[i % 3 for i in range(len(prompts))]
    )
    assert [output.outputs[0].token_ids for output in outputs] == expected("llama")
    assert llm.core.scheduler.num_preemptions > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_logprobs_are_the_oracles_within_tolerance(
    family: str, model_folder: Folder, oracle: Callable[[str], Oracle]
) -> None:
    llm = make(model_folder(family), max_num_batched_tokens=16)
    prompt = mixed_prompts()[12]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    result = llm.generate([prompt], params, use_tqdm=False)[0]
    reference = torch.log_softmax(oracle(family).logits(prompt), dim=-1)
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == len(prompt)
    assert result.prompt_logprobs[0] is None
    for position, entry in enumerate(result.prompt_logprobs):
        if entry is None:
            continue
        token = prompt[position]
        assert entry[token].logprob == pytest.approx(
            reference[position - 1, token].item(), abs=2e-3
        )
        best = int(reference[position - 1].argmax())
        assert entry[best].rank == 1


def test_bfloat16_weights_stay_close_to_float32(
    model_folder: Folder, oracle: Callable[[str], Oracle]
) -> None:
    llm = LLM(
        str(model_folder("llama")), dtype="bfloat16", num_gpu_blocks_override=64, max_model_len=256
    )
    prompt = mixed_prompts()[16]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    result = llm.generate([prompt], params, use_tqdm=False)[0]
    reference = torch.log_softmax(oracle("llama").logits(prompt), dim=-1)
    assert result.prompt_logprobs is not None
    errors = [
        abs(entry[prompt[i]].logprob - reference[i - 1, prompt[i]].item())
        for i, entry in enumerate(result.prompt_logprobs)
        if entry is not None
    ]
    assert sum(errors) / len(errors) < 0.25
