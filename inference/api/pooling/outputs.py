"""`POST /pooling` with `data`, which an installed IO processor converts; and pairwise scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from django.http.response import HttpResponseBase
from numpy import ndarray

from engine.contract.errors import ConfigError, InvalidRequest
from engine.contract.messages import ModelInfo
from engine.contract.plugins import IOProcessor, PooledData, PooledPrompt, io_processor
from engine.contract.pooling_params import Vectors, default_task, similarity
from inference.api.pooling.inputs import item_entries, pair_entries, shortened_texts
from inference.api.pooling.job import PoolingRequestHandler
from inference.api.pooling.schemas import Item, PoolingRequest, ScoringBody
from inference.errors import Internal
from inference.loop.offload import get_render_pool

#: Cost of an IO processor, which is unknown: it never runs on the event loop.
_LONG = 1 << 30
#: Task that vLLM's clients send with such a request.
PLUGIN = "plugin"


def processor_of(info: ModelInfo) -> IOProcessor[Any, Any]:
    """The model's processor.

    Raises: `InvalidRequest` for a model that has none; `Internal` if this gateway lacks it.
    """
    if not info.io_processor:
        raise InvalidRequest(f"The model '{info.name}' has no IO processor.", param="data")
    try:
        return io_processor(info.io_processor, info.name)
    except ConfigError as error:
        raise Internal(f"A gateway lacks the model's plug-in: {error.message}") from error


async def answer_data(call: PoolingRequestHandler, body: PoolingRequest) -> HttpResponseBase:
    """`{"request_id", "created_at", "data", ...}`."""
    processor, info = processor_of(call.served.info), call.served.info
    prompts = await get_render_pool().run(
        call.request.caller.tenant, _LONG, _prompts, processor, body.data
    )
    task = default_task(info.tasks) if body.task in (None, PLUGIN) else body.task or ""
    params = processor.merge_pooling_params(body.params(task))
    entries = await call.build_entries(item_entries(call.request.ctx, call.served, prompts, params))

    def make(results: list[ndarray[Any, Any]]) -> dict[str, Any]:
        outputs = [
            PooledPrompt(entry.token_ids, PooledData(data))
            for entry, data in zip(entries, results, strict=True)
        ]
        return {"data": processor.post_process(outputs)}

    return await call.answer(entries, make)


def _prompts(processor: IOProcessor[Any, Any], data: Any) -> list[Item]:
    """Prompts to pool. Raises `InvalidRequest` with the processor's message."""
    try:
        processed = processor.pre_process(processor.parse_data(data))
    except ValueError as error:
        raise InvalidRequest(f"data: {error}", param="data") from error
    prompts: Sequence[Any] = [processed] if isinstance(processed, (str, dict)) else processed
    items = [_item(prompt) for prompt in prompts]
    if not items:
        raise InvalidRequest("data gives no prompt.", param="data")
    return items


def _item(prompt: Any) -> Item:
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if not isinstance(prompt, (str, list)) or not prompt:
        raise Internal("The model's IO processor made a prompt that is no text and no token ids.")
    return prompt


Pairs = list[tuple[int, int]]
Make = Callable[[list[float]], dict[str, Any]]


async def answer_with_scores(
    call: PoolingRequestHandler,
    body: ScoringBody,
    first: list[str],
    second: list[str],
    pairs: Pairs,
    make: Make,
) -> HttpResponseBase:
    """Score `pairs` of indices into `first` and `second`; respond with `make(scores)`.

    Raises as `PoolingRequestHandler.answer` and `item_entries` do.
    """
    first = await shortened_texts(
        call.request.ctx, call.served, first, body.max_tokens_per_query or 0
    )
    second = await shortened_texts(
        call.request.ctx, call.served, second, body.max_tokens_per_doc or 0
    )
    if "embed" in call.served.info.tasks:
        return await _by_likeness(call, first, second, pairs, make)
    texts = [(first[a], second[b]) for a, b in pairs]
    params = call.body.params("score")
    entries = await call.build_entries(
        pair_entries(call.request.ctx, call.served, texts, params, call.body.side)
    )
    return await call.answer(entries, lambda results: make([float(row[0]) for row in results]))


async def _by_likeness(
    call: PoolingRequestHandler, first: list[str], second: list[str], pairs: Pairs, make: Make
) -> HttpResponseBase:
    """Score pairs by their embeddings; each text is embedded once."""
    params = call.body.params("embed")
    pending_entries = item_entries(
        call.request.ctx, call.served, [*first, *second], params, side=call.body.side
    )
    entries = await call.build_entries(pending_entries)
    facts = call.served.info.pooling
    kind = facts.similarity if facts is not None else "cosine"

    def scored(vectors: list[Vectors]) -> dict[str, Any]:
        half = len(first)
        return make([similarity(kind, vectors[a], vectors[half + b]) for a, b in pairs])

    return await call.answer(entries, scored)
