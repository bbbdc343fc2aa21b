"""`POST /generate` of vLLM's first server, and `POST /invocations` of SageMaker's containers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

import msgspec
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from pydantic import BaseModel, Field

from adapters.cards import SEEN_WITHIN_S
from adapters.serving import Loaded, begin_load, state_of, unload
from common.db import run_in_db_thread, run_in_file_thread
from common.errors import Conflict, NotFound, ServiceUnavailable
from common.task_queue import check_worker
from engine.contract.errors import InvalidRequest, QuireError
from inference.api.chat import StoredCompletionsView
from inference.api.completions import CompletionsView, completion_job
from inference.api.operator import OperatorView
from inference.api.pooling.views import (
    ClassifyView,
    EmbeddingsView,
    PoolingView,
    RerankView,
    ScoreView,
)
from inference.errors import encode_error
from inference.generation.generation import Generation
from inference.generation.logprobs import best_outputs
from inference.generation.model_resolution import check_queue, resolve_model
from inference.generation.output import OutputDelta
from inference.schemas import objects
from inference.schemas.base import rename_error_field
from inference.schemas.completions import CompletionRequest
from inference.serving.respond import parse_offloaded, respond
from inference.serving.stream import EventWriter
from inference.web.endpoint_schema import Endpoint, EndpointSchema
from inference.web.responses import JSON_OR_EVENTS
from inference.web.views import GatewayRequest, GatewayView

_encode = msgspec.json.Encoder().encode

#: Seconds to wait for an adapter's check, which loads the model and may wait behind other checks.
CHECKED_WITHIN_S = 600.0
POLL_INTERVAL_S = 0.2


class LoadBody(BaseModel):
    """`load_inplace`: replace the adapter of this name by the path's current content. `model`: the
    base model, if several models are served.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    model: str = Field(default="", description="Base model of the adapter.")


class UnloadBody(BaseModel):
    """`model`: the base model, if adapters of several models have the name."""

    lora_name: str
    model: str = Field(default="", description="Base model of the adapter.")


