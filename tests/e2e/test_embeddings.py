"""A real embedding model, loaded by command, asked by the `openai` SDK."""

from __future__ import annotations

import math

import openai
import pytest

from tests.e2e.product import Product
from tests.engine.pooling.minilm import minilm_folder

TEXTS = ["The capital of France is Paris.", "Paris is in France.", "A cat sleeps all day."]


def cosine(a: list[float], b: list[float]) -> float:
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.hypot(*a) / math.hypot(*b)


def test_vectors_are_sentence_transformers_own(client: openai.OpenAI, minilm: str) -> None:
    from sentence_transformers import SentenceTransformer  # takes seconds

    oracle = SentenceTransformer(str(minilm_folder()), device="cpu", local_files_only=True)
    expected = oracle.encode(TEXTS)
    # The SDK asks for base64 when no format is named, and decodes it.
    packed = client.embeddings.create(model=minilm, input=TEXTS)
    baseline_response = client.embeddings.create(model=minilm, input=TEXTS, encoding_format="float")
    for answer in (packed, baseline_response):
        assert [entry.index for entry in answer.data] == [0, 1, 2]
        for entry, expected_tensor in zip(answer.data, expected, strict=True):
            assert entry.embedding == pytest.approx(expected_tensor.tolist(), abs=1e-5)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    vectors = [entry.embedding for entry in baseline_response.data]
    assert cosine(vectors[0], vectors[1]) > 0.8 > 0.2 > cosine(vectors[0], vectors[2])


def test_token_ids_are_taken(client: openai.OpenAI, minilm: str) -> None:
    ids = client.embeddings.create(model=minilm, input=[101, 4937, 102])
    text = client.embeddings.create(model=minilm, input="cat")
    assert ids.data[0].embedding == pytest.approx(text.data[0].embedding, abs=1e-6)


def test_dimensions_need_a_matryoshka_model(client: openai.OpenAI, minilm: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=minilm, input="cat", dimensions=64)
    assert caught.value.param == "dimensions"


def test_a_chat_with_it_is_refused_by_its_tasks(client: openai.OpenAI, minilm: str) -> None:
    with pytest.raises(openai.BadRequestError, match="It does: embed"):
        client.chat.completions.create(
            model=minilm, messages=[{"role": "user", "content": "Hello"}]
        )


def test_embeddings_of_the_chat_model_are_refused(client: openai.OpenAI, product: Product) -> None:
    with pytest.raises(openai.BadRequestError, match="It does: generate"):
        client.embeddings.create(model=product.model, input="cat")


def test_rerank_puts_the_answer_first(client: openai.OpenAI, minilm: str) -> None:
    body = {"model": minilm, "query": "Where is Paris?", "documents": TEXTS[::-1], "top_n": 2}
    answer = client.post("/rerank", body=body, cast_to=object)
    indices = [result["index"] for result in answer["results"]]  # type: ignore[index]
    assert len(indices) == 2
    assert 0 not in indices, "the cat is no answer"
