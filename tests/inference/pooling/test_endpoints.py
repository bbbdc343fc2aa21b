"""Every pooling endpoint, from the client's JSON through a real engine and back."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.db import run_in_db_thread
from engine import LLM
from engine.contract import redis_keys
from engine.contract.messages import PoolingInfo
from engine.contract.plugins import io_processor
from inference.api.batches.dispatch import dispatch_request
from inference.engine_client.queue_limit import Load
from inference.generation import background
from inference.metrics.recorder import history
from metering import request_log_writer as writer
from metering.models import RequestEntry
from metering.request_log import decode_trace
from tenants import authentication
from tests.engine.pooling.models import TEXTS
from tests.inference.conftest import Gateway, until
from tests.inference.pooling.conftest import Serve
from tests.packages import EXAMPLE, install


async def post(gateway: Gateway, path: str, **body: Any) -> Any:
    """The answer's JSON; fails unless it's 200."""
    reply = await gateway.client.post(path, body)
    assert reply.status == 200, reply.body
    return reply.json()


@pytest.fixture(scope="module")
def vectors(folders: dict[str, Path]) -> np.ndarray:
    """`TEXTS` embedded offline."""
    llm = LLM(str(folders["embed"]))
    return np.array([out.outputs.embedding for out in llm.embed(TEXTS, use_tqdm=False)])


async def test_a_full_queue_is_told_to_who_pools(
    gateway: Gateway, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Load, "of", classmethod(lambda cls, replicas: Load(1, 5000, 100.0)))
    async with serve("embed"):
        reply = await gateway.client.post("/v1/embeddings", {"model": "embed", "input": TEXTS})
    assert (reply.status, reply.error["code"]) == (503, "overloaded")


async def test_embeddings(gateway: Gateway, serve: Serve, vectors: np.ndarray) -> None:
    async with serve("embed"):
        answer = await post(gateway, "/v1/embeddings", model="embed", input=TEXTS, user="me")
        floats = [entry["embedding"] for entry in answer["data"]]
        np.testing.assert_allclose(floats, vectors, atol=1e-6)
        assert [entry["index"] for entry in answer["data"]] == [0, 1, 2, 3]
        assert {entry["object"] for entry in answer["data"]} == {"embedding"}
        assert (answer["object"], answer["model"]) == ("list", "embed")
        assert answer["id"].startswith("embeddings-")
        usage = answer["usage"]
        assert usage["prompt_tokens"] == usage["total_tokens"] > len(TEXTS) * 2

        isolated_response = await post(gateway, "/v1/embeddings", model="embed", input=TEXTS[0])
        np.testing.assert_allclose(isolated_response["data"][0]["embedding"], vectors[0], atol=1e-6)

        packed = await post(
            gateway, "/v1/embeddings", model="embed", input=TEXTS[0], encoding_format="base64"
        )
        raw = base64.b64decode(packed["data"][0]["embedding"])
        np.testing.assert_array_equal(np.frombuffer(raw, "<f4"), np.float32(floats[0]))


async def test_embeddings_of_token_ids(gateway: Gateway, serve: Serve, folders: Any) -> None:
    ids = [[2, 40, 41, 3], [2, 50, 3]]
    llm = LLM(str(folders["embed"]))
    expected = [out.outputs.embedding for out in llm.embed(ids, use_tqdm=False)]
    async with serve("embed"):
        many = await post(gateway, "/v1/embeddings", model="embed", input=ids)
        one = await post(gateway, "/v1/embeddings", model="embed", input=ids[0])
    embeddings = [entry["embedding"] for entry in many["data"]]
    np.testing.assert_allclose(embeddings, expected, atol=1e-6)
    np.testing.assert_allclose(one["data"][0]["embedding"], expected[0], atol=1e-6)
    assert (many["usage"]["prompt_tokens"], one["usage"]["prompt_tokens"]) == (7, 4)


async def test_the_history_and_the_records_have_them_without_a_first_token(
    gateway: Gateway, serve: Serve
) -> None:
    history.drain()
    async with serve("embed"):
        body = {"model": "embed", "input": TEXTS[:2], "dimensions": 8}
        answer = await post(gateway, "/v1/embeddings", **body)
        await background.drain(10)
    counts = {what: count for (_, what), count in history.drain().items()}
    assert counts == {"requests": 1, "prompt_tokens": answer["usage"]["prompt_tokens"]}
    await run_in_db_thread(writer.write_waiting, at_once=True)
    entry = await RequestEntry.objects.aget(request_id=answer["id"])
    assert (entry.endpoint, entry.status, entry.ttft_ms) == ("embeddings", 200, None)
    trace = decode_trace(entry.detail)
    assert trace.asked == {"task": "embed", "dimensions": 8}
    assert [output.number for output in trace.outputs] == [0, 1]
    assert trace.tokens == []


async def test_dimensions_truncation_and_activation(
    gateway: Gateway, serve: Serve, vectors: np.ndarray
) -> None:
    async with serve("embed"):
        cut = await post(gateway, "/v1/embeddings", model="embed", input=TEXTS[0], dimensions=8)
        head = vectors[0][:8] / np.linalg.norm(vectors[0][:8])
        np.testing.assert_allclose(cut["data"][0]["embedding"], head, atol=1e-6)

        short = await post(
            gateway, "/v1/embeddings", model="embed", input=TEXTS[1], truncate_prompt_tokens=6
        )
        assert short["usage"]["prompt_tokens"] == 6

        raw = await post(gateway, "/v1/embeddings", model="embed", input="dog", normalize=False)
        assert abs(np.linalg.norm(raw["data"][0]["embedding"]) - 1) > 0.1

        bare = await post(
            gateway, "/v1/embeddings", model="embed", input="dog", add_special_tokens=False
        )
        assert bare["usage"]["prompt_tokens"] == raw["usage"]["prompt_tokens"] - 2


async def test_pooling_does_the_models_own_task_or_the_one_asked_for(
    gateway: Gateway, serve: Serve, vectors: np.ndarray
) -> None:
    async with serve("embed"):
        local_response = await post(gateway, "/pooling", model="embed", input=TEXTS[0])
        np.testing.assert_allclose(local_response["data"][0]["data"], vectors[0], atol=1e-6)
        assert local_response["data"][0]["object"] == "pooling"
        tokens = await post(gateway, "/pooling", model="embed", input=TEXTS[:2], task="token_embed")
    arrays = [np.array(entry["data"]) for entry in tokens["data"]]
    assert sum(len(rows) for rows in arrays) == tokens["usage"]["prompt_tokens"]
    assert {rows.shape[1] for rows in arrays} == {32}


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
async def test_classify(gateway: Gateway, serve: Serve, folders: Any, path: str) -> None:
    expected = LLM(str(folders["classify"])).classify(TEXTS, use_tqdm=False)
    async with serve("classify"):
        answer = await post(gateway, path, model="classify", input=TEXTS)
    for index, (entry, expected_output) in enumerate(zip(answer["data"], expected, strict=True)):
        assert entry["index"] == index
        assert entry["label"] == expected_output.outputs.label
        assert entry["num_classes"] == 3
        np.testing.assert_allclose(entry["probs"], expected_output.outputs.probs, atol=1e-6)


@pytest.mark.parametrize("name", ["embed", "rank"])
@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_score(gateway: Gateway, serve: Serve, folders: Any, path: str, name: str) -> None:
    expected = LLM(str(folders[name])).score(TEXTS[0], TEXTS[1:], use_tqdm=False)
    async with serve(name):
        one = await post(gateway, path, model=name, text_1=TEXTS[0], text_2=TEXTS[1:])
        response = await post(
            gateway, path, model=name, queries=[TEXTS[0]] * 3, documents=TEXTS[1:]
        )
    scores = [entry["score"] for entry in one["data"]]
    assert scores == pytest.approx([out.outputs.score for out in expected], abs=1e-5)
    assert scores == pytest.approx([entry["score"] for entry in response["data"]], abs=1e-6)
    assert [(entry["index"], entry["object"]) for entry in one["data"]] == [
        (index, "score") for index in range(3)
    ]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_rerank(gateway: Gateway, serve: Serve, folders: Any, path: str) -> None:
    offline = LLM(str(folders["rank"])).score(TEXTS[0], TEXTS[1:], use_tqdm=False)
    scores = [out.outputs.score for out in offline]
    order = sorted(range(3), key=lambda index: -scores[index])
    documents = [TEXTS[1], {"text": TEXTS[2]}, TEXTS[3]]
    body = {"model": "rank", "query": TEXTS[0], "documents": documents}
    async with serve("rank"):
        full_response = await post(gateway, path, **body)
        best = await post(gateway, path, **body, top_n=1, return_documents=True)
    assert [result["index"] for result in full_response["results"]] == order
    relevance_scores = [result["relevance_score"] for result in full_response["results"]]
    assert relevance_scores == pytest.approx([scores[index] for index in order], abs=1e-5)
    assert len(best["results"]) == 1
    assert best["results"][0]["document"] == {"text": TEXTS[1:][order[0]]}
    assert ("document" in full_response["results"][0]) is (path != "/v2/rerank")
    if path == "/v2/rerank":
        assert full_response["meta"]["billed_units"] == {"search_units": 1}


@pytest.mark.parametrize("name", ["embed", "rank"])
async def test_of_longer_texts_so_many_tokens_are_read(
    gateway: Gateway, serve: Serve, folders: dict[str, Path], name: str
) -> None:
    tokenizer = LLM(str(folders[name])).get_tokenizer()
    long, query = TEXTS[1], TEXTS[0]
    cut, asked = tokenizer.shortened(long, 5), tokenizer.shortened(query, 2)
    assert (len(tokenizer.encode(cut, add_special_tokens=False)), long.startswith(cut)) == (5, True)
    body = {"model": name, "query": query, "documents": [long, "dog"]}
    async with serve(name):
        by_hand = await post(gateway, "/v2/rerank", **body | {"documents": [cut, "dog"]})
        limited = await post(
            gateway, "/v2/rerank", **body, max_tokens_per_doc=5, return_documents=True
        )
        full_response = await post(gateway, "/v2/rerank", **body, max_tokens_per_doc=0)
        both = await post(
            gateway, "/score", model=name, queries=query, items=[long],
            max_tokens_per_doc=5, max_tokens_per_query=2,
        )  # fmt: skip
        short = await post(gateway, "/score", model=name, text_1=asked, text_2=[cut])
    read = {result["index"]: result["relevance_score"] for result in limited["results"]}
    assert read == {result["index"]: result["relevance_score"] for result in by_hand["results"]}
    assert limited["usage"] == by_hand["usage"] != full_response["usage"]
    assert {result["document"]["text"] for result in limited["results"]} == {long, "dog"}
    assert (both["data"], both["usage"]) == (short["data"], short["usage"])


async def test_usage_is_settled_under_the_endpoints_name(gateway: Gateway, serve: Serve) -> None:
    async with serve("embed"):
        answer = await post(gateway, "/v1/embeddings", model="embed", input=TEXTS)
        await post(gateway, "/score", model="embed", text_1="dog", text_2=["fox", "day"])
    first, second = await gateway.usage()
    assert (first.endpoint, second.endpoint) == ("embeddings", "score")
    assert first.prompt_tokens == answer["usage"]["prompt_tokens"]
    assert (first.completion_tokens, first.status, first.finish_reason) == (0, 200, "stop")
    assert first.request_id == answer["id"]


async def test_unknown_fields_are_named_in_a_header(gateway: Gateway, serve: Serve) -> None:
    body = {"model": "embed", "input": "dog", "nonsense": 1, "endianness": "little"}
    async with serve("embed"):
        reply = await gateway.client.post("/v1/embeddings", body)
    assert reply.status == 200
    assert reply.headers["x-quire-ignored-fields"] == "nonsense"


async def test_fault_27_a_lost_replicas_prompts_go_to_another(
    gateway: Gateway, serve: Serve, vectors: np.ndarray, folders: dict[str, Path]
) -> None:
    async with serve("embed"):
        pass  # puts the model into the catalogue
    lost = gateway.fake(model_name="embed", die_after=0)
    lost.model.tasks, lost.model.pooling = ["embed"], PoolingInfo(embedding_size=32)
    lost.model.path = str(folders["embed"])
    async with lost:
        await gateway.refresh()
        pending = asyncio.create_task(
            post(gateway, "/v1/embeddings", model="embed", input=TEXTS[0])
        )
        await until(lambda: lost.state == "dead")
        async with serve("embed"):
            await gateway.redis.delete(redis_keys.replica_key(lost.replica_id, gateway.prefix))
            answer = await pending
    np.testing.assert_allclose(answer["data"][0]["embedding"], vectors[0], atol=1e-6)
    assert len(await gateway.usage()) == 1


async def test_a_batch_may_hold_embeddings(
    gateway: Gateway, serve: Serve, vectors: np.ndarray
) -> None:
    caller = await authentication.authenticate(f"Bearer {gateway.rows.secret}")
    body = {"model": "embed", "input": TEXTS[:2]}
    async with serve("embed"):
        outcome = await dispatch_request("/v1/embeddings", body, caller)
    assert outcome.status == 200
    embeddings = [entry["embedding"] for entry in outcome.body["data"]]
    np.testing.assert_allclose(embeddings, vectors[:2], atol=1e-6)


async def test_requests_at_once_leave_nothing_behind(gateway: Gateway, serve: Serve) -> None:
    async with serve("embed") as service:
        answers = await asyncio.gather(
            *(post(gateway, "/v1/embeddings", model="embed", input=text) for text in TEXTS * 4)
        )
        core = service.core
        assert core is not None
        await until(lambda: not core.requests)
        core.check_integrity()
    sizes = [len(answer["data"][0]["embedding"]) for answer in answers]
    assert sizes == [32] * 16


async def test_data_goes_through_the_models_io_processor(
    gateway: Gateway, serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(install(EXAMPLE, tmp_path)))
    io_processor.cache_clear()
    async with serve("embed", io_processor_plugin="example_nearest"):
        asked = {"query": "a b", "documents": ["c d e f", "a b"]}
        answer = await gateway.client.post("/pooling", {"model": "embed", "data": asked})
        assert answer.status == 200
        assert answer.json()["data"]["nearest"] == 1
        assert answer.json()["usage"]["prompt_tokens"] > 0
        invalid_response = await gateway.client.post(
            "/pooling", {"model": "embed", "data": {"query": 1}}
        )
        assert (invalid_response.status, invalid_response.error["param"]) == (400, "data")
        assert "it must be an object" in invalid_response.error["message"]
        both = {"model": "embed", "data": asked, "input": "x"}
        assert (await gateway.client.post("/pooling", both)).error["param"] == "data"


async def test_a_kind_of_input_is_ignored_and_named(gateway: Gateway, serve: Serve) -> None:
    async with serve("embed"):
        body = {"model": "embed", "input": TEXTS[0], "input_type": "query"}
        reply = await gateway.client.post("/v1/embeddings", body)
    assert (reply.status, reply.headers["x-quire-ignored-fields"]) == (200, "input_type")


async def test_data_for_a_model_without_an_io_processor_is_refused(
    gateway: Gateway, serve: Serve
) -> None:
    async with serve("embed"):
        refused = await gateway.client.post("/pooling", {"model": "embed", "data": {"x": 1}})
    assert (refused.status, refused.error["param"]) == (400, "data")


async def test_what_pools_is_bounded_as_what_generates_is(
    gateway: Gateway, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Load, "of", classmethod(lambda cls, replicas: Load(1, 5000, 100.0)))
    async with serve("embed"):
        body = {"model": "embed", "input": TEXTS}
        reply = await gateway.client.post("/v1/embeddings", body)
    assert (reply.status, reply.error["code"]) == (503, "overloaded")
    assert reply.headers["retry-after"] == "48"
