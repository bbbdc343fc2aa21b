"""Every encoder family gives what `transformers` gives, batched or alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from engine import LLM, PoolingParams
from tests.engine.pooling.models import ENCODERS, TEXTS

Maker = Callable[..., Path]
RAW = PoolingParams(use_activation=False)


@pytest.mark.parametrize("kind", ENCODERS)
def test_hidden_states_equal_transformers(kind: str, pooling_model: Maker) -> None:
    folder = pooling_model(kind)
    llm = LLM(str(folder))
    oracle = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    for output in llm.encode(TEXTS, RAW, pooling_task="token_embed", use_tqdm=False):
        with torch.no_grad():
            expected = oracle(torch.tensor([output.prompt_token_ids])).last_hidden_state[0]
        torch.testing.assert_close(output.outputs.data, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", ENCODERS)
def test_a_batch_gives_what_each_prompt_gives_alone(kind: str, pooling_model: Maker) -> None:
    llm = LLM(str(pooling_model(kind)))
    together = llm.embed(TEXTS, use_tqdm=False)
    for text, output in zip(TEXTS, together, strict=True):
        (isolated_output,) = llm.embed(text, use_tqdm=False)
        torch.testing.assert_close(
            torch.tensor(isolated_output.outputs.embedding),
            torch.tensor(output.outputs.embedding),
            atol=1e-6,
            rtol=0,
        )


@pytest.mark.parametrize("kind", ENCODERS)
def test_labels_equal_transformers(kind: str, pooling_model: Maker) -> None:
    folder = pooling_model(kind, "ForSequenceClassification", num_labels=3)
    oracle = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    for output in LLM(str(folder)).classify(TEXTS, use_tqdm=False):
        with torch.no_grad():
            logits = oracle(torch.tensor([output.prompt_token_ids])).logits[0]
        expected = logits.softmax(-1)
        torch.testing.assert_close(torch.tensor(output.outputs.probs), expected, atol=2e-5, rtol=0)
        assert output.outputs.label == f"LABEL_{int(expected.argmax())}"


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert"])
def test_token_labels_equal_transformers(kind: str, pooling_model: Maker) -> None:
    folder = pooling_model(kind, "ForTokenClassification", num_labels=4)
    oracle = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    llm = LLM(str(folder))
    for output in llm.encode(TEXTS, RAW, use_tqdm=False):
        with torch.no_grad():
            expected = oracle(torch.tensor([output.prompt_token_ids])).logits[0]
        torch.testing.assert_close(output.outputs.data, expected, atol=5e-5, rtol=5e-5)


def test_token_types_tell_the_parts_of_a_pair_apart(pooling_model: Maker) -> None:
    folder = pooling_model("bert", "ForSequenceClassification", num_labels=1)
    oracle = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    (output,) = LLM(str(folder)).score("the fox", "a lazy dog", use_tqdm=False)
    ids = output.prompt_token_ids
    split = ids.index(3) + 1
    types = torch.tensor([[0] * split + [1] * (len(ids) - split)])
    with torch.no_grad():
        baseline_item = oracle(torch.tensor([ids])).logits.sigmoid().item()
        expected = oracle(torch.tensor([ids]), token_type_ids=types).logits.sigmoid().item()
    assert output.outputs.score == pytest.approx(expected, abs=1e-5)
    assert abs(baseline_item - expected) > 1e-3


@pytest.mark.parametrize("kind", ["bert", "distilbert", "mpnet", "modernbert"])
def test_a_language_models_head_is_left_out(kind: str, pooling_model: Maker) -> None:
    folder = pooling_model(kind, "ForMaskedLM")
    oracle = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    (output,) = LLM(str(folder)).embed(TEXTS[1], use_tqdm=False)
    with torch.no_grad():
        hidden = oracle(torch.tensor([output.prompt_token_ids])).last_hidden_state[0]
    expected = torch.nn.functional.normalize(hidden[0], dim=-1)
    tensor = torch.tensor(output.outputs.embedding)
    torch.testing.assert_close(tensor, expected, atol=1e-5, rtol=0)


def test_bfloat16_weights_stay_close(pooling_model: Maker) -> None:
    folder = pooling_model("bert")
    (exact,) = LLM(str(folder)).embed(TEXTS[0], use_tqdm=False)
    (rounded,) = LLM(str(folder), dtype="bfloat16").embed(TEXTS[0], use_tqdm=False)
    cosine = torch.nn.functional.cosine_similarity(
        torch.tensor(exact.outputs.embedding), torch.tensor(rounded.outputs.embedding), dim=0
    )
    assert 0.99 < float(cosine) < 0.999999
