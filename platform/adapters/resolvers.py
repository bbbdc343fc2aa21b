"""Resolvers of adapters that aren't loaded: from an operator's folder, the hub, and packages."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from django.conf import settings

from adapters import archive, store
from adapters.sources import Repository, asking, check_repository, is_adapter_of
from common.errors import AdapterInvalid, HubUnavailable
from engine.contract.errors import ConfigError, InvalidRequest
from engine.contract.lora import CONFIG_FILE, WEIGHTS_FILE, LoRARequest
from engine.contract.plugins import LoRAResolver, is_selected, load_lora_resolvers

# `hf_hub_resolver`: a request's `owner/name` is the adapter in that repository's root,
# `owner/name/folder` one in a subfolder. Only its configuration, safetensors and tokenizer files
# are downloaded, all of one commit, and only from repositories that the operator allows.

#: Its name in vLLM's documentation of resolvers.
HUB_RESOLVER = "hf_hub_resolver"
_FOLDER = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96}){0,7}", re.A)


class HubResolver(LoRAResolver):
    """Resolves names of repositories on the hub; see the comment above.

    Downloads stay in the store's staging folders and are reused until a sweep removes those that
    haven't been requested for a while.

    Args:
        repositories: `owner/name` or `owner/name@revision`. They are read with the server's own
            token: everyone who may use the base model may use a listed repository.
    """

    def __init__(self, repositories: Sequence[str]) -> None:
        self._named = {repository.partition("@")[0]: repository for repository in repositories}
        self._fetching: dict[tuple[str, str, str], asyncio.Task[Path | None]] = {}
        self._fetched: dict[tuple[str, str, str], Path] = {}

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """See `LoRAResolver`. Raises `AdapterInvalid`, `AdapterTooLarge` for refused files."""
        repository, folder = _parse_name(lora_name)
        if repository not in self._named:
            return None
        key = (base_model_name, repository, folder)
        task = self._fetching.get(key)
        if task is None:
            # A separate task: a caller may be cancelled, and later callers join the download.
            lookup = asyncio.to_thread(self._find_files, *key)
            task = self._fetching[key] = asyncio.ensure_future(lookup)
            task.add_done_callback(lambda done: self._on_download_done(key, done))
        path = await asyncio.shield(task)
        return None if path is None else LoRARequest(lora_name, 1, str(path))

    def _on_download_done(self, key: tuple[str, str, str], task: asyncio.Task[Path | None]) -> None:
        del self._fetching[key]
        if not task.cancelled():
            task.exception()  # mark it as retrieved: all callers may have left

    def _find_files(self, base: str, repository: str, folder: str) -> Path | None:
        """Path of the adapter's files; None if there is none for this model."""
        try:
            with asking(repository):
                return self._fetch(base, repository, folder)
        except HubUnavailable as error:
            # Log only: the error may name an internal mirror.
            raise ConnectionError(error.message) from error

    def _fetch(self, base: str, repository: str, folder: str) -> Path | None:
        hub_repository = Repository.from_hub(self._named[repository], private=True)
        prefix = f"{folder}/" if folder else ""
        names = [
            name.removeprefix(prefix) for name in hub_repository.sizes if name.startswith(prefix)
        ]
        if CONFIG_FILE not in names:
            return None
        names = [name for name in names if "/" not in name]
        _check_adapter_files(names)
        required = [f"{prefix}{name}" for name in archive.adapter_files(names)]
        hub_repository.check_size(required, store.max_adapter_bytes())
        key = (repository, hub_repository.commit, folder)
        staged = self._fetched[key] = self._again(key) or store.staging_dir()
        if not is_adapter_of(hub_repository.download(required[0], staged), base):
            return None
        extra_files = [hub_repository.download(name, staged) for name in required[1:]]
        return extra_files[0].parent

    def _again(self, key: tuple[str, str, str]) -> Path | None:
        """Path of this commit's files, unless a sweep has removed them."""
        staged = self._fetched.get(key)
        try:
            if staged is not None:
                os.utime(staged)
        except FileNotFoundError:
            return None
        return staged


def is_fetched(path: Path) -> bool:
    """Whether a `HubResolver` put this path here; the path must have its links resolved."""
    root = store.adapters_dir().resolve()
    inside = path.relative_to(root).parts if path.is_relative_to(root) else ()
    return bool(inside) and inside[0].startswith(store.STAGING)


def _parse_name(name: str) -> tuple[str, str]:
    """Split a name into repository and folder; ("", "") for an invalid name."""
    owner, _, rest = name.partition("/")
    repository, _, folder = rest.partition("/")
    outside = {".", ".."} & set(folder.split("/"))
    if not repository or outside or (folder and not _FOLDER.fullmatch(folder)):
        return "", ""
    return f"{owner}/{repository}", folder


def _check_adapter_files(names: list[str]) -> None:
    """Raise `AdapterInvalid` if a folder's file names don't make an adapter."""
    is_complete = WEIGHTS_FILE in names
    for name in sorted(names):
        if not is_complete and name.startswith("adapter_model."):
            archive.check_companion_file(name)
    if not is_complete:
        raise AdapterInvalid(f"The repository has no file {WEIGHTS_FILE}.", param="model")


#: vLLM's name of the file system resolver.
FOLDER_RESOLVER = "lora_filesystem_resolver"


class FolderResolver(LoRAResolver):
    """Resolves a name to `FOLDER/NAME`, if that is an adapter of the model.

    Paths outside the folder are refused, whether by the name or by a link.
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
        folder = (root / lora_name).resolve()
        if folder == root or not folder.is_relative_to(root):
            return None
        if not is_adapter_of(folder / CONFIG_FILE, base_model_name):
            return None
        return LoRARequest(lora_name, 1, str(folder))


@cache
def lora_resolvers() -> dict[str, LoRAResolver]:
    """This process's resolvers by name: the folder's, the hub's, then those of packages.

    Raises `ConfigError` for a missing folder, an invalid repository, or a package's resolver that
    can't be created.
    """
    return {**_of_folder(), **_of_hub(), **load_lora_resolvers()}


def _of_folder() -> dict[str, LoRAResolver]:
    folder = settings.QUIRE.lora_resolver_cache_dir
    if folder is None or not is_selected(FOLDER_RESOLVER):
        return {}
    if not folder.is_dir():
        raise ConfigError(
            f"QUIRE_LORA_RESOLVER_CACHE_DIR must be a folder; {folder} is none.",
            param="QUIRE_LORA_RESOLVER_CACHE_DIR",
        )
    return {FOLDER_RESOLVER: FolderResolver(folder)}


def _of_hub() -> dict[str, LoRAResolver]:
    named = settings.QUIRE.lora_resolver_hf_repo_list
    if not named or not is_selected(HUB_RESOLVER):
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
