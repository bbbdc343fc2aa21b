"""Reading checkpoints: safetensors, sharded or not, memory-mapped, checked before use."""

from __future__ import annotations

import ctypes
import json
import math
import mmap
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.contract.errors import BadModelConfig, ModelLoadError
from engine.contract.replica_state import READING, report_load_phase
from engine.quantization.packing import DenseSource, WeightSource
from engine.system.host import available_memory


@cache
def _trim() -> Callable[[int], int] | None:
    """Return glibc's malloc_trim; None with other C libraries."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None


def trim_heap() -> None:
    """Return freed memory to the system.

    glibc keeps freed memory below a live allocation: a load with temporary buffers of megabytes
    between small allocations that stay would end a quarter larger than its weights.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


class PeriodicTrim:
    """Calls `trim_heap` once in many calls: it costs as much as reading one or two pieces."""

    EVERY = 32

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self) -> None:
        self._calls += 1
        if self._calls % self.EVERY == 0:
            trim_heap()


class MappedFile:
    """A memory-mapped file with tensors at byte offsets.

    After `release` a tensor stays valid because its pages are read from the disk again, but data
    written to it is lost.
    """

    def __init__(self, path: Path) -> None:
        """Raises `ModelLoadError` if the file can't be mapped."""
        # Writable, because torch has no read-only tensors; private, so that the file never changes;
        # and without memory reserved for copies of pages.
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            with path.open("rb") as file:
                self.buffer = mmap.mmap(
                    file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE
                )
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path} can't be read: {error}.") from error
        self.path = path
        self.size = len(self.buffer)

    def tensor(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor. Raises `ModelLoadError` unless it lies within the file."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        if offset < 0 or count < 0 or offset + size > self.size:
            raise ModelLoadError(
                f"{self.path}: a tensor of {size} bytes at {offset} lies outside of the file's "
                f"{self.size} bytes."
            )
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self.buffer, dtype=torch.uint8, count=size, offset=offset)
        if flat.data_ptr() % dtype.itemsize:
            flat = flat.clone()
        return flat.view(dtype).view(shape)

    def release(self) -> None:
        """Return the memory of pages that have been read to the system."""
        self.buffer.madvise(mmap.MADV_DONTNEED)


class ReadProgress:
    """Reports how many bytes of the weights have been read to observers."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._names: set[str] = set()
        report_load_phase(READING, 0, total)

    def add(self, name: str, size: int) -> None:
        """Count a tensor's bytes, once even if it is read repeatedly."""
        if name not in self._names:
            self._names.add(name)
            self._done += size
            report_load_phase(READING, self._done, self._total)


INDEX_NAME = "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
#: Dtypes whose values mean nothing without scales.
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
#: Weight files that need another `load_format`.
_OTHER_FORMATS = {
    "model.tensors": "tensorizer",
    "model-rank-*-part-*.safetensors": "sharded_state",
    "pytorch_model*.bin": "pt",
    "*.pt": "pt",
    "*.pth": "pt",
}
#: Maximum bytes of a file name.
_MAX_NAME_BYTES = 255
#: Buffers in older checkpoints, which the engine computes itself.
_IGNORED_SUFFIXES = (
    ".rotary_emb.inv_freq", ".masked_bias", ".attn.bias", ".attention.bias",
    ".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay",
)  # fmt: skip


