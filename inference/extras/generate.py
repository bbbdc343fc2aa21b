"""`POST /generate` of vLLM's oldest server, and `POST /invocations` of SageMaker's containers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from django.http.response import HttpResponseBase

from engine.contract.errors import InvalidRequest, QuireError
from inference.errors import encode_error
from inference.generation import Generation, Increment, find_served
from inference.openai.chat_stored import StoredCompletionsView
from inference.openai.completions import CompletionsView, completion_job
from inference.openai.ranking import best_outputs
from inference.openai.schemas import CompletionRequest
from inference.openai.serving import StreamWriter, parse_beside, respond
from inference.pooling.views import ClassifyView, EmbeddingsView, PoolingView, RerankView, ScoreView
from inference.web.negotiation import JSON_OR_EVENTS
from inference.web.views import GatewayRequest, GatewayView

_encode = msgspec.json.Encoder().encode
#: Which endpoint an invocation is meant for: the first of which it has all these fields.
INVOCATIONS: tuple[tuple[tuple[str, ...], type[GatewayView]], ...] = (
    (("messages",), StoredCompletionsView),
    (("prompt",), CompletionsView),
    (("query", "documents"), RerankView),
    (("queries", "documents"), ScoreView),
    (("text_1", "text_2"), ScoreView),
    (("data_1", "data_2"), ScoreView),
    (("input", "task"), PoolingView),
    (("input",), EmbeddingsView),
)
#: What tells a pooling model's endpoint: what has neither is asked by `/pooling`.
CLASSIFY, EMBED = "classify", "embed"


class _Texts:
    """Whole texts, each with the prompt before it."""

    def __init__(self, generation: Generation, prompt: str, n: int) -> None:
        self._generation, self._n = generation, n
        self._texts = [prompt for _ in generation.outputs[0]]

    def take(self, increment: Increment) -> None:
        """Add what is new."""
        self._texts[increment.index] += increment.text

    def body(self) -> dict[str, Any]:
        """All of them."""
        best = best_outputs(self._generation.outputs[0], self._n)
        return {"text": [self._texts[index] for index in best]}


class _TextsWriter(StreamWriter[Increment]):
    """A line of JSON for each change, with all of the text so far."""

    heartbeat = b"\n"
    content_type = "application/x-ndjson"

    def __init__(self, texts: _Texts) -> None:
        self._texts = texts

    def write(self, news: Iterable[Increment]) -> bytes:
        """The texts as they are now."""
        for increment in news:
            self._texts.take(increment)
        return _encode(self._texts.body()) + b"\n"

    def end(self) -> bytes:
        """Nothing."""
        return b""

    def error(self, error: QuireError) -> bytes:
        """A line of its own."""
        return encode_error(error) + b"\n"


class GenerateView(GatewayView):
    """Completes one prompt; sampling parameters stand beside it."""

    generates = True
    comes_into_queue = True
    renderer_classes = JSON_OR_EVENTS

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`{"text": [prompt and output, ...]}`, or lines of it with `stream`."""
        completion = await parse_beside(CompletionRequest, self.read_json(request))
        ignored = completion.ignored_fields()
        prompts = completion.prompts
        if completion.embeds or len(prompts) != 1 or not isinstance(prompts[0], str):
            raise InvalidRequest("prompt must be one text.", param="prompt")
        prompt = prompts[0]
        served = await find_served(request.caller, completion.model, sticky=completion.sticky)
        served.check_queue(request.caller, completion.tier(request.caller.max_priority)[0])
        generation = await Generation.start(await completion_job(request, completion, served))
        texts = _Texts(generation, prompt, completion.n or 1)
        return await respond(
            generation, ignored, writer=lambda: _TextsWriter(texts), answer=lambda: texts
        )


class InvocationsView(GatewayView):
    """Any of the endpoints that answer at once, told by its fields."""

    generates = True
    renderer_classes = JSON_OR_EVENTS

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """What that endpoint answers."""
        body = self.read_json(request)
        for fields, view in INVOCATIONS:
            if all(name in body for name in fields):
                return await (await self._chosen(view, request, body))().post(request)  # type: ignore[attr-defined, no-any-return]
        forms = "; ".join(" and ".join(fields) for fields, _ in INVOCATIONS)
        raise InvalidRequest(f"No endpoint takes a body like this. Bodies have: {forms}.")

    async def _chosen(
        self, view: type[GatewayView], request: GatewayRequest, body: dict[str, Any]
    ) -> type[GatewayView]:
        if view not in (EmbeddingsView, StoredCompletionsView):
            return view
        model = body.get("model")
        name = model if isinstance(model, str) else None
        served = await find_served(request.caller, name, task=None)
        if served.info.pooling is None:
            return view
        if CLASSIFY in served.info.tasks and "task" not in body:
            return ClassifyView
        embeds = EMBED in served.info.tasks and "task" not in body
        return EmbeddingsView if embeds else PoolingView
