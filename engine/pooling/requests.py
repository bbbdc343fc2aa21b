"""How pooling requests fit the engine's queue: their checks, and the scheduler's settings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.pooling.params import GENERATE, PoolingParams, check_length, check_task
from engine.protocol import EngineRequest, PoolingInfo

if TYPE_CHECKING:
    from engine.models.loader import LoadedModel


def check_pooling(message: EngineRequest, name: str, loaded: LoadedModel) -> None:
    """Refuse what this model can't do, before anything is allocated.

    Raises:
        InvalidRequest: the task isn't one of the model's, or a parameter is out of range.
        ContextLengthExceeded: the prompt is too long.
    """
    params, count = message.pooling or PoolingParams(), len(message.prompt_token_ids)
    info = pooling_info(loaded)
    if info is None:
        check_task(name, [GENERATE], params.task or "pooling")
        return
    if message.pooling is None:
        check_task(name, tasks_of(loaded), GENERATE)
    if message.resume_token_ids or message.skip_indices:
        raise InvalidRequest("A pooled prompt has no output to go on from.", param="resume")
    params.check_against_model(
        model=name,
        tasks=tasks_of(loaded),
        embedding_size=info.embedding_size,
        matryoshka=info.matryoshka,
    )
    check_length(count, loaded.max_model_len)
    if params.second_segment >= count:
        raise InvalidRequest("second_segment is out of range.", param="second_segment")


def without_kv_quota(message: EngineRequest, loaded: LoadedModel) -> EngineRequest:
    """The request without its tenant's part of the KV cache, for a model that has none.

    What the scheduler counts for such a model are no blocks of memory.
    """
    if not loaded.runs_whole_prompts:
        return message
    return msgspec.structs.replace(message, kv_reserved_fraction=0.0, kv_max_fraction=1.0)


def tasks_of(loaded: LoadedModel) -> list[str]:
    """What the model does."""
    return list(loaded.pooler.settings.tasks) if loaded.pooler is not None else [GENERATE]


def pooling_info(loaded: LoadedModel) -> PoolingInfo | None:
    """What gateways are told of a pooling model; None for one that generates."""
    pooler = loaded.pooler
    if pooler is None:
        return None
    settings = pooler.settings
    return PoolingInfo(
        embedding_size=pooler.embedding_size,
        matryoshka=None if settings.matryoshka is None else list(settings.matryoshka),
        labels=list(settings.labels),
        prompt=settings.files.prompt,
        similarity=settings.files.similarity,
        token_types=getattr(loaded.spec, "type_vocab_size", 0) > 1,
    )


def scheduler_config(config: EngineConfig, loaded: LoadedModel, token_budget: int) -> EngineConfig:
    """The settings that the scheduler works by.

    An encoder's prompt runs whole in one step. A prefix can be shared only where the vector
    depends on the last token alone. Nobody decodes, so prompts needn't leave room.
    """
    if loaded.model.stateful:
        # What the tokens before have left is in no block.
        return replace(config, enable_prefix_caching=False)
    if loaded.pooler is None:
        return config
    settings = loaded.pooler.settings
    return replace(
        config,
        enable_prefix_caching=config.enable_prefix_caching and settings.caches_prefixes,
        enable_chunked_prefill=config.enable_chunked_prefill and not settings.encoder,
        max_model_len=loaded.max_model_len,
        max_num_batched_tokens=token_budget,
        prefill_tokens_beside_decodes=0,
    )
