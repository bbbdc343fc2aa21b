"""Pictures in prompts: from files to what an encoder reads, and which tokens stand for them.

Without torch: gateways and media processes use it too. What computes is in `engine.models.vision`.
"""

from engine.multimodal.registry import (
    MULTIMODAL_REGISTRY,
    MultiModalInputs,
    MultiModalPlugin,
    MultiModalRegistry,
)

__all__ = ["MULTIMODAL_REGISTRY", "MultiModalInputs", "MultiModalPlugin", "MultiModalRegistry"]
