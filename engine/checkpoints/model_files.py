"""Downloads of models from a hub into the cache, without the files that are already there.

An interrupted download resumes: `huggingface_hub` keeps partial files and requests the rest.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ModelLoadError
from engine.contract.hub_files import TORCH_WEIGHTS, file_patterns
from engine.contract.modelscope import download_from_modelscope, uses_modelscope
from engine.contract.replica_state import DOWNLOADING, report_load_phase
from kernels.cpu.build import cache_dir
from kernels.errors import CpuKernelsUnavailable

log = logging.getLogger(__name__)

#: Patterns of weight files in the supported formats.
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.tensors", "*.npz")
CONFIG = "config.json"
_CHUNK_BYTES = 1 << 20


def model_digest(model: Path) -> str:
    """Return 64 hex digits that identify a folder's configuration and weights, or a GGUF file.

    Files are read completely once. While their sizes and times stay the same, the result is kept in
    the cache folder, so that a restarted replica doesn't read them again. Raises OSError.
    """
    files = [model] if model.is_file() else _files(model)
    digest = hashlib.sha256()
    for file in files:
        name = "" if model.is_file() else file.name
        digest.update(f"{name}\0{file.stat().st_size}\0{_file_digest(file)}\0".encode())
    return digest.hexdigest()


def _files(folder: Path) -> Iterable[Path]:
    files = {file for pattern in WEIGHTS for file in folder.glob(pattern)}
    config = folder / CONFIG
    return [*([config] if config.is_file() else []), *sorted(files)]


def _file_digest(file: Path) -> str:
    state = file.stat()
    identity = f"{file.resolve()}\0{state.st_size}\0{state.st_mtime_ns}\0{state.st_ctime_ns}"
    cache_file = _cached_digest(hashlib.sha256(f"{identity}\0{state.st_ino}".encode()).hexdigest())
    if (
        cache_file is not None
        and cache_file.is_file()
        and len(cached := cache_file.read_text()) == 64
    ):
        return cached
    with file.open("rb") as content:
        digest = hashlib.sha256()
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
    if cache_file is not None:
        _store_digest(cache_file, digest.hexdigest())
    return digest.hexdigest()


def _cached_digest(name: str) -> Path | None:
    try:
        return cache_dir() / "digests" / name
    except CpuKernelsUnavailable:  # the user has no home
        return None


def _store_digest(path: Path, digest: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(digest)
        part.replace(path)
    except OSError as error:
        log.info("the digest of a model can't be kept: %s", error)


#: The layer types whose rotary parameters the settings change.
_FULL = "full_attention"
#: Of a rotary embedding, what says which parts of a head and of a position it rotates.
_NOT_SCALING = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")


def apply_overrides(raw: dict[str, Any], config: EngineConfig) -> dict[str, Any]:
    """Return `raw` with `hf_overrides`, then `rope_scaling` and `rope_theta` applied: to the text
    part, if the model has others too.

    If layer types have different rotary embeddings, `rope_scaling` and `rope_theta` change that of
    full attention; layers with a window keep theirs.
    """
    raw = _merged(raw, config.hf_overrides or {})
    if config.rope_scaling is None and config.rope_theta is None:
        return raw
    text = raw.get("text_config")
    if isinstance(text, dict):
        return {**raw, "text_config": _with_rope(text, config)}
    return _with_rope(raw, config)


def _with_rope(raw: dict[str, Any], config: EngineConfig) -> dict[str, Any]:
    rope_parameters = raw.get("rope_parameters") or {}
    nested = isinstance(rope_parameters.get(_FULL), dict)
    current = rope_parameters[_FULL] if nested else rope_parameters
    # The older names, if this config.json has those.
    base = current.get("rope_theta") or raw.get("rope_theta")
    scaling = dict(current or raw.get("rope_scaling") or {})
    if config.rope_scaling is not None:
        retained = {name: scaling[name] for name in _NOT_SCALING if scaling.get(name)}
        scaling = {**config.rope_scaling, **retained}
    theta = config.rope_theta if config.rope_theta is not None else base
    if theta is not None:
        scaling["rope_theta"] = theta
    kind = scaling.pop("type", None)
    scaling.setdefault("rope_type", kind or "default")
    parameters = {**rope_parameters, _FULL: scaling} if nested else scaling
    raw = {**raw, "rope_parameters": parameters, "rope_scaling": None}
    return {**raw, "rope_theta": theta} if theta is not None else raw


def _merged(raw: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return `raw` with `overrides` applied; nested objects are merged likewise."""
    merged = dict(raw)
    for name, value in overrides.items():
        inner = merged.get(name)
        if isinstance(inner, dict) and isinstance(value, dict):
            value = _merged(inner, value)
        merged[name] = value
    return merged


def download(config: EngineConfig) -> Path:
    """Download the model that `config` names and return its folder. Raises `ModelLoadError`."""
    if uses_modelscope():
        report_load_phase(DOWNLOADING)
        source = config.model, config.revision, config.download_dir
        folder = download_from_modelscope(*source, file_patterns(config, ["model.safetensors"]))
        patterns = file_patterns(config, [path.name for path in folder.iterdir()])
        # PyTorch's weights only if there are no others.
        return download_from_modelscope(*source, patterns) if TORCH_WEIGHTS in patterns else folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )
    from huggingface_hub.utils import filter_repo_objects

    options: dict[str, Any] = {
        "repo_id": config.model,
        "revision": config.revision,
        "cache_dir": config.download_dir,
        "allow_patterns": file_patterns(config),
    }
    try:
        report_load_phase(DOWNLOADING)
        try:
            files = snapshot_download(**options, dry_run=True)
            options["allow_patterns"] = file_patterns(config, [file.filename for file in files])
            needed = filter_repo_objects(
                files, allow_patterns=options["allow_patterns"], key=lambda file: file.filename
            )
            total = sum(file.file_size or 0 for file in needed)
        except (LocalEntryNotFoundError, OSError):
            total = 0  # the hub is unreachable: the cache suffices, or the error is raised below
        return Path(snapshot_download(**options, tqdm_class=_bar(total)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelLoadError(
            f"{config.model} is no folder here and couldn't be downloaded: {error}"
        ) from error


def _bar(total: int) -> type[Any]:
    """Return a class for the hub's progress bars, one of which counts all bytes on the disk."""
    from huggingface_hub.utils import tqdm

    class ReportingBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts = str(kwargs.get("desc", "")).startswith("Reconstructing")
            self._done = int(kwargs.get("initial") or 0)
            super().__init__(*args, **kwargs)

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts:
                self._done += int(n or 0)
                report_load_phase(DOWNLOADING, self._done, max(total, self._done))
            return super().update(n)

    return ReportingBar
