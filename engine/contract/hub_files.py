"""Which files of a repository on the hub a model needs.

Torch-free: what downloads them asks this, and so does who tells beforehand how much that will be.
"""

from __future__ import annotations

from engine.contract.config import EngineConfig


def file_patterns(config: EngineConfig) -> list[str]:
    """Patterns of names, as `huggingface_hub` takes them for `allow_patterns`."""
    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    if config.load_format in ("pt", "npcache"):
        patterns += ["*.bin", "*.pt", "*.pth"]
    patterns += ["*.tensors"] if config.load_format == "tensorizer" else []
    patterns += ["*.py"] if config.trust_remote_code else []
    return patterns
