"""What a replica's heartbeat says of its model."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.pooling.requests import pooling_info, tasks_of
from engine.protocol import ModelInfo


def model_info(config: EngineConfig, core: EngineCore | None) -> ModelInfo:
    """The model as gateways must know it; little is known while it loads."""
    if core is None:
        return ModelInfo(
            name=config.name, path=config.model, max_model_len=0, vocab_size=0, dtype=""
        )
    loaded = core.loaded
    return ModelInfo(
        name=config.name,
        path=str(loaded.tokenizer_folder),
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.spec.vocab_size,
        dtype=str(loaded.dtype).removeprefix("torch."),
        max_logprobs=config.max_logprobs,
        kv_capacity_tokens=(0 if loaded.runs_whole_prompts else core.scheduler.capacity_tokens),
        eos_token_ids=list(loaded.eos_token_ids),
        default_sampling=loaded.default_sampling,
        tool_call_parser=config.tool_call_parser or "",
        reasoning_parser=config.reasoning_parser or "",
        tasks=tasks_of(loaded),
        pooling=pooling_info(loaded),
    )
