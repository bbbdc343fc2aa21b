"""Preprocessing of images, videos, audio and documents: encoder inputs and placeholder tokens.

It doesn't use torch, as gateways and media workers import it. The encoders are in
`engine.models.vision` and `engine.models.speech`.
"""

from engine.multimodal.registry import (
    MULTIMODAL_REGISTRY,
    MultiModalInputs,
    MultiModalPlugin,
    MultiModalRegistry,
)

__all__ = ["MULTIMODAL_REGISTRY", "MultiModalInputs", "MultiModalPlugin", "MultiModalRegistry"]
