"""all-MiniLM-L6-v2: our vectors are sentence-transformers' own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine import LLM, PoolingParams
from engine.contract.errors import ContextLengthExceeded
from tests.engine.pooling.minilm import minilm_folder

TEXTS = [
    "The capital of France is Paris.",
    "Paris is where the French government sits.",
    "A cat sleeps on the warm windowsill. " * 12,
    "über Straßen – Ελληνικά, 日本語, \U0001f600",
    "x",
    "[SEP] tokens in [MASK] a text",
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(minilm_folder()))


@pytest.fixture(scope="module")
def oracle() -> Any:
    # Here, for it takes seconds in each process that collects tests.
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(minilm_folder()), device="cpu", local_files_only=True)


def vectors(llm: LLM, texts: list[str]) -> np.ndarray:
    return np.array([out.outputs.embedding for out in llm.embed(texts, use_tqdm=False)])


def test_vectors_equal_sentence_transformers(llm: LLM, oracle: Any) -> None:
    ours, theirs = vectors(llm, TEXTS), oracle.encode(TEXTS)
    assert ours.shape == (len(TEXTS), 384)
    assert np.abs(ours - theirs).max() < 1e-6
    assert (ours * theirs).sum(axis=1).min() > 0.999999


def test_a_batch_gives_what_each_text_gives_alone(llm: LLM) -> None:
    together = vectors(llm, TEXTS)
    isolated = np.concatenate([vectors(llm, [text]) for text in TEXTS])
    assert np.abs(together - isolated).max() < 1e-6


@pytest.mark.parametrize(
    ("quantization", "minimum"),
    [("int8", 0.99), ("int4", 0.9), ("fp8", 0.99), ("bitsandbytes", 0.9)],
)
def test_rounded_weights_give_nearly_the_same_vectors(
    quantization: str, minimum: float, llm: LLM
) -> None:
    rounded = LLM(str(minilm_folder()), quantization=quantization)
    together, floats = vectors(rounded, TEXTS), vectors(llm, TEXTS)
    similarity = (together * floats).sum(axis=1)
    assert similarity.min() > minimum
    assert similarity.min() < 0.999999, "nothing was rounded"
    isolated = np.concatenate([vectors(rounded, [text]) for text in TEXTS])
    assert np.abs(together - isolated).max() < 1e-6


def test_truncation_is_the_tokenizers(llm: LLM, oracle: Any) -> None:
    long = "one two three four five six seven " * 80
    with pytest.raises(ContextLengthExceeded, match="at most 256"):
        llm.embed(long, use_tqdm=False)
    (ours,) = llm.embed(long, PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)
    assert len(ours.prompt_token_ids) == 256
    assert ours.prompt_token_ids[-1] == 102, "the [SEP] at the end must stay"
    assert np.abs(np.array(ours.outputs.embedding) - oracle.encode(long)).max() < 1e-6


def test_likeness_ranks_meaning(llm: LLM) -> None:
    outputs = llm.score(TEXTS[0], [TEXTS[1], TEXTS[2]], use_tqdm=False)
    paris, cat = (output.outputs.score for output in outputs)
    assert paris > 0.5 > 0.2 > cat


def test_all_tokens_have_vectors(llm: LLM) -> None:
    (output,) = llm.encode(TEXTS[0], pooling_task="token_embed", use_tqdm=False)
    assert output.outputs.data.shape == (len(output.prompt_token_ids), 384)


def test_encode_gives_what_the_model_is_for(llm: LLM) -> None:
    (text,) = llm.encode("cat", use_tqdm=False)
    (ids,) = llm.encode(prompt_token_ids=[[101, 4937, 102]], use_tqdm=False)
    assert text.outputs.embedding == pytest.approx(ids.outputs.embedding, abs=1e-6)
    assert len(ids.outputs.embedding) == 384
