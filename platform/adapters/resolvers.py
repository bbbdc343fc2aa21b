"""Who finds adapters that nobody has loaded: a folder of the operator's, repositories of the hub,
and installed packages.
"""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path

from django.conf import settings

from adapters.bases import is_adapter_of
from adapters.hub_resolver import HUB_RESOLVER, HubResolver
from adapters.sources import check_repository
from engine.contract.adapters import CONFIG_FILE
from engine.contract.errors import ConfigError, InvalidRequest
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
        if not is_adapter_of(found / CONFIG_FILE, base_model_name):
            return None
        return LoRARequest(lora_name, 1, str(found))


@cache
def lora_resolvers() -> dict[str, LoRAResolver]:
    """Those of this process by name: the folder's, the hub's, then those of packages.

    Raises `ConfigError` for a folder that isn't there, for what is no repository, and for a
    package's that can't be made.
    """
    return {**_of_folder(), **_of_hub(), **installed_resolvers()}


def _of_folder() -> dict[str, LoRAResolver]:
    named = str(settings.QUIRE["LORA_RESOLVER_CACHE_DIR"])
    if not named or not is_wanted(FOLDER_RESOLVER):
        return {}
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"QUIRE_LORA_RESOLVER_CACHE_DIR must be a folder; {named} is none.",
            param="QUIRE_LORA_RESOLVER_CACHE_DIR",
        )
    return {FOLDER_RESOLVER: FolderResolver(folder)}


def _of_hub() -> dict[str, LoRAResolver]:
    named: list[str] = settings.QUIRE["LORA_RESOLVER_HF_REPO_LIST"]
    if not named or not is_wanted(HUB_RESOLVER):
        return {}
    for repository in named:
        try:
            check_repository(repository)
        except InvalidRequest as error:
            raise ConfigError(
                f"QUIRE_LORA_RESOLVER_HF_REPO_LIST must hold owner/name or owner/name@revision; "
                f"{repository[:200]} is neither.",
                param="QUIRE_LORA_RESOLVER_HF_REPO_LIST",
            ) from error
    return {HUB_RESOLVER: HubResolver(named)}
