"""`VllmConfig`: an engine's settings and its model's facts by the names that vLLM has for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from engine.checkpoints.model_files import apply_overrides
from engine.contract.engine_config import EngineConfig
from engine.model_loader.loader import LoadedModel
from engine.models.registry import ModelRegistry, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class LoRAConfig:
    """Configuration of adapters; None: the settings set no limit."""

    max_loras: int | None
    max_lora_rank: int | None
    max_cpu_loras: int | None

    @classmethod
    def of(cls, config: EngineConfig) -> LoRAConfig | None:
        """None where there are no adapters."""
        if not config.enable_lora:
            return None
        return cls(config.max_loras, config.max_lora_rank, config.max_cpu_loras)


class ModelConfig:
    """Configuration of the model. `hf_config` is its config.json as an object of transformers."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel) -> None:
        self._config, self._loaded = config, loaded
        self.model, self.tokenizer = config.model, config.tokenizer or config.model
        self.served_model_name, self.seed = config.name, config.seed
        self.dtype, self.quantization = loaded.dtype, config.quantization
        self.max_model_len, self.max_logprobs = loaded.max_model_len, config.max_logprobs
        self.skip_tokenizer_init = config.skip_tokenizer_init
        self.trust_remote_code, self.enforce_eager = config.trust_remote_code, config.enforce_eager
        self.runner_type = "generate" if loaded.pooler is None else "pooling"
        self.folder = str(loaded.folder)
        self.limit_mm_per_prompt = {"image": config.max_media("image")}

    @cached_property
    def hf_config(self) -> PreTrainedConfig:
        """config.json with `hf_overrides`. Runs no code of the model's folder."""
        from transformers import CONFIG_MAPPING, PreTrainedConfig

        raw = apply_overrides(read_config(self._loaded.folder), self._config)
        is_known_type = raw.get("model_type") in CONFIG_MAPPING
        kind = CONFIG_MAPPING[raw["model_type"]] if is_known_type else PreTrainedConfig
        config: PreTrainedConfig = kind.from_dict(raw)
        return config

    @property
    def model_class(self) -> type | None:
        """The registered class that runs it; None: it is a model of Quire's."""
        return ModelRegistry.find(apply_overrides(read_config(self._loaded.folder), self._config))

    @property
    def hf_text_config(self) -> PreTrainedConfig:
        """The same of the part that reads text."""
        return self.hf_config.get_text_config()

    def get_vocab_size(self) -> int:
        """Columns of the logits."""
        return self._loaded.spec.vocab_size

    def get_hidden_size(self) -> int:
        """Size of a token's hidden state."""
        return self._loaded.spec.hidden_size


@dataclass(frozen=True)
class CacheConfig:
    """Configuration of the KV cache. `num_gpu_blocks`: blocks on any device."""

    block_size: int
    num_gpu_blocks: int
    cache_dtype: str
    enable_prefix_caching: bool
    gpu_memory_utilization: float


@dataclass(frozen=True)
class SchedulerConfig:
    """Configuration of steps."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str
    enable_chunked_prefill: bool
    async_scheduling: bool


@dataclass(frozen=True)
class ParallelConfig:
    """Configuration of devices and processes."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    world_size: int = 1
    rank: int = 0
    data_parallel_rank: int = 0


@dataclass(frozen=True)
class DeviceConfig:
    """Configuration of the model's device."""

    device: torch.device

    @property
    def device_type(self) -> str:
        """ "cpu", "cuda" ..."""
        return self.device.type


@dataclass(frozen=True)
class DecodingConfig:
    """Configuration of structured outputs. `reasoning_backend`: the reasoning parser; "":
    detected.
    """

    reasoning_backend: str
    guided_decoding_backend: str = "guidance"


@dataclass(frozen=True)
class VllmConfig:
    """To be read, not written: an engine has its settings for life."""

    model_config: ModelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    device_config: DeviceConfig
    lora_config: LoRAConfig | None
    speculative_config: dict[str, Any] | None
    parallel_config: ParallelConfig

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        loaded: LoadedModel,
        device: torch.device,
        *,
        num_blocks: int,
        token_budget: int,
        plans_ahead: bool,
        rank: int = 0,
    ) -> VllmConfig:
        """The configuration of an engine whose model is loaded and whose cache is sized."""
        return cls(
            parallel_config=ParallelConfig(
                config.tensor_parallel_size,
                config.pipeline_parallel_size,
                world_size=config.world_size,
                rank=rank,
            ),
            model_config=ModelConfig(config, loaded),
            cache_config=CacheConfig(
                config.block_size,
                num_blocks,
                config.kv_cache_dtype,
                config.enable_prefix_caching,
                config.gpu_memory_utilization,
            ),
            scheduler_config=SchedulerConfig(
                config.max_num_seqs,
                token_budget,
                loaded.max_model_len,
                config.scheduling_policy,
                config.enable_chunked_prefill,
                plans_ahead,
            ),
            device_config=DeviceConfig(device),
            lora_config=LoRAConfig.of(config),
            speculative_config=config.speculative_config or None,
        )
