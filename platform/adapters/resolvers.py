"""Who finds adapters that nobody has loaded: a folder of the operator's, and installed packages."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from pathlib import Path
from typing import Any

from django.conf import settings

from adapters.files import MAX_CONFIG_BYTES
from engine.contract.adapters import CONFIG_FILE
from engine.contract.errors import ConfigError
from engine.contract.lora_request import LoRARequest
from engine.contract.lora_resolver import LoRAResolver, installed_resolvers
from engine.contract.plugins import is_wanted

#: vLLM's name for the one that looks into a folder.
FOLDER_RESOLVER = "lora_filesystem_resolver"


class FolderResolver(LoRAResolver):
    """Takes `FOLDER/NAME`, if its configuration says that it's an adapter of the model.

    Nothing outside the folder is an answer, whatever the name says or a link leads to.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """See `LoRAResolver`."""
        return await asyncio.to_thread(self._look_up, base_model_name, lora_name)

    def _look_up(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        root = self._folder.resolve()
        if "\0" in lora_name or ".." in Path(lora_name).parts:
            return None
        found = (root / lora_name).resolve()
        if found == root or not found.is_relative_to(root):
            return None
        config = _config(found / CONFIG_FILE)
        base = config.get("base_model_name_or_path")
        if config.get("peft_type") != "LORA" or not _same_model(base, base_model_name):
            return None
        return LoRARequest(lora_name, 1, str(found))


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


@cache
def lora_resolvers() -> dict[str, LoRAResolver]:
    """Those of this process by name, the folder's first.

    Raises `ConfigError` for a folder that isn't there and for a package's that can't be made.
    """
    found = installed_resolvers()
    named = str(settings.QUIRE["LORA_RESOLVER_CACHE_DIR"])
    if not named or not is_wanted(FOLDER_RESOLVER):
        return found
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"QUIRE_LORA_RESOLVER_CACHE_DIR must be a folder; {named} is none.",
            param="QUIRE_LORA_RESOLVER_CACHE_DIR",
        )
    return {FOLDER_RESOLVER: FolderResolver(folder), **found}
