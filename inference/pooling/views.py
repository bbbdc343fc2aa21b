"""`/v1/embeddings`, `/pooling`, `/classify`, `/score` and `/rerank`."""

from __future__ import annotations

from typing import Any, ClassVar

from django.http.response import HttpResponseBase

from engine.contract.pooling_params import default_task
from engine.contract.similarity import Vectors, pair_up
from inference.openai.serving import parse_beside
from inference.pooling.data import answer_data
from inference.pooling.formats import Form
from inference.pooling.inputs import chat_entries, item_entries
from inference.pooling.run import Call, Make, Pack, begin
from inference.pooling.schemas import (
    ClassifyRequest,
    EmbeddingRequest,
    InputBody,
    PoolingRequest,
    RerankRequest,
    RerankV2Request,
    ScoreRequest,
)
from inference.pooling.scores import answer_with_scores
from inference.web.views import GatewayRequest, GatewayView


class EmbeddingsView(GatewayView):
    """Vectors of texts, as OpenAI's endpoint gives them."""

    generates = True

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`{"object": "list", "data": [{"object": "embedding", "embedding", "index"}], ...}`."""
        body = await parse_beside(EmbeddingRequest, self.read_json(request))
        call = await begin(request, body, "embeddings", body.param, "embed")
        return await _answer(call, body, "embed", "embedding", "embedding")


class PoolingView(GatewayView):
    """Whatever the model makes of texts, or what `task` says."""

    generates = True

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`{"object": "list", "data": [{"object": "pooling", "data", "index"}], ...}`."""
        body = await parse_beside(PoolingRequest, self.read_json(request))
        if body.data is not None:
            return await answer_data(await begin(request, body, "pooling", "data", ""), body)
        call = await begin(request, body, "pooling", body.param, body.task or "")
        task = body.task or default_task(call.served.info.tasks)
        return await _answer(call, body, task, "pooling", "data")


class ClassifyView(GatewayView):
    """Labels of texts."""

    generates = True

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`{"object": "list", "data": [{"index", "label", "probs", "num_classes"}], ...}`."""
        body = await parse_beside(ClassifyRequest, self.read_json(request))
        call = await begin(request, body, "classify", body.param, "classify")
        facts = call.served.info.pooling
        labels = facts.labels if facts is not None else []

        def make(results: list[Vectors]) -> dict[str, Any]:
            data = []
            for index, probs in enumerate(results):
                label = labels[int(probs.argmax())]
                entry = {"index": index, "label": label, "probs": probs.tolist()}
                data.append(entry | {"num_classes": len(probs)})
            return {"object": "list", "data": data}

        return await _run(call, body, "classify", make)


class ScoreView(GatewayView):
    """How well texts fit each other: one against several, or pair by pair."""

    generates = True

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`{"object": "list", "data": [{"index", "object": "score", "score"}], ...}`."""
        body = await parse_beside(ScoreRequest, self.read_json(request))
        first, second = body.texts
        pairs = pair_up(len(first), len(second))
        call = await begin(request, body, "score", "text_2", "score")

        def make(scores: list[float]) -> dict[str, Any]:
            data = [
                {"index": index, "object": "score", "score": score}
                for index, score in enumerate(scores)
            ]
            return {"object": "list", "data": data}

        return await answer_with_scores(call, body, first, second, pairs, make)


class RerankView(GatewayView):
    """Documents in the order of how well they answer a query, as Jina's endpoint gives them."""

    generates = True
    body_schema: ClassVar[type[RerankRequest]] = RerankRequest

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`{"results": [{"index", "relevance_score", "document": {"text"}}], ...}`."""
        body = await parse_beside(self.body_schema, self.read_json(request))
        call = await begin(request, body, "rerank", "documents", "score")
        documents = body.texts
        pairs = [(0, place) for place in range(len(documents))]

        def make(scores: list[float]) -> dict[str, Any]:
            order = sorted(range(len(scores)), key=lambda place: -scores[place])
            results: list[dict[str, Any]] = []
            for place in order[: body.top_n or None]:
                result: dict[str, Any] = {"index": place, "relevance_score": scores[place]}
                if body.wants_documents:
                    result["document"] = {"text": documents[place]}
                results.append(result)
            return {"results": results, **self.more(len(documents))}

        return await answer_with_scores(call, body, [body.query], documents, pairs, make)

    def more(self, num_documents: int) -> dict[str, Any]:
        """What the answer holds besides."""
        return {}


class RerankV2View(RerankView):
    """The same as Cohere's second version gives it."""

    body_schema = RerankV2Request

    def more(self, num_documents: int) -> dict[str, Any]:
        """Cohere's `meta`; a search unit is a query with up to 100 documents."""
        units = {"search_units": -(-num_documents // 100)}
        return {"meta": {"api_version": {"version": "2"}, "billed_units": units}}


async def _run(
    call: Call, body: InputBody, task: str, make: Make, pack: Pack | None = None
) -> HttpResponseBase:
    """Answer for each input by itself."""
    params, served = body.params(task), call.served
    if body.chats:
        made = chat_entries(served, body.chats, params, body.side)
    else:
        special = body.add_special_tokens is not False
        made = item_entries(served, body.items, params, add_special_tokens=special, side=body.side)
    return await call.answer(await call.entries(made), make, pack)


async def _answer(
    call: Call, body: EmbeddingRequest, task: str, kind: str, field: str
) -> HttpResponseBase:
    """Answer with vectors, in the format that the request asks for."""
    dtype, endianness = body.embed_dtype or "float32", body.endianness or "native"
    form = Form(body.encoding_format or "float", dtype, endianness)

    def make(results: list[Vectors]) -> dict[str, Any]:
        data = [
            {"object": kind, "index": index, field: form.in_json(row)}
            for index, row in enumerate(results)
        ]
        return {"object": "list", "data": data}

    return await _run(call, body, task, make, form.response if form.is_raw else None)
