"""What a replica's heartbeat says of its model."""

from __future__ import annotations

from engine.contract.config import EngineConfig
from engine.contract.protocol import ModelInfo
from engine.core.engine_core import EngineCore
from engine.text.chat_template import read_template


def model_info(config: EngineConfig, core: EngineCore | None) -> ModelInfo:
    """The model as gateways must know it; little is known while it loads."""
    if core is None:
        return ModelInfo(
            name=config.name, path=config.model, max_model_len=0, vocab_size=0, dtype=""
        )
    facts = core.facts
    return ModelInfo(
        name=config.name,
        path=str(facts.tokenizer_folder),
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        dtype=facts.dtype,
        max_logprobs=config.max_logprobs,
        kv_capacity_tokens=(0 if facts.runs_whole_prompts else core.scheduler.capacity_tokens),
        eos_token_ids=list(facts.eos_token_ids),
        default_sampling=facts.default_sampling,
        tool_call_parser=config.tool_call_parser or "",
        chat_template=read_template(config.chat_template),
        reasoning_parser=config.reasoning_parser or "",
        tasks=facts.tasks,
        pooling=None if facts.pooling is None else facts.pooling.info,
    )
