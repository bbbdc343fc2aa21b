"""What Open WebUI's backend asks of an OpenAI connection, call by call, on the running product.

Its package is too heavy to install for this; these are its requests: the check of a connection and
the list of models, a chat as it streams it, the small tasks beside it (a title, follow-ups), and
the vectors of its knowledge bases.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.product import Product

#: With ENABLE_FORWARD_USER_INFO_HEADERS; names are percent-encoded.
FORWARDED = {
    "X-OpenWebUI-User-Name": "Ren%C3%A9e",
    "X-OpenWebUI-User-Id": "5d0c1a6e-6f0b-4b0e-9d60-3f7c5f2b8a11",
    "X-OpenWebUI-User-Email": "renee@example.com",
    "X-OpenWebUI-User-Role": "user",
    "X-OpenWebUI-Chat-Id": "0b0f7f1c-5d0e-4f7f-8f0e-2d1c9d1f6f10",
}
TEXT = {"type": "text", "text": "What is the capital of France?"}


@pytest.fixture
def web(product: Product) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {product.api_key}", **FORWARDED}
    with httpx.Client(base_url=product.base_url, headers=headers, timeout=60) as client:
        yield client


def test_the_connection_is_checked_and_models_listed(web: httpx.Client, product: Product) -> None:
    listed = web.get("/models", headers={"Content-Type": "application/json"}).json()
    assert product.model in [model["id"] for model in listed["data"]]
    # One whose name is null is taken for nameless, and shown so.
    assert all(model.get("name", model["id"]) for model in listed["data"])
    refused = web.get("/models", headers={"Authorization": "Bearer wrong"})
    assert (refused.status_code, "error" in refused.json()) == (401, True)


def test_a_chat_as_it_streams_it(web: httpx.Client, product: Product) -> None:
    tool = {
        "type": "function",
        "function": {"name": "search", "description": "", "parameters": {"type": "object"}},
    }
    body: dict[str, Any] = {
        "stream": True,
        "model": product.model,
        # The last message is marked for caches, and an effort comes in an object of its own.
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{**TEXT, "cache_control": {"type": "ephemeral"}}]},
        ],
        "reasoning": {"effort": "low"},
        "stream_options": {"include_usage": True},
        "tools": [tool],
        "temperature": 0,
    }
    text, usage = "", None
    with web.stream("POST", "/chat/completions", json=body) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["x-quire-ignored-fields"] == "reasoning"
        lines = [line for line in reply.iter_lines() if line.startswith("data:")]
    assert lines.pop().removeprefix("data:").strip() == "[DONE]"
    for line in lines:
        chunk = json.loads(line.removeprefix("data:"))
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
    assert "Paris" in text
    assert usage is not None
    assert usage["completion_tokens"] > 0


def test_the_tasks_beside_a_chat(web: httpx.Client, product: Product) -> None:
    prompt = "### Task:\nGenerate a concise, 3-5 word title.\n### Output:\nJSON format"
    task = {
        "model": product.model,
        "messages": [{"role": "user", "content": prompt}],
        "stream": False,
        "max_completion_tokens": 1000,
    }
    reply = web.post("/chat/completions", json=task)
    assert reply.status_code == 200
    assert isinstance(reply.json()["choices"][0]["message"]["content"], str)


def test_the_vectors_of_a_knowledge_base(web: httpx.Client, minilm: str) -> None:
    # With RAG_EMBEDDING_PREFIX_FIELD_NAME each of them says what the texts are.
    texts = ["Paris is the capital of France.", "A cat sleeps."]
    body = {"input": texts, "model": minilm, "prefix": "passage: "}
    reply = web.post("/embeddings", json=body).json()
    assert [len(row["embedding"]) for row in reply["data"]] == [384, 384]
