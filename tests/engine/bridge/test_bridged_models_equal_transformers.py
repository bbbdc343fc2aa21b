"""Bridged models' greedy tokens equal those of `transformers` in float32, however they are run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.transformers_backend.model import TransformersModel
from tests.engine.bridge.conftest import GREEDY, Case, make, tokens
from tests.survey.bridged import CROSS_CHECKED

#: Plain, windowed in groups, MLA (keys longer than values), experts, heads of several sizes, norms
#: of an encoder's kind, attention modules that are called twice.
PAGED = (
    "arcee",
    "olmo3",
    "deepseek_v3",
    "dots1",
    "gemma4_unified_text",
    "biogpt",
    "diffllama",
)
STATES = ("jamba", "mamba", "qwen3_5_text", "lfm2_moe")
Cases = Callable[[str], Case]


@pytest.mark.parametrize("name", [*PAGED, *CROSS_CHECKED])
def test_together_and_with_a_warm_prefix_cache(name: str, case: Cases) -> None:
    expected = case(name)
    llm = make(expected.folder)
    assert isinstance(llm.core.executor.worker.loaded.model, TransformersModel)
    for cached in (0, 128):
        outputs = llm.generate(expected.prompts, GREEDY, use_tqdm=False)
        expected.guesses = [output.outputs[0].token_ids for output in outputs]
        assert expected.guesses == expected.greedy
        assert sum(output.num_cached_tokens for output in outputs) >= cached


@pytest.mark.parametrize("name", [*PAGED, *STATES])
def test_alone_with_chunked_prefill_of_16_tokens(name: str, case: Cases) -> None:
    expected = case(name)
    llm = make(expected.folder, max_num_batched_tokens=16, max_num_seqs=1)
    assert [tokens(llm, [prompt])[0] for prompt in expected.prompts[:4]] == expected.greedy[:4]


@pytest.mark.parametrize("name", ["arcee", "olmo3", *STATES])
def test_with_so_few_blocks_that_sequences_are_preempted(name: str, case: Cases) -> None:
    expected = case(name)
    blocks = 64 if name == "olmo3" else 40
    llm = make(
        expected.folder,
        num_gpu_blocks_override=blocks,
        block_size=4,
        max_num_batched_tokens=32,
        enable_prefix_caching=False,
    )
    assert tokens(llm, expected.prompts) == expected.greedy
    assert llm.core.scheduler.num_preemptions > 0


@pytest.mark.parametrize("name", STATES)
def test_states_are_no_prefix_and_go_with_their_sequences(name: str, case: Cases) -> None:
    expected = case(name)
    llm = make(expected.folder, max_num_batched_tokens=48, max_num_seqs=3)
    for _ in range(2):
        outputs = llm.generate(expected.prompts, GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected.greedy
        assert sum(output.num_cached_tokens for output in outputs) == 0
    model = llm.core.executor.worker.loaded.model
    assert isinstance(model, TransformersModel)
    assert model.stateful
    assert len(model._states) <= 3


@pytest.mark.parametrize("name", ["opt-350m", "glm4_moe-groups"])
def test_settings_that_the_native_decoder_refuses_go_to_the_bridge(name: str, case: Cases) -> None:
    expected = case(name)
    llm = make(expected.folder, model_impl="auto")
    assert isinstance(llm.core.executor.worker.loaded.model, TransformersModel)
    assert tokens(llm, expected.prompts) == expected.greedy


def test_a_rotary_base_is_set_in_the_bridge_too(
    checkpoint: Callable[[str], Path], case: Cases
) -> None:
    expected = case("llama")
    ours, theirs = (
        tokens(make(expected.folder, model_impl=impl, rope_theta=2e4), expected.prompts)
        for impl in ("quire", "transformers")
    )
    assert ours == theirs != expected.greedy


def test_windows_are_read_from_the_models_own_masks(checkpoint: Callable[[str], Path]) -> None:
    assert make(checkpoint("olmo3")).core.executor.worker.loaded.spec.sliding_windows == (24, 0)
    short = make(checkpoint("olmo3"), max_model_len=20)
    assert short.core.executor.worker.loaded.spec.sliding_windows == (0, 0)
    capped = make(checkpoint("olmo3"), disable_sliding_window=True)
    assert capped.core.executor.worker.loaded.spec.sliding_windows == (0, 0)
    assert capped.core.executor.worker.loaded.max_model_len == 24


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights_say_what_the_native_decoders_do(quantization: str, case: Cases) -> None:
    expected = case("llama")
    native, bridged = (
        make(expected.folder, model_impl=impl, quantization=quantization)
        for impl in ("quire", "transformers")
    )
    assert tokens(bridged, expected.prompts) == tokens(native, expected.prompts)
    full = make(expected.folder).core.executor.worker.loaded.model.decode_bytes
    assert bridged.core.executor.worker.loaded.model.decode_bytes < full / 2


def test_kept_weights_in_bfloat16_stay_close(case: Cases) -> None:
    expected = case("arcee")
    full_llm, half = (make(expected.folder, dtype=dtype) for dtype in ("float32", "bfloat16"))
    one, other = (llm.core.executor.worker.loaded.model.decode_bytes for llm in (full_llm, half))
    assert other < 0.7 * one
    prompt = expected.prompts[1]
    first_tokens = []
    for llm in (full_llm, half):
        output = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
        first_tokens.append(output.outputs[0].token_ids[0])
    assert first_tokens[0] == first_tokens[1]
