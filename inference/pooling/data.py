"""`POST /pooling` with `data`: an installed IO processor reads it, and makes the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.http.response import HttpResponseBase
from numpy import ndarray

from engine.contract.errors import ConfigError, InvalidRequest
from engine.contract.io_processor import IOProcessor, PooledData, PooledPrompt, io_processor
from engine.contract.pooling_params import default_task
from engine.contract.protocol import ModelInfo
from inference.errors import Internal
from inference.pooling.inputs import item_entries
from inference.pooling.run import Call
from inference.pooling.schemas import PoolingRequest
from inference.pooling.texts import Item
from inference.rendering.pool import render_pool

#: Ours to run, of unknown cost: never on the event loop.
_LONG = 1 << 30
#: What vLLM's clients send as the task of such a request.
PLUGIN = "plugin"


def processor_of(info: ModelInfo) -> IOProcessor[Any, Any]:
    """The model's processor.

    Raises: `InvalidRequest` for a model that has none; `Internal` where this gateway lacks it.
    """
    if not info.io_processor:
        raise InvalidRequest(f"The model '{info.name}' has no IO processor.", param="data")
    try:
        return io_processor(info.io_processor, info.name)
    except ConfigError as error:
        raise Internal(f"A gateway lacks the model's plug-in: {error.message}") from error


async def answer_data(call: Call, body: PoolingRequest) -> HttpResponseBase:
    """`{"request_id", "created_at", "data", ...}`."""
    processor, info = processor_of(call.served.info), call.served.info
    prompts = await render_pool().run(_LONG, _prompts, processor, body.data)
    task = default_task(info.tasks) if body.task in (None, PLUGIN) else body.task or ""
    params = processor.merge_pooling_params(body.params(task))
    entries = await call.entries(item_entries(call.served, prompts, params))

    def make(results: list[ndarray[Any, Any]]) -> dict[str, Any]:
        outputs = [
            PooledPrompt(entry.token_ids, PooledData(data))
            for entry, data in zip(entries, results, strict=True)
        ]
        return {"data": processor.post_process(outputs)}

    return await call.answer(entries, make)


def _prompts(processor: IOProcessor[Any, Any], data: Any) -> list[Item]:
    """What the model is to pool. Raises `InvalidRequest` with the processor's own words."""
    try:
        made = processor.pre_process(processor.parse_data(data))
    except ValueError as error:
        raise InvalidRequest(f"data: {error}", param="data") from error
    prompts: Sequence[Any] = [made] if isinstance(made, (str, dict)) else made
    found = [_item(prompt) for prompt in prompts]
    if not found:
        raise InvalidRequest("data gives no prompt.", param="data")
    return found


def _item(prompt: Any) -> Item:
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if not isinstance(prompt, (str, list)) or not prompt:
        raise Internal("The model's IO processor made a prompt that is no text and no token ids.")
    return prompt
