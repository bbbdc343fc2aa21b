"""A model from the hub: its files in the cache, with what is there already left out.

A download that was cut off goes on where it stopped: `huggingface_hub` keeps what came of each
file, and asks for the rest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.contract.config import EngineConfig
from engine.contract.errors import ModelLoadError
from engine.contract.hub_files import file_patterns
from engine.contract.loading import DOWNLOADING, note


def download(config: EngineConfig) -> Path:
    """The folder of the hub's model that `config` names. Raises `ModelLoadError`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted: dict[str, Any] = {
        "repo_id": config.model,
        "revision": config.revision,
        "cache_dir": config.download_dir,
        "allow_patterns": file_patterns(config),
    }
    try:
        note(DOWNLOADING)
        try:
            there = snapshot_download(**wanted, dry_run=True)
            total = sum(each.file_size or 0 for each in there)
        except (LocalEntryNotFoundError, OSError):
            total = 0  # no hub is in reach: what is in the cache will do, or the error comes below
        return Path(snapshot_download(**wanted, tqdm_class=_bar(total)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelLoadError(
            f"{config.model} is no folder here and couldn't be downloaded: {error}", param="model"
        ) from error


def _bar(total: int) -> type[Any]:
    """The hub's own bars, one of which counts all bytes that are on the disk."""
    from huggingface_hub.utils import tqdm

    class Told(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts = str(kwargs.get("desc", "")).startswith("Reconstructing")
            self._done = int(kwargs.get("initial") or 0)
            super().__init__(*args, **kwargs)

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts:
                self._done += int(n or 0)
                note(DOWNLOADING, self._done, max(total, self._done))
            return super().update(n)

    return Told
