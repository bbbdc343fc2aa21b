"""What a replica's heartbeat says of its model."""

from __future__ import annotations

from engine.contract.config import EngineConfig
from engine.contract.protocol import ModelInfo
from engine.core.engine_core import EngineCore
from engine.quantization.report import summary
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
        cache_config=cache_config(config, core),
        weights=summary(facts.load_report),
        io_processor=facts.io_processor,
        prompt_embeds_size=(
            facts.hidden_size if config.enable_prompt_embeds and facts.takes_embeds else 0
        ),
    )


def cache_config(config: EngineConfig, core: EngineCore) -> dict[str, str]:
    """The labels of `vllm:cache_config_info`, those that vLLM has and what is Quire's alone."""
    capacity, windows = core.capacity, core.scheduler.kv.windows
    values = {
        "block_size": config.block_size,
        "cache_dtype": config.kv_cache_dtype,
        "calculate_kv_scales": config.calculate_kv_scales,
        "cpu_kvcache_space": config.cpu_kvcache_space,
        "cpu_offload_gb": 0,
        "enable_prefix_caching": config.enable_prefix_caching,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "is_attention_free": core.facts.runs_whole_prompts,
        "kv_cache_max_concurrency": round(core.scheduler.concurrency(core.facts.max_model_len), 2),
        "kv_cache_memory_bytes": (
            capacity.num_blocks * config.block_size * capacity.kv_bytes_per_token
        ),
        "kv_cache_size_tokens": capacity.num_blocks * config.block_size,
        "num_cpu_blocks": 0,
        "num_gpu_blocks": capacity.num_blocks,
        "num_gpu_blocks_override": config.num_gpu_blocks_override,
        "prefix_caching_hash_algo": "sha256",
        "sliding_window": max((window for window in windows if window), default=None),
        "swap_space": 0,
        "swap_space_bytes": 0,
    }
    return {name: str(value) for name, value in values.items()}
