"""Names of `vllm.model_executor.models.interfaces`."""

from engine.models.interface import SupportsMultiModal
from engine.models.supports_lora import SupportsLoRA

__all__ = ["SupportsLoRA", "SupportsMultiModal", "SupportsVision"]

#: vLLM's earlier name.
SupportsVision = SupportsMultiModal
