"""Names of `vllm.config`."""

from __future__ import annotations

from typing import Any

from engine.model_loader.vllm_config import (
    CacheConfig,
    DecodingConfig,
    DeviceConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from engine.offline.engine_args import PoolerConfig
from engine.worker.gpu.graph_dispatcher import CUDAGraphMode

__all__ = [
    "AttentionConfig",
    "CUDAGraphMode",
    "CacheConfig",
    "CompilationConfig",
    "DecodingConfig",
    "DeviceConfig",
    "LoRAConfig",
    "ModelConfig",
    "ParallelConfig",
    "PoolerConfig",
    "SchedulerConfig",
    "VllmConfig",
]


def AttentionConfig(**settings: Any) -> dict[str, Any]:
    """Return the setting `attention_config`; fields that are None are left out."""
    return {name: value for name, value in settings.items() if value is not None}


def CompilationConfig(mode: int | None = None, **settings: Any) -> dict[str, Any]:
    """Return the setting `compilation_config`; fields that are None are left out."""
    fields = {"mode": mode, **settings}
    return {name: value for name, value in fields.items() if value is not None}