class WeightReader:
    """A checkpoint's tensors by name.

    `safetensors` validates each file's header, length, offsets and shapes. Then the file is mapped
    here, so that its memory can be released. Errors are raised as `ModelLoadError`.
    """

    def __init__(self, folder: str | Path, files: Iterable[Path] | None = None) -> None:
        self.folder = Path(folder)
        self._files: list[MappedFile] = []
        self._locations: dict[str, tuple[MappedFile, dict[str, Any]]] = {}
        self._read: set[str] = set()
        self._metadata: dict[str, str] = {}
        for path in _shards(self.folder) if files is None else files:
            self._open(path)
        self._tally = ReadProgress(sum(_size(entry) for _, entry in self._locations.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._locations

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor in the checkpoint's dtype.

        Raises `ModelLoadError` if it is missing or has another shape. The tensor is backed by the
        mapped file: copy or convert it before keeping it.
        """
        location = self._locations.get(name)
        if location is None:
            raise self._missing_tensor_error(name)
        file, entry = location
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ModelLoadError(
                f"{file.path}: {name!r} is kept as {entry['dtype']}, which isn't supported."
            )
        if dtype not in FLOATS:
            raise unscaled(file.path, name, entry["dtype"])
        if tuple(entry["shape"]) != shape:
            raise ModelLoadError(
                f"{file.path}: {name!r} has shape {tuple(entry['shape'])}, "
                f"but config.json asks for {shape}."
            )
        self._read.add(name)
        self._tally.add(name, _size(entry))
        return file.tensor(entry["at"], dtype, shape)

    def _missing_tensor_error(self, name: str) -> ModelLoadError:
        layer = name.removesuffix("weight")
        siblings = sorted(other for other in self._locations if other.startswith(layer))
        why = f"the checkpoint has no {name!r}"
        if siblings and layer != name:
            why += (
                f", but {siblings[0]!r}: if that is quantized, config.json lacks its "
                "quantization_config"
            )
        return ModelLoadError(f"{self.folder}: {why}.")

    def numbers(self, name: str) -> Tensor | None:
        """Return a small tensor of any shape as float32; None if it doesn't exist."""
        if name not in self._locations:
            return None
        return self.get(name, tuple(self._locations[name][1]["shape"])).float().clone()

    def matrix(self, name: str, shape: tuple[int, int]) -> WeightSource:
        """Return a 2-dimensional tensor that is read some rows at a time. Raises as `get`."""
        return DenseSource(self.get(name, shape))

    @property
    def where(self) -> str:
        """See `TensorSource`."""
        return str(self.folder)

    @property
    def metadata(self) -> Mapping[str, str]:
        """See `TensorSource`."""
        return self._metadata

    def names(self) -> Iterable[str]:
        """See `TensorSource`."""
        return self._locations.keys()

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource`."""
        return tuple(self._locations[name][1]["shape"])

    def stored_dtype(self, name: str) -> torch.dtype | None:
        """See `TensorSource`."""
        return _DTYPES.get(self._locations[name][1]["dtype"])

    def stored(self, name: str) -> Tensor:
        """See `TensorSource`."""
        file, entry = self._locations[name]
        dtype = self.stored_dtype(name)
        if dtype is None:
            raise ModelLoadError(
                f"{file.path}: {name!r} is kept as {entry['dtype']}, which isn't supported."
            )
        self._tally.add(name, _size(entry))
        return file.tensor(entry["at"], dtype, tuple(entry["shape"]))

    def mark_used(self, names: Iterable[str]) -> None:
        """Mark tensors as read or not needed."""
        self._read.update(names)

    def release(self) -> None:
        """Release the memory of tensors read from files; results stay valid."""
        for file in self._files:
            file.release()

    def unused_names(self) -> list[str]:
        """Return tensors that weren't read: config.json and weights may not belong together."""
        return self.drop_ignored(self._locations.keys() - self._read)

    @staticmethod
    def drop_ignored(names: Iterable[str]) -> list[str]:
        """Return, in order, the names without those that no model needs."""
        return sorted(name for name in names if not name.endswith(_IGNORED_SUFFIXES))

    def tensors(self) -> Mapping[str, Tensor]:
        """Return all tensors by name in their stored dtypes, backed by the files.

        Raises `ModelLoadError` for an unknown dtype.
        """
        tensors = {}
        for name, (file, entry) in self._locations.items():
            dtype = _DTYPES.get(entry["dtype"])
            if dtype is None:
                raise ModelLoadError(f"{name!r} is kept as {entry['dtype']}.")
            tensors[name] = file.tensor(entry["at"], dtype, tuple(entry["shape"]))
        return tensors

    def close(self) -> None:
        """Close the files; tensors that are still referenced keep theirs mapped."""
        self._locations.clear()
        self._files.clear()

    def add_folder(self, folder: Path, prefix: str) -> None:
        """Add another folder's tensors with `prefix` before their names, except those that already
        exist. Raises `ModelLoadError` for invalid files.
        """
        names = set(self._locations)
        for path in _shards(folder):
            self._open(path, prefix, names)
        self._tally = ReadProgress(sum(_size(entry) for _, entry in self._locations.values()))

    def _open(self, path: Path, prefix: str = "", cached_names: Collection[str] = ()) -> None:
        try:
            with safe_open(str(path), framework="pt") as handle:
                names: Iterable[str] = list(handle.keys())
        except (SafetensorError, OSError) as error:
            reason = f"{path} isn't a valid safetensors file: {error}."
            if is_lfs_pointer(path):
                reason = f"{path} is a git-lfs pointer; get the file itself by `git lfs pull`."
            raise ModelLoadError(reason) from error
        file = MappedFile(path)
        self._files.append(file)
        length = int.from_bytes(file.buffer[:8], "little")
        header = json.loads(file.buffer[8 : 8 + length])
        for stored_name in names:
            entry = header[stored_name]
            entry["at"] = 8 + length + entry["data_offsets"][0]
            name = prefix + stored_name
            if name in cached_names:
                continue
            if name in self._locations:
                other = self._locations[name][0].path.name
                raise ModelLoadError(f"{path}: {name!r} is in {other}, too.")
            self._locations[name] = file, entry
        self._metadata |= header.get("__metadata__") or {}


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is a Git LFS pointer instead of the content."""
    begin = b"version https://git-lfs."
    try:
        with path.open("rb") as file:
            return file.read(len(begin)) == begin
    except OSError:
        return False


def _size(entry: Mapping[str, Any]) -> int:
    first, last = entry["data_offsets"]
    return int(last) - int(first)


def unscaled(where: object, name: str, dtype: object) -> ModelLoadError:
    """Return the error for integers or 8-bit floats without scales."""
    return ModelLoadError(
        f"{where}: {name!r} is kept as {dtype}, and no quantization_config of config.json says how "
        "it was quantized."
    )


def check_dummy_size(architecture: str, sizes: Mapping[str, int], num_bytes: int) -> None:
    """Raise `BadModelConfig` for dummy weights that don't fit into memory.

    Args:
        sizes: the sizes in config.json that determine them.
    """
    available = available_memory()
    if num_bytes > available:
        named = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise BadModelConfig(
            f"config.json of {architecture} ({named}) makes {num_bytes / (1 << 30):.1f} GiB of "
            f"weights, but this machine has {available / (1 << 30):.1f} GiB of memory left. Make "
            "it smaller by hf_overrides.",
            param="model",
        )


class DummyWeights:
    """Random weights of the requested shapes for profiling (`load_format="dummy"`)."""

    def __init__(
        self, names_absent: frozenset[str] = frozenset(), seed: int = 0, device: str = "cpu"
    ) -> None:
        self._absent, self._device = names_absent, device
        self._generator = torch.Generator(device).manual_seed(seed)

    def __contains__(self, name: str) -> bool:
        return name not in self._absent

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return random values so small that activations stay finite; norms are 1, biases 0."""
        if len(shape) == 1:
            return torch.ones(shape) if name.endswith(".weight") else torch.zeros(shape)
        scale = 1.0 / math.sqrt(shape[-1])
        return torch.randn(shape, generator=self._generator, device=self._device) * scale

    def matrix(self, name: str, shape: tuple[int, int]) -> WeightSource:
        """See `WeightReader.matrix`."""
        return DenseSource(self.get(name, shape))

    def release(self) -> None:
        """Do nothing: there is nothing to release."""

    def unused_names(self) -> list[str]:
        """Return nothing: no tensor is left over."""
        return []

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


def _shards(folder: Path) -> list[Path]:
    """Return the checkpoint's files. Raises `ModelLoadError` for one outside the folder."""
    index = folder / INDEX_NAME
    if not index.exists():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise ModelLoadError(
                f"{folder} holds neither model.safetensors nor {INDEX_NAME}."
                f"{_other_format_hint(folder)}"
            )
        return [single]
    return shards_of_index(index)


def has_safetensors(folder: Path) -> bool:
    """Whether a folder has weights under the names that `WeightReader` reads."""
    return (folder / INDEX_NAME).exists() or (folder / "model.safetensors").is_file()


def _other_format_hint(folder: Path) -> str:
    for pattern, load_format in _OTHER_FORMATS.items():
        for path in sorted(folder.glob(pattern)):
            return f" For {path.name} give --load-format {load_format}."
    return ""


def shards_of_index(index: Path) -> list[Path]:
    """Return the files that an index names. Raises `ModelLoadError` for one outside its folder."""
    folder = index.parent
    try:
        mapping = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(mapping.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelLoadError(f"{index} has no sound weight_map: {error!r}.") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.strip("."):
            raise ModelLoadError(f"{index} names a file outside the folder: {name!r}.")
        if len(name.encode()) > _MAX_NAME_BYTES or not (folder / name).is_file():
            raise ModelLoadError(f"{index} names {name}, which isn't there.")
    return [folder / name for name in names]
