"""`/v1/embeddings`, `/pooling`, `/classify`, `/score` and `/rerank`."""

from __future__ import annotations

from typing import Any, ClassVar

from django.conf import settings
from django.http.response import HttpResponseBase
from pydantic import BaseModel, ConfigDict, Field

from catalog.access import access_models
from engine.contract.errors import InvalidRequest
from engine.contract.pooling_params import Vectors, default_task, score_pairs
from inference.api.pooling.formats import VectorFormat
from inference.api.pooling.inputs import chat_entries, item_entries
from inference.api.pooling.job import BuildItem, BuildResponse, PoolingRequestHandler, start_request
from inference.api.pooling.outputs import answer_data, answer_with_scores
from inference.api.pooling.schemas import (
    ClassifyRequest,
    EmbeddingRequest,
    InputBody,
    PoolingBody,
    PoolingRequest,
    RerankRequest,
    RerankV2Request,
    ScoreRequest,
)
from inference.engine_client.client import get_engine_client
from inference.errors import UnsupportedField
from inference.schemas import objects
from inference.serving.respond import parse_offloaded
from inference.web.endpoint_schema import IDEMPOTENCY_KEY, Endpoint, EndpointSchema
from inference.web.views import GatewayRequest, GatewayView
from tenants.authentication import Caller

#: Minimum score at which a label is flagged.
THRESHOLD = 0.5
#: Labels for harmless texts, in lower case and without separators.
SAFE_LABELS = frozenset(
    {
        *("safe", "ok", "okay", "fine", "clean", "benign", "normal", "neutral", "none", "no"),
        *("nontoxic", "nottoxic", "nohate", "nonhate", "nothate", "nothatespeech", "sfw"),
        *("harmless", "unharmful", "notoffensive", "nonoffensive", "legit", "acceptable", "s"),
    }
)
#: OpenAI's moderation models: requests for them use the installed one.
OPENAIS = ("omni-moderation", "text-moderation")


class Part(BaseModel):
    """A part of one input. Only text is supported."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str = Field(description="Kind of part; only `text` is taken.")
    text: str | None = Field(default=None, description="Text of the part.")


class ModerationRequest(PoolingBody):
    """The body: one text, several, or the parts of one."""

    input: str | list[str] | list[Part] = Field(
        description="Text, a list of texts, or the parts of one."
    )

    def check_fields(self) -> None:
        """See `PoolingBody`."""
        limit = settings.QUIRE.max_prompts
        if not self.input or (len(self.input) > limit and not isinstance(self.input, str)):
            raise InvalidRequest(f"input must hold 1 to {limit} texts.", param="input")
        for index, part in enumerate(self.input):
            if isinstance(part, Part) and (part.type != "text" or part.text is None):
                raise UnsupportedField(
                    "Only parts of the type 'text' are supported.", param=f"input[{index}].type"
                )
        if not all(self.texts):
            raise InvalidRequest("input must not hold an empty text.", param="input")

    @property
    def texts(self) -> list[str]:
        """Texts to classify, each separately."""
        if isinstance(self.input, str):
            return [self.input]
        texts = [part for part in self.input if isinstance(part, str)]
        parts = [part.text or "" for part in self.input if isinstance(part, Part)]
        return texts or ["\n".join(parts)]


class ModerationsView(GatewayView):
    schema = EndpointSchema(
        "Pooling",
        post=Endpoint(
            "Moderate texts with a classifier",
            objects.Moderation,
            ModerationRequest,
            parameters=(IDEMPOTENCY_KEY,),
        ),
    )
    generates = True

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`{"id", "model", "results": [{"flagged", "categories", "category_scores"}]}`."""
        body = await parse_offloaded(request.ctx, ModerationRequest, self.read_json(request))
        if body.model is None or body.model.startswith(OPENAIS):
            body.model = await default_classifier(request.caller)
        call = await start_request(request, body, "moderations", "input", "classify")
        facts = call.served.info.pooling
        labels = facts.labels if facts is not None else []

        def make(results: list[Vectors]) -> dict[str, Any]:
            return {"results": [moderation_result(labels, row.tolist()) for row in results]}

        entries = item_entries(
            call.request.ctx, call.served, [*body.texts], body.params("classify")
        )
        return await call.answer(await call.build_entries(entries), make)


async def default_classifier(caller: Caller) -> str:
    """The name of the caller's only classification model.

    Raises: `InvalidRequest` for none, or several.
    """
    client = get_engine_client()
    await client.start()
    model_ids = [
        card.id
        for card in await access_models(caller)
        if (info := client.fleet.model(card.id)) is not None and "classify" in info.tasks
    ]
    if len(model_ids) != 1:
        raise InvalidRequest(
            "There are several classification models: name one in model."
            if model_ids
            else "There is no classification model that this key may use.",
            param="model",
        )
    return model_ids[0]


def moderation_result(labels: list[str], scores: list[float]) -> dict[str, Any]:
    """One text's result: its categories are the model's labels, except the harmless ones."""
    kinds = {
        label: score
        for label, score in zip(labels, scores, strict=True)
        if "".join(filter(str.isalnum, label.lower())) not in SAFE_LABELS
    }
    categories = {label: score >= THRESHOLD for label, score in kinds.items()}
    return {
        "flagged": any(categories.values()),
        "categories": categories,
        "category_scores": kinds,
        "category_applied_input_types": {label: ["text"] for label in kinds},
    }


