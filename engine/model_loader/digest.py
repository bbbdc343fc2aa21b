"""A model's identity: the sha256 of its configuration and its weights, whatever its name."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path

from kernels.cpu.build import cache_dir
from kernels.cpu.errors import CpuKernelsUnavailable

log = logging.getLogger(__name__)

#: Files of a folder that hold weights, in the formats that can be loaded.
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.tensors", "*.npz")
CONFIG = "config.json"
_PIECE = 1 << 20


def model_digest(model: Path) -> str:
    """64 hex digits: of a folder's configuration and weights, or of one GGUF file.

    Files are read whole once; while their size and times stay, what was found is kept in the cache
    folder, so a replica that starts again doesn't read them twice. Raises OSError.
    """
    files = [model] if model.is_file() else _files(model)
    digest = hashlib.sha256()
    for file in files:
        name = "" if model.is_file() else file.name
        digest.update(f"{name}\0{file.stat().st_size}\0{_file_digest(file)}\0".encode())
    return digest.hexdigest()


def _files(folder: Path) -> Iterable[Path]:
    found = {file for pattern in WEIGHTS for file in folder.glob(pattern)}
    config = folder / CONFIG
    return [*([config] if config.is_file() else []), *sorted(found)]


def _file_digest(file: Path) -> str:
    state = file.stat()
    told = f"{file.resolve()}\0{state.st_size}\0{state.st_mtime_ns}\0{state.st_ctime_ns}"
    kept = _kept(hashlib.sha256(f"{told}\0{state.st_ino}".encode()).hexdigest())
    if kept is not None and kept.is_file() and len(known := kept.read_text()) == 64:
        return known
    with file.open("rb") as content:
        found = hashlib.sha256()
        while piece := content.read(_PIECE):
            found.update(piece)
    if kept is not None:
        _keep(kept, found.hexdigest())
    return found.hexdigest()


def _kept(name: str) -> Path | None:
    try:
        return cache_dir() / "digests" / name
    except CpuKernelsUnavailable:  # a user without a home
        return None


def _keep(path: Path, digest: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(digest)
        part.replace(path)
    except OSError as error:
        log.info("the digest of a model can't be kept: %s", error)
