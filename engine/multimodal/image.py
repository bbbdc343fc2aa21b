"""Names of `vllm.multimodal.image`."""

from engine.multimodal.registry import ImagePlugin

__all__ = ["ImagePlugin"]
