"""Quire's engine: scheduler, paged KV cache, models. Importing the package loads no torch."""

from typing import TYPE_CHECKING, Any

from engine.pooling.params import PoolingParams
from engine.sampling_params import SamplingParams
from engine.structured.params import StructuredOutputsParams

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.models.outside import ModelRegistry
    from engine.outputs import CompletionOutput, RequestOutput

__all__ = [
    "LLM",
    "CompletionOutput",
    "ModelRegistry",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> Any:
    """Load what needs torch only when it's asked for."""
    if name == "LLM":
        from engine.llm import LLM

        return LLM
    if name == "ModelRegistry":
        from engine.models.outside import ModelRegistry

        return ModelRegistry
    if name in ("CompletionOutput", "RequestOutput"):
        from engine import outputs

        return getattr(outputs, name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
