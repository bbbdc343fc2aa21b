"""Sources of adapters other than uploads: configured folders, and the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.conf import settings

from adapters import archive
from adapters.archive import MAX_CONFIG_BYTES
from catalog import hub
from common.errors import AdapterInvalid, AdapterTooLarge
from engine.contract.errors import InvalidRequest
from engine.contract.hub_files import resolve_source
from engine.contract.lora import CONFIG_FILE, WEIGHTS_FILE, snapshot_of


def is_adapter_of(config: Path, model: str) -> bool:
    content = _config(config)
    base = content.get("base_model_name_or_path")
    return content.get("peft_type") == "LORA" and _same_model(base, model)


def _config(file: Path) -> dict[str, Any]:
    """Read the configuration; empty if invalid, as the resolver then simply has no match."""
    try:
        with file.open("rb") as content:
            parsed = json.loads(content.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _same_model(base: object, served: str) -> bool:
    """Compare whole names, or last parts: `meta-llama/Llama-3.2-1B` may be in a local folder."""
    if not isinstance(base, str) or not base:
        return False
    return base == served or Path(base).name == Path(served).name


HUB = "hub:"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[\w./-]{1,100})?", re.A)


def check_path(text: str, *, anywhere: bool = False) -> Path:
    """The folder or GGUF file, its links resolved. Raises `InvalidRequest` with param `path`.

    Only inside the folders of `QUIRE_ADAPTER_DIRS`, unless `anywhere` is set: users with a shell on
    the server can read other folders anyway.
    """
    if not text.strip() or "\0" in text:
        raise InvalidRequest("path must be an adapter's folder.", param="path")
    allowed = [Path(folder).resolve() for folder in settings.QUIRE.adapter_dirs]
    with _telling(text):
        resolved = _resolved(Path(text).expanduser(), allowed)
    if not anywhere and not any(resolved.is_relative_to(folder) for folder in allowed):
        raise InvalidRequest(
            f"{text[:200]} is in none of the folders that adapters may come from: "
            f"{', '.join(map(str, allowed))}. QUIRE_ADAPTER_DIRS names them.",
            param="path",
        )
    with _telling(text):
        exists = resolved.is_dir() or (resolved.is_file() and resolved.suffix == ".gguf")
    if not exists:
        raise InvalidRequest(f"No adapter found for {text[:200]}.", param="path", code="not_found")
    return resolved


def _resolved(path: Path, allowed: list[Path]) -> Path:
    """Resolve a path; a relative one in the first folder that has it. Raises OSError,
    RuntimeError.
    """
    inside = [] if path.is_absolute() else [folder / path for folder in allowed]
    existing = next((candidate for candidate in inside if candidate.exists()), path)
    return resolve_source(snapshot_of(existing))


@contextmanager
def _telling(text: str) -> Iterator[None]:
    """Convert a path's errors to `InvalidRequest`: circular links, an unknown home directory, a
    name that is too long.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidRequest(f"{text[:200]} can't be read: {reason}.", param="path") from error


def check_repository(text: str) -> None:
    """Raise `InvalidRequest` unless it's `owner/name` or `owner/name@revision`."""
    if not _REPOSITORY.fullmatch(text) or ".." in text:
        raise InvalidRequest(
            "repository must be owner/name or owner/name@revision.", param="repository"
        )


def fetch(repository: str, staged: Path, limit: int, *, private: bool) -> None:
    """Download a repository's adapter into a folder.

    Args:
        private: use the server's own token. Never for tenants, who could then read repositories
            that only the operator may read.
    Raises: `HubUnavailable`; `AdapterInvalid`, `AdapterTooLarge`.
    """
    with asking(repository):
        hub_repository = Repository.from_hub(repository, private=private)
        names = _files_to_fetch(hub_repository.sizes)
        hub_repository.check_size(names, limit)
        folder = staged / "hub"
        for name in names:
            hub_repository.download(name, folder)
    archive.stage_folder(folder, staged, limit)
    archive.remove_staging(folder)


@dataclass(frozen=True)
class Repository:
    """A repository of the hub, at one commit.

    Attributes:
        sizes: bytes of its files.
        token: None: the server's own; False: no token.
    """

    name: str
    commit: str
    sizes: Mapping[str, int]
    token: bool | None

    @classmethod
    def from_hub(cls, repository: str, *, private: bool) -> Repository:
        """Look up `owner/name` or `owner/name@revision`. Raises the hub client's errors."""
        from huggingface_hub import HfApi

        name, _, revision = repository.partition("@")
        token = None if private else False
        info = HfApi(token=token).model_info(name, revision=revision or None, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        return cls(name, info.sha or "", sizes, token)

    def check_size(self, names: Collection[str], limit: int) -> None:
        """Raise `AdapterTooLarge` if the files have more than `limit` bytes."""
        if sum(self.sizes[name] for name in names) > limit:
            raise AdapterTooLarge(f"{self.name} has more than {limit} bytes.", param="repository")

    def download(self, name: str, folder: Path) -> Path:
        """Download a file into a folder. Raises the hub client's errors."""
        from huggingface_hub import hf_hub_download

        return Path(
            hf_hub_download(
                self.name, name, revision=self.commit, token=self.token, local_dir=folder
            )
        )


def asking(repository: str) -> AbstractContextManager[None]:
    """Convert the hub client's errors to `HubUnavailable`, or `AdapterInvalid` for bad names."""
    return hub.hub_errors(repository, AdapterInvalid, "repository")


def _files_to_fetch(sizes: Mapping[str, int]) -> list[str]:
    """The files to fetch. Raises `AdapterInvalid`."""
    present = archive.adapter_files(sizes)
    if WEIGHTS_FILE in sizes and CONFIG_FILE in sizes:
        return present
    ggufs = [name for name in sizes if name.endswith(".gguf") and "/" not in name]
    if len(ggufs) == 1:
        return ggufs
    for name in sorted(sizes):
        if name.startswith("adapter_model"):
            archive.check_name(name)
    raise AdapterInvalid(f"The repository has no file {WEIGHTS_FILE}.", param="repository")