class LoadAdapterView(OperatorView):
    """Adds an adapter for all tenants, from a folder on the server.

    A worker stores, checks and probes it before the response is sent. By then every gateway has
    refreshed its catalogue, so the adapter can be used on any of them at once.
    """

    schema = EndpointSchema(
        "Operator",
        post=Endpoint(
            "Load a LoRA adapter for all tenants",
            OpenApiTypes.STR,
            LoadBody,
            media_types={"text/plain": OpenApiTypes.STR},
        ),
    )

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`{"lora_name", "lora_path"}`, optionally `load_inplace` and `model`, the base model."""
        body = self.read_json(request)
        name, path = _text(body, "lora_name"), _text(body, "lora_path")
        if not name or not path:
            raise InvalidRequest("Both 'lora_name' and 'lora_path' must be provided.")
        try:
            loading = await run_in_file_thread(
                begin_load,
                key_id=request.caller.key_id,
                name=name,
                path=path,
                model=_text(body, "model"),
                in_place=_flag(body, "load_inplace"),
            )
        except (InvalidRequest, Conflict) as error:
            raise _rename_error_fields(error) from None
        await _wait_for_validation(loading)
        await asyncio.sleep(SEEN_WITHIN_S)
        return _text_response(f"Success: LoRA adapter '{name}' added successfully.")


class UnloadAdapterView(OperatorView):
    """Removes an adapter's names; the console can restore it."""

    schema = EndpointSchema(
        "Operator",
        post=Endpoint(
            "Unload a LoRA adapter",
            OpenApiTypes.STR,
            UnloadBody,
            media_types={"text/plain": OpenApiTypes.STR},
        ),
    )

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`{"lora_name"}`, optionally `model`, the base model."""
        body = self.read_json(request)
        name = _text(body, "lora_name")
        if not name:
            raise InvalidRequest("'lora_name' needs to be provided to unload a LoRA adapter.")
        was_loaded = await run_in_db_thread(
            unload, key_id=request.caller.key_id, name=name, model=_text(body, "model")
        )
        if not was_loaded:
            raise NotFound(f"The lora adapter '{name}' cannot be found.", param="lora_name")
        await asyncio.sleep(SEEN_WITHIN_S)
        return _text_response(f"Success: LoRA adapter '{name}' removed successfully.")


def _rename_error_fields(error: InvalidRequest | Conflict) -> QuireError:
    """Rename an error's field to this endpoint's; a missing folder is 404, as in vLLM."""
    renamed: QuireError = rename_error_field(error, {"path": "lora_path", "name": "lora_name"})
    if renamed.code == NotFound.code:
        return NotFound(str(renamed), param=renamed.param)
    return renamed


async def _wait_for_validation(loading: Loaded) -> None:
    """Wait for the check. Raises `InvalidRequest` with its reason, `ServiceUnavailable`."""
    deadline = time.monotonic() + CHECKED_WITHIN_S
    while time.monotonic() < deadline:
        state, problem = await run_in_db_thread(state_of, loading)
        if state == "live":
            return
        if state not in ("uploaded", "fetching", "validating", "probing", "ready"):
            raise InvalidRequest(problem or f"The adapter is {state}.", param="lora_path")
        await run_in_db_thread(check_worker)
        await asyncio.sleep(POLL_INTERVAL_S)
    raise ServiceUnavailable(
        "The adapter was not validated in time. Check that a worker is running."
    )


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a text.", param=name)
    return value or ""


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false.", param=name)
    return bool(value)


def _text_response(text: str) -> HttpResponse:
    response = HttpResponse(text, content_type="text/plain; charset=utf-8")
    response["Content-Length"] = str(len(response.content))
    return response


#: The endpoint of an invocation: the first one whose fields the body has.
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
#: Distinguish the endpoints of pooling models; a body with neither is sent to `/pooling`.
CLASSIFY, EMBED = "classify", "embed"


class _Texts:
    """Complete texts, each preceded by its prompt."""

    def __init__(self, generation: Generation, prompt: str, n: int) -> None:
        self._generation, self._n = generation, n
        self._texts = [prompt for _ in generation.outputs[0]]

    def append(self, increment: OutputDelta) -> None:
        self._texts[increment.index] += increment.text

    def body(self) -> dict[str, Any]:
        best = best_outputs(self._generation.outputs[0], self._n)
        return {"text": [self._texts[index] for index in best]}


class _TextsWriter(EventWriter[OutputDelta]):
    """One JSON object per change, with all of the text so far, followed by a NUL at which vLLM's
    clients split. White space before JSON is part of it.
    """

    heartbeat = b"\n"
    content_type = "text/plain"

    def __init__(self, texts: _Texts) -> None:
        self._texts = texts

    def write(self, news: Iterable[OutputDelta]) -> bytes:
        for increment in news:
            self._texts.append(increment)
        return _encode(self._texts.body()) + b"\0"

    def finish(self) -> bytes:
        """Nothing."""
        return b""

    def error(self, error: QuireError) -> bytes:
        """An error instead of a change."""
        return encode_error(error) + b"\0"


class GenerateView(GatewayView):
    """Completes one prompt; sampling parameters are fields of the body."""

    schema = EndpointSchema(
        "Completions",
        post=Endpoint(
            "Complete a prompt, as vLLM's oldest server does",
            objects.Texts,
            CompletionRequest,
            media_types={"text/plain": OpenApiTypes.STR},
        ),
    )
    generates = True
    queues_for_model = True
    renderer_classes = JSON_OR_EVENTS

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`{"text": [prompt and output, ...]}`; with `stream` several, each followed by a NUL."""
        completion = await parse_offloaded(request.ctx, CompletionRequest, self.read_json(request))
        ignored = completion.ignored_fields()
        prompts = completion.prompts
        if completion.embeds or len(prompts) != 1 or not isinstance(prompts[0], str):
            raise InvalidRequest("prompt must be one text.", param="prompt")
        prompt = prompts[0]
        served = await resolve_model(request.ctx, completion.model, sticky=completion.sticky_key)
        check_queue(
            request.ctx, served, completion.resolve_service_tier(request.caller.max_priority)[0]
        )
        generation = await Generation.start(await completion_job(request.ctx, completion, served))
        texts = _Texts(generation, prompt, completion.n or 1)
        return await respond(
            generation, ignored, writer=lambda: _TextsWriter(texts), answer=lambda: texts
        )


class InvocationsView(GatewayView):
    """Any endpoint with a synchronous response, chosen by the body's fields."""

    schema = EndpointSchema(
        "Completions",
        post=Endpoint(
            "Call any endpoint, recognized by the fields",
            OpenApiTypes.OBJECT,
            OpenApiTypes.OBJECT,
            streams=True,
        ),
    )
    generates = True
    renderer_classes = JSON_OR_EVENTS

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """Forward to the matching endpoint."""
        body = self.read_json(request)
        for fields, view in INVOCATIONS:
            if all(name in body for name in fields):
                return await (await self._chosen(view, request, body))().post(request)  # type: ignore[attr-defined]
        forms = "; ".join(" and ".join(fields) for fields, _ in INVOCATIONS)
        raise InvalidRequest(f"No endpoint takes a body like this. Bodies have: {forms}.")

    async def _chosen(
        self, view: type[GatewayView], request: GatewayRequest, body: dict[str, Any]
    ) -> type[GatewayView]:
        if view not in (EmbeddingsView, StoredCompletionsView):
            return view
        model = body.get("model")
        name = model if isinstance(model, str) else None
        served = await resolve_model(request.ctx, name, task=None)
        if served.info.pooling is None:
            return view
        if CLASSIFY in served.info.tasks and "task" not in body:
            return ClassifyView
        embeds = EMBED in served.info.tasks and "task" not in body
        return EmbeddingsView if embeds else PoolingView
