"""Files of hub repositories: which ones a model needs, and their paths."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from engine.contract.engine_config import EngineConfig

#: PyTorch's weight files as transformers named them, and a pattern for them in any folder.
TORCH_WEIGHTS = "*pytorch_model*.bin"
#: Configuration and tokenizer files of a hub repository.
TOKENIZER_PATTERNS = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")


def is_hub_id(name: str) -> bool:
    """Whether a name that isn't an existing path has the form `owner/name`."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def resolve_source(path: Path) -> Path:
    """Return the path of a model or an adapter without links, except for a link of the hub's cache
    to a GGUF file: it has the file's name, and its target only a hash.
    """
    resolved = path.resolve()
    if path.suffix == ".gguf" != resolved.suffix:
        return path.parent.resolve() / path.name
    return resolved


def file_patterns(config: EngineConfig, names: Collection[str] = ()) -> list[str]:
    """Return the `allow_patterns` of a hub download: the files that the model needs.

    `names`: files of the repository. PyTorch's weights are needed only if there are no others.
    """
    patterns = [*TOKENIZER_PATTERNS, "*.safetensors"]
    if config.load_format in ("pt", "npcache"):
        patterns += ["*.bin", "*.pt", "*.pth"]
    has_safe_weights = any(name.endswith((".safetensors", ".gguf")) for name in names)
    patterns += [TORCH_WEIGHTS] if config.load_format == "auto" and not has_safe_weights else []
    patterns += ["*.tensors"] if config.load_format == "tensorizer" else []
    patterns += ["*.py"] if config.trust_remote_code else []
    return patterns
