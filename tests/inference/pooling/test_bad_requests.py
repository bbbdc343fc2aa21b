"""What pooling endpoints refuse, before anything reaches an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine.contract.messages import PoolingInfo
from engine.text.tokenizer import Tokenizer
from tests.fakes.fake_replica import FakeReplica
from tests.inference.conftest import Gateway, until

ENDPOINTS = {
    "/v1/embeddings": {"input": "x"},
    "/pooling": {"input": "x"},
    "/classify": {"input": "x"},
    "/v1/classify": {"input": "x"},
    "/score": {"text_1": "x", "text_2": "y"},
    "/v1/score": {"text_1": "x", "text_2": "y"},
    "/rerank": {"query": "x", "documents": ["y"]},
    "/v1/rerank": {"query": "x", "documents": ["y"]},
    "/v2/rerank": {"query": "x", "documents": ["y"]},
}


@pytest.fixture
async def embedder(gateway: Gateway) -> AsyncIterator[FakeReplica]:
    """A replica that says that it embeds, and would fail a test by being asked."""
    fake = gateway.fake(max_model_len=64)
    fake.model.tasks = ["embed", "token_embed", "score"]
    fake.model.pooling = PoolingInfo(embedding_size=32, matryoshka=[8, 16])
    async with gateway.serving(fake):
        yield fake
        assert fake.received == []


async def refused(gateway: Gateway, path: str, body: dict[str, Any], status: int = 400) -> Any:
    reply = await gateway.client.post(path, {"model": "fake", **body})
    assert reply.status == status, reply.body
    return reply.error


@pytest.mark.parametrize(
    ("value", "param"),
    [
        (None, "input"),
        ("", "input"),
        ([], "input"),
        ([""], "input[0]"),
        (["a", ""], "input[1]"),
        ([[]], "input"),
        (["a", 1], "input[1]"),
        ([["a"]], "input"),
        ([[1], "a"], "input"),
        ({"a": 1}, "input"),
        (7, "input"),
        ([True], "input"),
        ([1.5], "input"),
        ([-1], "input"),
        ([10**9], "input"),
        ([[5], [512]], "input"),
    ],
)
async def test_fault_02_and_03_inputs(
    gateway: Gateway, embedder: FakeReplica, value: Any, param: str
) -> None:
    error = await refused(gateway, "/v1/embeddings", {"input": value})
    assert error["param"] == param


async def test_fault_04_too_many_inputs(gateway: Gateway, embedder: FakeReplica) -> None:
    for path, body in (
        ("/v1/embeddings", {"input": ["a"] * 2049}),
        ("/score", {"text_1": "a", "text_2": ["a"] * 2049}),
        ("/rerank", {"query": "a", "documents": ["a"] * 2049}),
    ):
        assert "2049" in (await refused(gateway, path, body))["message"]


async def test_fault_04_too_many_tokens_in_all(
    gateway: Gateway, embedder: FakeReplica, settings: Any
) -> None:
    settings.QUIRE = settings.QUIRE.replace(max_pooling_tokens=10)
    bodies: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/embeddings", {"input": [[5] * 6, [5] * 6]}, "input"),
        ("/v1/embeddings", {"input": ["a text of tokens"] * 9}, "input"),
        ("/score", {"text_1": "a text", "text_2": ["a text of tokens"] * 9}, "text_2"),
    ]
    for path, body, param in bodies:
        error = await refused(gateway, path, body)
        assert "more than 10 tokens in all" in error["message"]
        assert error["param"] == param


async def test_fault_53_texts_behind_what_is_too_much_are_never_tokenized(
    gateway: Gateway, embedder: FakeReplica, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.QUIRE = settings.QUIRE.replace(max_pooling_tokens=10)
    read: list[str] = []
    encode_parts = Tokenizer.encode_parts

    def counted(self: Tokenizer, first: str, *args: Any, **kwargs: Any) -> Any:
        read.append(first)
        return encode_parts(self, first, *args, **kwargs)

    monkeypatch.setattr(Tokenizer, "encode_parts", counted)
    await refused(gateway, "/v1/embeddings", {"input": ["a text of several tokens"] * 2048})
    assert 1 <= len(read) < 20


async def test_fault_04_more_vectors_than_can_be_carried(
    gateway: Gateway, embedder: FakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.api.pooling.job.MAX_RESULT_BYTES", 1000)
    body = {"input": [[5] * 8], "task": "token_embed"}
    error = await refused(gateway, "/pooling", body)
    assert "1024 bytes of vectors; at most 1000" in error["message"]
    assert error["param"] == "input"


async def test_fault_04_a_query_is_counted_beside_each_document(
    gateway: Gateway, settings: Any
) -> None:
    settings.QUIRE = settings.QUIRE.replace(max_body_bytes=2000)
    ranker = gateway.fake()
    ranker.model.tasks = ["classify", "score"]
    ranker.model.pooling = PoolingInfo(embedding_size=1, labels=["LABEL_0"])
    async with gateway.serving(ranker):
        body = {"query": "q" * 500, "documents": ["d"] * 10}
        error = await refused(gateway, "/rerank", body)
    assert (error["param"], "5010 characters" in error["message"]) == ("documents", True)
    assert ranker.received == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dimensions", 0),
        ("dimensions", "8"),
        ("dimensions", 9),
        ("dimensions", 64),
        ("encoding_format", "int8"),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", 65),
        ("truncate_prompt_tokens", 2**63),
        ("priority", -5),
        ("stream", True),
        ("return_token_ids", True),
        ("messages", [{"role": "user", "content": "x"}]),
        ("embed_dtype", "float64"),
        ("endianness", "middle"),
        ("padding", "max_length"),
        ("truncation_side", "middle"),
        ("chat_template", "{{ 1 }}"),
    ],
)
async def test_fault_05_14_18_fields(
    gateway: Gateway, embedder: FakeReplica, field: str, value: Any
) -> None:
    error = await refused(gateway, "/v1/embeddings", {"input": "abc", field: value})
    assert error["param"] == field


async def test_fault_06_over_the_context_with_both_numbers(
    gateway: Gateway, embedder: FakeReplica
) -> None:
    error = await refused(gateway, "/v1/embeddings", {"input": [[5] * 65]})
    assert error["message"] == "The input has 65 tokens, but the model takes at most 64."
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text_2": "y"}, "text_1"),
        ({"text_1": "x"}, "text_2"),
        ({"text_1": ["x", "y"], "text_2": ["z"]}, "text_2"),
        ({"text_1": "x", "text_2": [["y"]]}, "text_2[0]"),
    ],
)
async def test_score_needs_two_sides(
    gateway: Gateway, embedder: FakeReplica, body: Any, param: str
) -> None:
    assert (await refused(gateway, "/score", body))["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": ["y"]}, "query"),
        ({"query": "", "documents": ["y"]}, "query"),
        ({"query": "x"}, "documents"),
        ({"query": "x", "documents": []}, "documents"),
        ({"query": "x", "documents": [{"title": "y"}]}, "documents[0]"),
        ({"query": "x", "documents": ["y"], "top_n": -1}, "top_n"),
    ],
)
async def test_rerank_needs_a_query_and_documents(
    gateway: Gateway, embedder: FakeReplica, body: Any, param: str
) -> None:
    assert (await refused(gateway, "/rerank", body))["param"] == param


@pytest.mark.parametrize("name", ["max_tokens_per_doc", "max_tokens_per_query"])
async def test_limits_of_tokens_are_checked(
    gateway: Gateway, embedder: FakeReplica, name: str
) -> None:
    for path in ("/rerank", "/v2/rerank", "/score"):
        body = {"query": "a", "text_1": "a", "documents": ["b"]}
        for value in (-5, "x", 1.5, True):
            assert (await refused(gateway, path, body | {name: value}))["param"] == name


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_model_that_generates_names_its_task(served: Gateway, path: str) -> None:
    error = await refused(served, path, ENDPOINTS[path])
    assert "It does: generate" in error["message"]
    assert error["code"] == "unsupported_task"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/classify", {"input": "x"}),
    ],
)
async def test_a_pooling_model_names_its_tasks(
    gateway: Gateway, embedder: FakeReplica, path: str, body: Any
) -> None:
    error = await refused(gateway, path, body)
    assert "It does: embed, token_embed, score" in error["message"]


async def test_models_say_what_they_do(gateway: Gateway, embedder: FakeReplica) -> None:
    (card,) = (await gateway.client.get("/v1/models")).json()["data"]
    assert card["tasks"] == ["embed", "token_embed", "score"]
    one = (await gateway.client.get("/v1/models/fake")).json()
    assert one["tasks"] == card["tasks"]


async def test_tokenize_serves_pooling_models(gateway: Gateway, embedder: FakeReplica) -> None:
    reply = await gateway.client.post("/tokenize", {"model": "fake", "prompt": "abc"})
    assert reply.status == 200


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_every_endpoint_asks_for_a_key(gateway: Gateway, path: str) -> None:
    gateway.client.key = None
    reply = await gateway.client.post(path, {"model": "fake", **ENDPOINTS[path]})
    assert reply.status == 401


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_fault_23_a_model_that_is_not_there_is_404(gateway: Gateway, path: str) -> None:
    reply = await gateway.client.post(path, {**ENDPOINTS[path], "model": "other"})
    assert reply.status == 404


async def test_fault_25_a_client_that_leaves_aborts_its_prompts(gateway: Gateway) -> None:
    slow = gateway.fake(token_delay=0.05)
    slow.model.tasks, slow.model.pooling = ["embed"], PoolingInfo(embedding_size=4)
    async with gateway.serving(slow):
        body = {"model": "fake", "input": ["abc", "def"]}
        exchange = gateway.client.open("POST", "/v1/embeddings", body)
        await until(lambda: len(slow.received) == 2)
        await exchange.leave()
        await until(lambda: len(slow.aborted) == 2)
        (record,) = await gateway.usage()
    assert (record.endpoint, record.status) == ("embeddings", 499)


async def test_a_replica_that_gives_no_result_is_a_fault(gateway: Gateway) -> None:
    broken = gateway.fake(eos_after=1)
    broken.model.tasks, broken.model.pooling = ["embed"], PoolingInfo(embedding_size=4)
    async with gateway.serving(broken):
        error = await refused(gateway, "/v1/embeddings", {"input": "abc"}, status=500)
    assert error["code"] == "engine_fault"
