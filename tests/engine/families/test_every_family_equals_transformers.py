"""Each family's greedy tokens and log probabilities equal those of `transformers` in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.models.decoder import NativeDecoder
from tests.engine.families.conftest import NATIVE, OUTPUT, Case
from tests.engine.plain_paths import expert_by_expert, layer_by_layer
from tests.survey.recipes import RECIPES
from tests.survey.tiny import Oracle, make_checkpoint, prompts

NAMES = list(NATIVE)
STATES = (
    "bamba", "falcon_h1", "falcon_h1-norm", "granite4", "granite4-groups", "jamba",
    "kimi_linear", "lfm2",
    "lfm2-biases", "lfm2_moe", "mamba", "mamba-biases", "mamba2", "minimax", "nemotron_h",
    "qwen3_next", "recurrent_gemma", "zamba2", "zamba2-plain",
)  # fmt: skip
"""What carries a state."""
INDEXED = tuple(name for name, recipe in RECIPES.items() if "index_topk" in recipe)
LAYER_BY_LAYER = ("arctic", "gemma3n", *INDEXED)
"""What doesn't run in one call: experts beside attention, several hidden states, chosen latents."""
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)


def make(case: Case, **settings: Any) -> LLM:
    return LLM(
        str(case.folder),
        dtype="float32",
        num_gpu_blocks_override=160,
        max_model_len=256,
        # Tiny matrices: a second thread only waits, all the more on a busy machine.
        num_threads=1,
        **settings,
    )


@pytest.mark.parametrize("name", NAMES)
def test_prompts_together_and_with_a_warm_prefix_cache(
    name: str, case: Callable[[str], Case]
) -> None:
    expected = case(name)
    llm = make(expected)
    model = llm.core.executor.worker.loaded.model
    if isinstance(model, NativeDecoder) and model.ops.name.startswith("cpu-"):
        assert model.compiled == (name not in LAYER_BY_LAYER)
    for cached in (0, 128):
        outputs = llm.generate(expected.prompts, GREEDY, use_tqdm=False)
        expected.guesses = [output.outputs[0].token_ids for output in outputs]
        assert expected.guesses == expected.greedy
        total = sum(output.num_cached_tokens for output in outputs)
        assert total >= cached
    llm.core.check_integrity()


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_experts_one_by_one(name: str, case: Callable[[str], Case]) -> None:
    expected = case(name)
    with expert_by_expert():
        llm = make(expected)
    model = llm.core.executor.worker.loaded.model
    assert isinstance(model, NativeDecoder)
    assert not model.compiled
    outputs = llm.generate(expected.prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected.greedy


@pytest.mark.parametrize("name", NAMES)
def test_chunked_prefill_of_16_tokens_and_prompt_logprobs(
    name: str, case: Callable[[str], Case]
) -> None:
    expected = case(name)
    with layer_by_layer():
        llm = make(expected, max_num_batched_tokens=16, enable_prefix_caching=False)
    outputs = llm.generate(expected.prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected.greedy
    prompt = expected.longest
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    scores = llm.generate([prompt], params, use_tqdm=False)[0].prompt_logprobs
    assert scores is not None
    assert len(scores) == len(prompt)
    for position, entry in enumerate(scores[1:], start=1):
        assert entry is not None
        expected_item = expected.logprobs[position - 1, prompt[position]].item()
        assert entry[prompt[position]].logprob == pytest.approx(expected_item, abs=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_the_oracle_tells_families_apart(name: str, case: Callable[[str], Case]) -> None:
    """Were its outputs all the same token, equality would show nothing."""
    expected = case(name)
    assert len({tuple(tokens) for tokens in expected.greedy}) >= len(expected.prompts) - 2


def test_longrope_beyond_the_trained_length_uses_the_long_factors(tmp_path: Path) -> None:
    recipe = {**RECIPES["phi3-longrope"], "original_max_position_embeddings": 32}
    make_checkpoint(recipe, tmp_path)
    prompt = prompts((90,))[0]
    expected_logprobs = Oracle(tmp_path).logprobs(prompt)
    llm = LLM(str(tmp_path), dtype="float32", num_gpu_blocks_override=32, max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    scores = llm.generate([prompt], params, use_tqdm=False)[0].prompt_logprobs
    assert scores is not None
    logprobs = [entry[token].logprob for token, entry in zip(prompt, scores, strict=True) if entry]
    reference = [
        expected_logprobs[index - 1, prompt[index]].item() for index in range(1, len(prompt))
    ]
    assert logprobs == pytest.approx(reference, abs=2e-3)