class EmbeddingsView(GatewayView):
    schema = EndpointSchema(
        "Pooling",
        post=Endpoint(
            "Embed texts", objects.PooledList, EmbeddingRequest, parameters=(IDEMPOTENCY_KEY,)
        ),
    )
    generates = True

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`{"object": "list", "data": [{"object": "embedding", "embedding", "index"}], ...}`."""
        body = await parse_offloaded(request.ctx, EmbeddingRequest, self.read_json(request))
        call = await start_request(request, body, "embeddings", body.param, "embed")
        return await _answer(call, body, "embed", "embedding", "embedding")


class PoolingView(GatewayView):
    schema = EndpointSchema(
        "Pooling",
        post=Endpoint("Pool texts by the model's own task", objects.PooledList, PoolingRequest),
    )
    generates = True

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`{"object": "list", "data": [{"object": "pooling", "data", "index"}], ...}`."""
        body = await parse_offloaded(request.ctx, PoolingRequest, self.read_json(request))
        if body.data is not None:
            return await answer_data(
                await start_request(request, body, "pooling", "data", ""), body
            )
        call = await start_request(request, body, "pooling", body.param, body.task or "")
        task = body.task or default_task(call.served.info.tasks)
        return await _answer(call, body, task, "pooling", "data")


class ClassifyView(GatewayView):
    schema = EndpointSchema(
        "Pooling", post=Endpoint("Classify texts", objects.PooledList, ClassifyRequest)
    )
    generates = True

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`{"object": "list", "data": [{"index", "label", "probs", "num_classes"}], ...}`."""
        body = await parse_offloaded(request.ctx, ClassifyRequest, self.read_json(request))
        call = await start_request(request, body, "classify", body.param, "classify")
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
    schema = EndpointSchema(
        "Pooling", post=Endpoint("Score pairs of texts", objects.PooledList, ScoreRequest)
    )
    generates = True

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`{"object": "list", "data": [{"index", "object": "score", "score"}], ...}`."""
        body = await parse_offloaded(request.ctx, ScoreRequest, self.read_json(request))
        first, second = body.texts
        pairs = score_pairs(len(first), len(second))
        call = await start_request(request, body, "score", "text_2", "score")

        def make(scores: list[float]) -> dict[str, Any]:
            data = [
                {"index": index, "object": "score", "score": score}
                for index, score in enumerate(scores)
            ]
            return {"object": "list", "data": data}

        return await answer_with_scores(call, body, first, second, pairs, make)


class RerankView(GatewayView):
    """Documents sorted by their relevance to a query, as from Jina's endpoint."""

    schema = EndpointSchema(
        "Pooling", post=Endpoint("Rank documents for a query", objects.Ranking, RerankRequest)
    )
    generates = True
    body_schema: ClassVar[type[RerankRequest]] = RerankRequest

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`{"results": [{"index", "relevance_score", "document": {"text"}}], ...}`."""
        body = await parse_offloaded(request.ctx, self.body_schema, self.read_json(request))
        call = await start_request(request, body, "rerank", "documents", "score")
        documents = body.texts
        pairs = [(0, index) for index in range(len(documents))]

        def make(scores: list[float]) -> dict[str, Any]:
            order = sorted(range(len(scores)), key=lambda index: -scores[index])
            results: list[dict[str, Any]] = []
            for index in order[: body.top_n or None]:
                result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
                if body.wants_documents:
                    result["document"] = {"text": documents[index]}
                results.append(result)
            return {"results": results, **self.more(len(documents))}

        return await answer_with_scores(call, body, [body.query], documents, pairs, make)

    def more(self, num_documents: int) -> dict[str, Any]:
        """Additional fields of the response."""
        return {}


class RerankV2View(RerankView):
    schema = EndpointSchema(
        "Pooling", post=Endpoint("Rank documents for a query", objects.Ranking, RerankV2Request)
    )
    body_schema = RerankV2Request

    def more(self, num_documents: int) -> dict[str, Any]:
        """Cohere's `meta`; a search unit is a query with up to 100 documents."""
        units = {"search_units": -(-num_documents // 100)}
        return {"meta": {"api_version": {"version": "2"}, "billed_units": units}}


async def _run(
    call: PoolingRequestHandler,
    body: InputBody,
    task: str,
    make: BuildItem,
    pack: BuildResponse | None = None,
) -> HttpResponseBase:
    """Respond with a result for each input."""
    params, served, ctx = body.params(task), call.served, call.request.ctx
    if body.chats:
        pending_entries = chat_entries(ctx, served, body.chats, params, body.side)
    else:
        special = body.add_special_tokens is not False
        pending_entries = item_entries(
            ctx, served, body.items, params, add_special_tokens=special, side=body.side
        )
    return await call.answer(await call.build_entries(pending_entries), make, pack)


async def _answer(
    call: PoolingRequestHandler, body: EmbeddingRequest, task: str, kind: str, field: str
) -> HttpResponseBase:
    """Respond with vectors, in the requested format."""
    dtype, endianness = body.embed_dtype or "float32", body.endianness or "native"
    form = VectorFormat(body.encoding_format or "float", dtype, endianness)

    def make(results: list[Vectors]) -> dict[str, Any]:
        data = [
            {"object": kind, "index": index, field: form.in_json(row)}
            for index, row in enumerate(results)
        ]
        return {"object": "list", "data": data}

    return await _run(call, body, task, make, form.response if form.is_binary else None)
