"""How pooling requests fit the engine's queue: their checks, and the scheduler's settings."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from engine.contract.config import EngineConfig
from engine.contract.errors import InvalidRequest
from engine.contract.pooling_params import GENERATE, PoolingParams, check_length, check_task
from engine.contract.protocol import EngineRequest
from engine.models.facts import ModelFacts


def check_pooling(message: EngineRequest, name: str, facts: ModelFacts) -> None:
    """Refuse what this model can't do, before anything is allocated.

    Raises:
        InvalidRequest: the task isn't one of the model's, or a parameter is out of range.
        ContextLengthExceeded: the prompt is too long.
    """
    params, count = message.pooling or PoolingParams(), len(message.prompt_token_ids)
    if facts.pooling is None:
        check_task(name, [GENERATE], params.task or "pooling")
        return
    if message.pooling is None:
        check_task(name, facts.tasks, GENERATE)
    if message.resume_token_ids or message.skip_indices:
        raise InvalidRequest("A pooled prompt has no output to go on from.", param="resume")
    params.check_against_model(
        model=name,
        tasks=facts.tasks,
        embedding_size=facts.pooling.info.embedding_size,
        matryoshka=facts.pooling.info.matryoshka,
    )
    check_length(count, facts.max_model_len)
    if params.second_segment >= count:
        raise InvalidRequest("second_segment is out of range.", param="second_segment")


def without_kv_quota(message: EngineRequest, facts: ModelFacts) -> EngineRequest:
    """The request without its tenant's part of the KV cache, for a model that has none.

    What the scheduler counts for such a model are no blocks of memory.
    """
    if not facts.runs_whole_prompts:
        return message
    return msgspec.structs.replace(message, kv_reserved_fraction=0.0, kv_max_fraction=1.0)


def scheduler_config(
    config: EngineConfig, facts: ModelFacts, token_budget: int, most_sequences: int | None = None
) -> EngineConfig:
    """The settings that the scheduler works by.

    `most_sequences` run at once, where each carries a state.

    An encoder's prompt runs whole in one step. A prefix can be shared only where the vector
    depends on the last token alone. Nobody decodes, so prompts needn't leave room.
    """
    if facts.stateful:
        # What the tokens before have left is in no block.
        seats = min(config.max_num_seqs, most_sequences or config.max_num_seqs)
        config = replace(config, enable_prefix_caching=False, max_num_seqs=seats)
    if facts.pooling is None:
        return config
    return replace(
        config,
        enable_prefix_caching=config.enable_prefix_caching and facts.pooling.caches_prefixes,
        enable_chunked_prefill=config.enable_chunked_prefill and not facts.pooling.encoder,
        max_model_len=facts.max_model_len,
        max_num_batched_tokens=token_budget,
        prefill_tokens_beside_decodes=0,
    )
