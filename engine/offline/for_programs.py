"""Small things that programs for vLLM import beside its engine."""

from __future__ import annotations

import gc
from typing import Any

import torch


def PoolerConfig(**settings: Any) -> dict[str, Any]:
    """The setting `pooler_config`; what wasn't given stays the model's own."""
    return {name: value for name, value in settings.items() if value is not None}


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free what an engine that was let go of had: its cycles, and a GPU's cached memory. An engine
    has no other processes here, and no Ray.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
