"""The compiled decoder and sampling, int8 KV caches: tokens are the same without them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.models.decoder import NativeDecoder
from kernels.cpu.features import cpu_flags
from tests.engine.models import FAMILIES, Oracle
from tests.engine.plain_paths import layer_by_layer, sampling_by_torch
from tests.engine.test_token_equality import OUTPUT, make, mixed_prompts, run

Folder = Callable[[str], Path]
PROMPTS = mixed_prompts(12)


pytestmark = pytest.mark.usefixtures("compiler")


def is_compiled(llm: LLM) -> bool:
    model = llm.core.executor.worker.loaded.model
    assert isinstance(model, NativeDecoder)
    return model.compiled


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_by_layer_and_in_one_call_give_the_same_tokens(
    family: str, model_folder: Folder, oracle: Callable[[str], Oracle]
) -> None:
    one_call = make(model_folder(family))
    with layer_by_layer(), sampling_by_torch():
        baseline_llm = make(model_folder(family))
    assert is_compiled(one_call)
    assert not is_compiled(baseline_llm)
    outputs = run(one_call, PROMPTS)
    assert outputs == run(baseline_llm, PROMPTS)
    assert outputs == oracle(family).greedy_all(PROMPTS, OUTPUT, outputs)


def test_what_cannot_run_in_one_call_says_why(
    model_folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert not is_compiled(make(model_folder("llama"), cpu_kernels=False))
    assert "LlamaForCausalLM runs layer by layer: reference kernels" in caplog.text


SAMPLED = [
    SamplingParams(temperature=0.8, seed=1, max_tokens=OUTPUT, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.8, seed=2, max_tokens=OUTPUT, ignore_eos=True),
    SamplingParams(temperature=1.2, top_k=20, seed=3, max_tokens=OUTPUT, ignore_eos=True),
    SamplingParams(temperature=0.7, min_p=0.1, seed=4, max_tokens=OUTPUT, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, presence_penalty=0.5),
    SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True),
    SamplingParams(
        temperature=1.0, top_k=300, top_p=0.9, seed=5, max_tokens=OUTPUT, ignore_eos=True,
        logprobs=2, logit_bias={7: 3.0},
    ),
]  # fmt: skip


def test_sampled_tokens_are_the_same_with_torch_and_with_the_kernels(model_folder: Folder) -> None:
    def sampled() -> list[list[int]]:
        llm = make(model_folder("llama"))
        results = llm.generate(PROMPTS[: len(SAMPLED)], SAMPLED, use_tqdm=False)
        return [result.outputs[0].token_ids for result in results]

    by_kernels = sampled()
    with sampling_by_torch():
        assert sampled() == by_kernels


@pytest.mark.parametrize("path", [nullcontext, layer_by_layer])
@pytest.mark.parametrize("family", ["llama", "qwen2-window"])
def test_int8_kv_caches_stay_close_and_batch_like_alone(
    family: str,
    path: Callable[[], AbstractContextManager[Any]],
    model_folder: Folder,
    oracle: Callable[[str], Oracle],
) -> None:
    with path():
        llm = make(model_folder(family), kv_cache_dtype="int8")
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompt = PROMPTS[9]
    exact = make(model_folder(family)).generate([prompt], params, use_tqdm=False)[0]
    close = llm.generate([prompt], params, use_tqdm=False)[0]
    assert exact.prompt_logprobs is not None
    assert close.prompt_logprobs is not None
    errors = [
        abs(exact.prompt_logprobs[i][token].logprob - close.prompt_logprobs[i][token].logprob)
        for i, token in enumerate(prompt)
        if i
    ]
    assert 0 < sum(errors) / len(errors) < 0.25
    together = run(llm, PROMPTS)
    llm.core.reset_prefix_cache()
    assert [run(llm, [prompt])[0] for prompt in PROMPTS[:4]] == together[:4]


def test_an_int8_cache_holds_more_tokens(model_folder: Folder) -> None:
    sizes = {}
    for dtype in ("float32", "int8"):
        llm = make(model_folder("llama"), kv_cache_dtype=dtype)
        sizes[dtype] = llm.core.capacity.kv_bytes_per_token
    # 3 layers, keys and values, 2 heads of 16 values; int8 with a float32 scale a head.
    assert sizes == {"float32": 3 * 2 * 2 * 16 * 4, "int8": 3 * 2 * 2 * (16 + 4)}


def top_scores(llm: LLM) -> dict[int, float]:
    """Log probabilities of the likeliest tokens after the first prompt."""
    first = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    (result,) = llm.generate(PROMPTS[:1], first, use_tqdm=False)
    (scores,) = result.outputs[0].logprobs or ({},)
    return {token: score.logprob for token, score in scores.items()}


def test_rounded_activations_keep_scores_and_a_row_apart_from_its_batch(
    model_folder: Folder,
) -> None:
    """bf16 weights: scores stay within bf16's precision, tokens don't depend on the neighbours."""
    scores = []
    for rounded in (True, False):
        llm = make(model_folder("llama"), dtype="bfloat16", round_activations=rounded)
        isolated = [run(llm, [prompt])[0] for prompt in PROMPTS[:3]]
        assert run(llm, PROMPTS)[:3] == isolated
        scores.append(top_scores(llm))
    for token in scores[0].keys() & scores[1].keys():
        assert scores[0][token] == pytest.approx(scores[1][token], abs=0.2)
    assert ("avx512_bf16" in cpu_flags()) == (scores[0] != scores[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_attention_is_rounded_in_bfloat16_models_unless_batch_invariant(
    dtype: str, model_folder: Folder
) -> None:
    settings = {"dtype": dtype, "kv_cache_dtype": "bfloat16"}
    scores = top_scores(make(model_folder("llama"), **settings))
    with layer_by_layer():
        assert top_scores(make(model_folder("llama"), **settings)) == scores
    invariant = top_scores(make(model_folder("llama"), **settings, batch_invariant=True))
    assert (invariant != scores) == (dtype == "bfloat16" and "avx512_bf16" in cpu_flags())
