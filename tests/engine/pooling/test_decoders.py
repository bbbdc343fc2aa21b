"""Decoders as pooling models: chunks, cached prefixes and preemption change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from engine import LLM, PoolingParams
from engine.contract.errors import ConfigError, InvalidRequest, ModelLoadError
from tests.engine.pooling.models import DECODERS, TEXTS, change_config, make

Maker = Callable[..., Path]
LONG = [[(7 * index + start) % 190 for index in range(75)] for start in (5, 11, 30)]


def vectors(llm: LLM, prompts: Any, **params: Any) -> torch.Tensor:
    """[num_prompts, size]."""
    outputs = llm.embed(prompts, PoolingParams(**params), use_tqdm=False)
    return torch.tensor([output.outputs.embedding for output in outputs])


def expected(folder: Path, prompts: list[list[int]], kind: str) -> torch.Tensor:
    """What `transformers` gives, pooled and normalized here."""
    oracle = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    pooled = []
    for prompt in prompts:
        with torch.no_grad():
            hidden = oracle(torch.tensor([prompt])).last_hidden_state[0]
        pooled.append({"LAST": hidden[-1], "CLS": hidden[0], "MEAN": hidden.mean(0)}[kind])
    return torch.nn.functional.normalize(torch.stack(pooled), dim=-1)


@pytest.mark.parametrize("pooling_type", ["LAST", "MEAN", "CLS"])
@pytest.mark.parametrize("kind", DECODERS)
def test_embeddings_equal_transformers_in_chunks(
    kind: str, pooling_type: str, pooling_model: Maker
) -> None:
    folder = pooling_model(kind)
    llm = LLM(
        str(folder),
        pooler_config={"pooling_type": pooling_type},
        max_num_batched_tokens=16,
        num_gpu_blocks_override=32,
    )
    torch.testing.assert_close(
        vectors(llm, LONG), expected(folder, LONG, pooling_type), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_causal_model_is_made_to_embed(kind: str, pooling_model: Maker) -> None:
    folder = pooling_model(kind, "ForCausalLM")
    for settings in ({"runner": "pooling"}, {"convert": "embed"}):
        llm = LLM(str(folder), num_gpu_blocks_override=32, **settings)
        torch.testing.assert_close(
            vectors(llm, LONG), expected(folder, LONG, "LAST"), atol=1e-5, rtol=0
        )


def test_labels_equal_transformers(pooling_model: Maker) -> None:
    folder = pooling_model("llama", "ForSequenceClassification", num_labels=3)
    oracle = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    llm = LLM(str(folder), max_num_batched_tokens=32, num_gpu_blocks_override=32)
    for prompt, output in zip(LONG, llm.classify(LONG, use_tqdm=False), strict=True):
        with torch.no_grad():
            probs = oracle(torch.tensor([prompt])).logits[0].softmax(-1)
        torch.testing.assert_close(torch.tensor(output.outputs.probs), probs, atol=2e-5, rtol=0)


def test_a_cached_prefix_gives_the_same_vector(pooling_model: Maker) -> None:
    llm = LLM(str(pooling_model("llama")), num_gpu_blocks_override=32)
    (cold,) = llm.embed([LONG[0]], use_tqdm=False)
    (warm,) = llm.embed([LONG[0]], use_tqdm=False)
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 64)
    assert warm.outputs.embedding == pytest.approx(cold.outputs.embedding, abs=1e-6)


def test_only_last_pooling_reads_cached_prefixes(pooling_model: Maker) -> None:
    folder = str(pooling_model("llama"))
    mean = LLM(folder, pooler_config={"pooling_type": "MEAN"}, num_gpu_blocks_override=32)
    for _ in range(2):
        (output,) = mean.embed([LONG[0]], use_tqdm=False)
        assert output.num_cached_tokens == 0
    last = LLM(folder, num_gpu_blocks_override=32)
    last.embed([LONG[0]], use_tqdm=False)
    (full_output,) = last.encode([LONG[0]], pooling_task="token_embed", use_tqdm=False)
    assert full_output.num_cached_tokens == 0
    assert full_output.outputs.data.shape == (75, 32)


def test_preempted_prompts_begin_anew(pooling_model: Maker) -> None:
    folder = pooling_model("llama")
    # Each of the three fills the pool by itself: they push each other out.
    llm = LLM(
        str(folder),
        pooler_config={"pooling_type": "MEAN"},
        num_gpu_blocks_override=7,
        max_num_batched_tokens=32,
        long_prefill_token_threshold=16,
    )
    embeddings = vectors(llm, LONG)
    assert llm.core.snapshot().num_preemptions_total > 0
    torch.testing.assert_close(embeddings, expected(folder, LONG, "MEAN"), atol=1e-5, rtol=0)
    llm.core.check_integrity()
    assert llm.core.snapshot().num_free_blocks == 7


def test_all_tokens_come_in_order_from_chunks(pooling_model: Maker) -> None:
    folder = pooling_model("qwen3")
    llm = LLM(str(folder), max_num_batched_tokens=16, num_gpu_blocks_override=32)
    params = PoolingParams(task="token_embed", use_activation=False)
    (output,) = llm.encode([LONG[1]], params, pooling_task="token_embed", use_tqdm=False)
    oracle = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        hidden = oracle(torch.tensor([LONG[1]])).last_hidden_state[0]
    torch.testing.assert_close(output.outputs.data, hidden, atol=5e-5, rtol=5e-5)


def test_generation_on_a_pooling_model_names_its_tasks(pooling_model: Maker) -> None:
    llm = LLM(str(pooling_model("llama")), num_gpu_blocks_override=32)
    with pytest.raises(InvalidRequest, match=r"doesn't do 'generate'\. It does: embed") as caught:
        llm.generate("the fox", use_tqdm=False)
    assert caught.value.code == "unsupported_task"


def test_pooling_on_a_generating_model_names_its_task(pooling_model: Maker) -> None:
    llm = LLM(str(pooling_model("llama", "ForCausalLM")), num_gpu_blocks_override=32)
    for call in (llm.embed, llm.classify, llm.encode):
        with pytest.raises(InvalidRequest, match="It does: generate"):
            call(TEXTS, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="It does: generate"):
        llm.score("a", "b", use_tqdm=False)


def test_a_classifier_needs_its_weights(pooling_model: Maker) -> None:
    with pytest.raises(ModelLoadError, match=r"score\.weight"):
        LLM(str(pooling_model("llama", "ForCausalLM")), convert="classify")


def test_a_model_without_a_head_does_not_generate(pooling_model: Maker) -> None:
    with pytest.raises(ConfigError, match="doesn't generate text"):
        LLM(str(pooling_model("bert")), runner="generate")


def test_decoders_that_look_both_ways_are_refused(tmp_path: Path) -> None:
    folder = make("llama", tmp_path / "m")
    change_config(folder, is_causal=False)
    with pytest.raises(ModelLoadError, match="is_causal"):
        LLM(str(folder))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "overrides",
    [
        {"architectures": ["Qwen3ForSequenceClassification"], "is_original_qwen3_reranker": True},
        {"architectures": ["Qwen3ForCausalLM"], "method": "from_2_way_softmax"},
    ],
)
def test_a_reranker_is_made_of_two_tokens(
    overrides: dict[str, Any], tied: bool, pooling_model: Maker
) -> None:
    folder = pooling_model("qwen3", "ForCausalLM", tie_word_embeddings=tied)
    tokens = ["dog", "fox"]
    llm = LLM(
        str(folder),
        convert="classify",
        hf_overrides={**overrides, "classifier_from_token": tokens},
        num_gpu_blocks_override=32,
    )
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = [llm.get_tokenizer().piece_to_id(token) for token in tokens]
    for output in llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False):
        with torch.no_grad():
            logits = oracle(torch.tensor([output.prompt_token_ids])).logits[0, -1]
        expected = logits[torch.tensor(ids)].softmax(-1)[1]
        assert output.outputs.score == pytest.approx(float(expected), abs=1e-5)


def test_labels_are_made_of_tokens(pooling_model: Maker) -> None:
    folder = pooling_model("qwen3", "ForCausalLM")
    llm = LLM(
        str(folder),
        convert="classify",
        hf_overrides={"classifier_from_token": ["dog", "fox", "day"]},
        num_gpu_blocks_override=32,
    )
    (output,) = llm.classify(TEXTS[0], use_tqdm=False)
    assert output.outputs.labels == ["dog", "fox", "day"]
    assert sum(output.outputs.probs) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("tokens", [["nowhere"], "dog", [], ["dog", 1]])
def test_tokens_that_make_no_head_are_refused(tokens: Any, pooling_model: Maker) -> None:
    folder = pooling_model("qwen3", "ForCausalLM")
    with pytest.raises(ModelLoadError, match="classifier_from_token"):
        LLM(str(folder), convert="classify", hf_overrides={"classifier_from_token": tokens})


@pytest.mark.parametrize("quantization", ["int8", "bitsandbytes"])
def test_rounded_weights_embed_in_chunks_as_at_once(
    quantization: str, pooling_model: Maker
) -> None:
    options = {"quantization": quantization, "num_gpu_blocks_override": 32}
    folder = str(pooling_model("llama"))
    at_once = vectors(LLM(folder, **options), LONG)
    in_chunks = vectors(LLM(folder, max_num_batched_tokens=16, **options), LONG)
    torch.testing.assert_close(in_chunks, at_once, atol=1e-5, rtol=0)
    assert (at_once - vectors(LLM(folder, num_gpu_blocks_override=32), LONG)).abs().max() > 1e-4
