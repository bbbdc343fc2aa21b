"""Names of `vllm.model_executor.models`."""

from engine.models.registry import ModelRegistry

__all__ = ["ModelRegistry"]
