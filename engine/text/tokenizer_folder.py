"""Where a model's tokenizer files are, in the form that gateways read."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from pathlib import Path

from engine.contract.config import EngineConfig

log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """`QUIRE_CACHE_DIR`, else `quire` in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("QUIRE_CACHE_DIR") or Path(base) / "quire")


def tokenizer_folder(config: EngineConfig, model_folder: Path) -> Path:
    """The folder with `tokenizer.json`.

    A folder that holds only a slow tokenizer is converted once, into the cache. Raises
    `ModelLoadError` when there's nothing to convert.
    """
    folder = Path(config.tokenizer).expanduser() if config.tokenizer else model_folder
    if config.skip_tokenizer_init or (folder / "tokenizer.json").exists():
        return folder
    from engine.text.convert import convert_tokenizer

    destination = cache_dir() / "tokenizers" / _identity(folder)
    if not (destination / "tokenizer.json").exists():
        log.info("%s has no tokenizer.json; converting its tokenizer.", folder)
        # Beside it first: another replica may be converting the same one.
        workplace = destination.with_name(f"{destination.name}.{os.getpid()}")
        convert_tokenizer(folder, workplace, trust_remote_code=config.trust_remote_code)
        if destination.exists():
            shutil.rmtree(workplace)
        else:
            workplace.rename(destination)
    return destination


def _identity(folder: Path) -> str:
    """Changes with the folder's path and with its files' sizes and times."""
    parts = [str(folder.resolve())]
    for path in sorted(folder.glob("*")):
        if path.is_file() and path.suffix != ".safetensors":
            stat = path.stat()
            parts.append(f"{path.name}:{stat.st_size}:{stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
