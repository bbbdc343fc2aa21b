"""Which model an adapter's configuration says that it's for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from adapters.contents import MAX_CONFIG_BYTES


def is_adapter_of(config: Path, model: str) -> bool:
    """Whether a configuration says that it's an adapter, and of this model."""
    found = _config(config)
    base = found.get("base_model_name_or_path")
    return found.get("peft_type") == "LORA" and _same_model(base, model)


def _config(file: Path) -> dict[str, Any]:
    """Empty for what is none: its check would refuse it, and here it's no answer."""
    try:
        with file.open("rb") as content:
            found = json.loads(content.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _same_model(base: object, served: str) -> bool:
    """By the whole name, or by its last part: `meta-llama/Llama-3.2-1B` may lie in a folder."""
    if not isinstance(base, str) or not base:
        return False
    return base == served or Path(base).name == Path(served).name
