"""Checkpoints in PyTorch's format, and vLLM's numpy cache of these.

Nothing is unpickled here: another process converts PyTorch's files, and numpy's are read without.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.checkpoints.safetensors import (
    FLOATS,
    WeightReader,
    has_safetensors,
    shards_of_index,
    unscaled,
)
from engine.contract.errors import ModelLoadError
from engine.system.cache_folder import cache_dir, cache_entry
from engine.system.torch_conversion import ConversionError, convert_torch_files

log = logging.getLogger(__name__)

SAFE = "*.safetensors"
PT_INDEX = "pytorch_model.bin.index.json"
PT_MODEL = "pytorch_model*.bin"
#: Files of a training run beside the weights.
_NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "consolidated")
NP_FOLDER, NP_NAMES = "np", "weight_names.json"


class TensorWeights(WeightReader):
    """Tensors in memory by name."""

    def __init__(self, folder: str | Path, tensors: Mapping[str, Tensor]) -> None:
        self.folder = Path(folder)
        self._tensors = dict(tensors)
        self._read: set[str] = set()
        self._metadata: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelLoadError(f"{self.folder}: the checkpoint has no {name!r}.")
        if tensor.dtype not in FLOATS:
            raise unscaled(self.folder, name, tensor.dtype)
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"{self.folder}: {name!r} has shape {tuple(tensor.shape)}, "
                f"but config.json asks for {shape}."
            )
        self._read.add(name)
        return tensor

    def numbers(self, name: str) -> Tensor | None:
        tensor = self._tensors.get(name)
        return None if tensor is None else self.get(name, tuple(tensor.shape)).float().clone()

    def tensors(self) -> Mapping[str, Tensor]:
        return self._tensors

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def stored_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def stored_dtype(self, name: str) -> torch.dtype | None:
        return self._tensors[name].dtype

    def stored(self, name: str) -> Tensor:
        return self._tensors[name]

    def release(self) -> None:
        """Do nothing: there is nothing to release."""

    def unused_names(self) -> list[str]:
        return self.drop_ignored(self._tensors.keys() - self._read)

    def close(self) -> None:
        """Release the tensors."""
        self._tensors.clear()


def read_pt(folder: Path) -> WeightReader:
    """Read the PyTorch files of a folder without running code in them.

    Raises `ModelLoadError` if there are none, or if they contain anything but tensors by name.
    """
    return WeightReader(folder, converted_files(_pt_files(folder)))


def converted_files(files: Sequence[Path]) -> list[Path]:
    """Return safetensors files in the cache with the tensors of PyTorch's files.

    They are written when the files have changed. Raises `ModelLoadError` for an invalid file, or if
    the cache can't be written.
    """
    identity = "\n".join(f"{file.resolve()}:{_state(file)}" for file in files)
    name = hashlib.sha256(identity.encode()).hexdigest()[:32]
    target = cache_dir() / "weights" / name
    if not target.is_dir():
        log.info("Converting %s to safetensors in %s.", ", ".join(map(str, files)), target)
        try:
            with cache_entry(target) as workplace:
                convert_torch_files(files, workplace)
        except ConversionError as error:
            raise ModelLoadError(str(error)) from error
        except OSError as error:
            raise ModelLoadError(
                f"{files[0]} can't be converted in {target} (QUIRE_CACHE_DIR): "
                f"{error.strerror or error}."
            ) from error
    with suppress(OSError):  # the cache may be read-only
        os.utime(target)  # records the last load for `prune_cache`
    return sorted(target.glob(SAFE))


def _state(file: Path) -> str:
    state = file.stat()
    return f"{state.st_size}:{state.st_mtime_ns}:{state.st_ino}"


def open_hub_folder(folder: Path) -> WeightReader:
    """Open a folder's safetensors, or its `pytorch_model*.bin` if there are none.

    Raises `ModelLoadError` for files that are invalid.
    """
    return read_pt(folder) if lacks_safetensors(folder) else WeightReader(folder)


def lacks_safetensors(folder: Path) -> bool:
    """Whether a folder's only weights are PyTorch files under transformers' names."""
    return not has_safetensors(folder) and (
        (folder / PT_INDEX).exists() or any(folder.glob(PT_MODEL))
    )


def _pt_files(folder: Path) -> list[Path]:
    if (folder / PT_INDEX).exists():
        return shards_of_index(folder / PT_INDEX)
    if named := sorted(folder.glob(PT_MODEL)):
        return named
    files = sorted(
        path
        for suffix in ("*.bin", "*.pt", "*.pth")
        for path in folder.glob(suffix)
        if not path.name.startswith(_NO_WEIGHTS)
    )
    if not files:
        hint = " For its safetensors leave load_format out." if any(folder.glob(SAFE)) else ""
        raise ModelLoadError(f"{folder} holds no .bin, .pt or .pth file.{hint}")
    return files


def read_npcache(folder: Path) -> TensorWeights:
    """Read numpy copies of a folder's PyTorch files from its subfolder `np`.

    They are written again when those files have changed.

    Raises `ModelLoadError` as `read_pt` does, for an invalid cache, or if none can be written.
    """
    cache = folder / NP_FOLDER
    sources = {
        path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in _pt_files(folder)
    }
    cached = _np_names(cache / NP_NAMES)
    if cached.get("sources") != sources:
        cached = _write_npcache(folder, cache, sources)
    tensors = {name: _np_tensor(cache, name, entry) for name, entry in cached["tensors"].items()}
    return TensorWeights(folder, tensors)


def _np_names(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    sound = isinstance(read, dict) and isinstance(read.get("tensors"), dict)
    return read if sound else {}


def _write_npcache(folder: Path, cache: Path, sources: dict[str, Any]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    try:
        cache.mkdir(exist_ok=True)
        (cache / NP_NAMES).unlink(missing_ok=True)  # an incomplete cache is not used
        for number, (name, tensor) in enumerate(read_pt(folder).tensors().items()):
            file = f"{number:05}.npy"
            values = tensor.contiguous()
            if values.dtype == torch.bfloat16:  # numpy has no bfloat16
                values = values.view(torch.int16)
            np.save(cache / file, values.numpy(), allow_pickle=False)
            entries[name] = {"file": file, "dtype": str(tensor.dtype).removeprefix("torch.")}
        index = {"sources": sources, "tensors": entries}
        (cache / NP_NAMES).write_text(json.dumps(index), encoding="utf-8")
    except OSError as error:
        raise ModelLoadError(
            f"The numpy cache can't be written to {cache}: {error}", param="load_format"
        ) from error
    return index


def _np_tensor(cache: Path, name: str, entry: Any) -> Tensor:
    try:
        file, dtype = entry["file"], entry["dtype"]
        if Path(file).name != file:
            raise ValueError(f"{file!r} is outside the folder")
        tensor = torch.from_numpy(np.load(cache / file, mmap_mode="c", allow_pickle=False))
        return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
    except (OSError, EOFError, ValueError, TypeError, KeyError) as error:
        raise ModelLoadError(
            f"{cache} has no sound {name!r}: {error}. Remove the folder to make it anew."
        ) from error
