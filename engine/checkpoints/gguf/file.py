"""The header of a GGUF file: its metadata and its tensors' positions. Torch-free.

Files are untrusted: every count is compared with the remaining bytes before anything is allocated.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from engine.checkpoints.gguf.names import FAMILIES, GGUFFamily
from engine.checkpoints.safetensors import MappedFile
from engine.contract.errors import ModelLoadError

# -- ggml's tensor types: the values and bytes of a block.


class Block(NamedTuple):
    """A tensor type. Floats are blocks of one value."""

    name: str
    values: int
    nbytes: int


F32, F16, BF16 = 0, 1, 30
Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 = 2, 3, 6, 7, 8
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K = 10, 11, 12, 13, 14
IQ4_NL, IQ4_XS, MXFP4 = 20, 23, 39

BLOCKS = {
    F32: Block("F32", 1, 4),
    F16: Block("F16", 1, 2),
    Q4_0: Block("Q4_0", 32, 18),
    Q4_1: Block("Q4_1", 32, 20),
    Q5_0: Block("Q5_0", 32, 22),
    Q5_1: Block("Q5_1", 32, 24),
    Q8_0: Block("Q8_0", 32, 34),
    Q2_K: Block("Q2_K", 256, 84),
    Q3_K: Block("Q3_K", 256, 110),
    Q4_K: Block("Q4_K", 256, 144),
    Q5_K: Block("Q5_K", 256, 176),
    Q6_K: Block("Q6_K", 256, 210),
    IQ4_NL: Block("IQ4_NL", 32, 18),
    IQ4_XS: Block("IQ4_XS", 256, 136),
    MXFP4: Block("MXFP4", 32, 17),
    BF16: Block("BF16", 1, 2),
}
"""The supported types by ggml's number."""

_UNSUPPORTED = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
    22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0",
}  # fmt: skip


def name_of(kind: int) -> str:
    """Return ggml's name of a type."""
    block = BLOCKS.get(kind)
    return block.name if block else _UNSUPPORTED.get(kind, f"type {kind}")


_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
#: Maximum strings in all arrays. The largest vocabularies have a quarter of a million tokens and as
#: many merges.
_MAX_STRINGS = 1 << 23
_MAX_STRING_BYTES = 1 << 26

_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "<u1",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""Types of metadata values as numpy's format strings."""


class Buffer(Protocol):
    """The file's content: bytes or a memory map."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's type and position.

    Attributes:
        shape: outermost dimension first.
        kind: ggml's number of its type.
        offset: in bytes from the file's beginning.
        nbytes: its size.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata by key (arrays are lists of str or numpy arrays) and tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(buffer: Buffer) -> Header:
    """Read a header. Raises `ModelLoadError` unless it is a valid GGUF file of version 2 or 3."""
    cursor = _Reader(buffer)
    if cursor.read(4) != _MAGIC:
        raise corrupt_file_error("it doesn't begin with GGUF")
    version = cursor.number("<u4")
    if version not in _VERSIONS:
        raise corrupt_file_error(f"its version is {version}; {_VERSIONS} are read")
    num_tensors, num_values = cursor.number("<u8"), cursor.number("<u8")
    metadata: dict[str, Any] = {}
    cursor.check_count(num_values, 13)
    for _ in range(num_values):
        key = cursor.string()
        if key in metadata:
            raise corrupt_file_error(f"{key} is given twice")
        metadata[key] = cursor.value(cursor.number("<u4"))
    cursor.check_count(num_tensors, 25)
    tensors = [_tensor(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise corrupt_file_error(f"general.alignment is {alignment!r}, which is no power of two")
    start = -(-cursor.position // alignment) * alignment
    return Header(metadata, _tensor_offsets(tensors, start, alignment, len(buffer)))


def corrupt_file_error(what: str) -> ModelLoadError:
    """Return the error for an invalid file."""
    return ModelLoadError(f"This is no sound GGUF file: {what}.")


def _tensor(cursor: _Reader) -> TensorInfo:
    """Read a tensor's entry; its offset counts from the data's start."""
    name = cursor.string()
    dimensions = cursor.number("<u4")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise corrupt_file_error(f"{name!r} has {dimensions} dimensions")
    sizes = [cursor.number("<u8") for _ in range(dimensions)]
    kind, offset = cursor.number("<u4"), cursor.number("<u8")
    block = BLOCKS.get(kind)
    if block is None:
        supported = ", ".join(entry.name for entry in BLOCKS.values())
        raise ModelLoadError(
            f"{name!r} is kept as {name_of(kind)}, which isn't supported. Known: {supported}."
        )
    if sizes[0] % block.values or not all(sizes):
        raise corrupt_file_error(f"{name!r} {sizes} has no whole blocks of {block.values}")
    nbytes = math.prod(sizes) // block.values * block.nbytes
    return TensorInfo(name, tuple(reversed(sizes)), kind, offset, nbytes)


def _tensor_offsets(
    infos: list[TensorInfo], start: int, alignment: int, size: int
) -> dict[str, TensorInfo]:
    """Return tensors by name with offsets from the file's start, in bounds and not overlapping."""
    tensors: dict[str, TensorInfo] = {}
    end = start
    for info in sorted(infos, key=lambda info: info.offset):
        offset = start + info.offset
        if info.offset % alignment or offset < end or offset + info.nbytes > size:
            raise corrupt_file_error(
                f"{info.name!r} ({info.nbytes} bytes at {offset}) overlaps another tensor, isn't "
                f"aligned or lies outside of the file's {size} bytes"
            )
        if info.name in tensors:
            raise corrupt_file_error(f"{info.name!r} is there twice")
        tensors[info.name] = TensorInfo(info.name, info.shape, info.kind, offset, info.nbytes)
        end = offset + info.nbytes
    return tensors


class _Reader:
    """Reads sequentially, never past the end."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer, self._size = buffer, len(buffer)
        self.position = 0
        self._remaining_strings = _MAX_STRINGS

    def read(self, count: int) -> bytes:
        """Read the next `count` bytes."""
        self.check_count(count, 1)
        self.position += count
        return self._buffer[self.position - count : self.position]

    def check_count(self, count: int, min_bytes: int) -> None:
        """Raise unless `count` items of at least `min_bytes` bytes fit into the rest."""
        if count * min_bytes > self._size - self.position:
            raise corrupt_file_error(
                f"at byte {self.position} it promises more than its {self._size} bytes hold"
            )

    def number(self, kind: str) -> Any:
        """Read a number."""
        code = {"<u1": "<B", "<u4": "<I", "<u8": "<Q"}.get(kind)
        if code is not None:
            return struct.unpack(code, self.read(int(kind[2])))[0]
        return np.frombuffer(self.read(int(kind[2])), kind)[0].item()

    def string(self) -> str:
        """Read a string; invalid UTF-8 is replaced."""
        count = self.number("<u8")
        if count > _MAX_STRING_BYTES:
            raise corrupt_file_error(f"a string of {count} bytes")
        return self.read(count).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """Read a metadata value."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _NUMBERS:
            raise corrupt_file_error(f"a value of the unknown type {kind}")
        number = self.number(_NUMBERS[kind])
        return bool(number) if kind == _BOOL else number

    def _array(self) -> list[str] | np.ndarray:
        kind, count = self.number("<u4"), self.number("<u8")
        if kind == _STRING:
            self.check_count(count, 8)
            self._remaining_strings -= count
            if self._remaining_strings < 0:
                raise corrupt_file_error(f"more than {_MAX_STRINGS} strings")
            return [self.string() for _ in range(count)]
        if kind not in _NUMBERS:
            raise corrupt_file_error(f"an array of type {kind}")
        dtype = np.dtype(_NUMBERS[kind])
        self.check_count(count, dtype.itemsize)
        return np.frombuffer(self.read(count * dtype.itemsize), dtype)


# -- A GGUF file's metadata; each value is checked when it is read.


class Metadata:
    """The values of a file's architecture, with checked types."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.architecture = architecture_of(header)
        self.family: GGUFFamily = FAMILIES[self.architecture]

    def number(self, key: str, default: Any = None) -> Any:
        """Return a number. Raises `ModelLoadError` for another type, or if it has no default."""
        value = self.header.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ModelLoadError(f"The file lacks {self.architecture}.{key}.")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelLoadError(
                f"{self.architecture}.{key} must be a number, not {short_repr(value)}."
            )
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Return a positive integer. Raises as `number`."""
        value = self.number(key, default)
        if not isinstance(value, int) or not 1 <= value < 1 << 31:
            raise ModelLoadError(
                f"{self.architecture}.{key} must be from 1 to 2^31 - 1, not {short_repr(value)}."
            )
        return value

    def optional(self, key: str) -> Any:
        """Return a number, or None if it is missing."""
        name = f"{self.architecture}.{key}"
        return self.number(key) if name in self.header.metadata else None

    def text(self, key: str) -> str:
        """Return a string, or "" if it is missing."""
        value = self.header.metadata.get(f"{self.architecture}.{key}", "")
        return value if isinstance(value, str) else ""

    def flags(self, key: str, count: int) -> list[bool] | None:
        """Return a list of booleans, one per layer, or None if it is missing."""
        value = self.header.metadata.get(f"{self.architecture}.{key}")
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.shape != (count,):
            raise ModelLoadError(
                f"{self.architecture}.{key} must be a list of {count}, not {short_repr(value)}."
            )
        return [bool(flag) for flag in value]

    def counts(self, key: str, layers: int) -> list[int] | None:
        """Return a list of non-negative integers, one per layer, or None if it is missing."""
        value = self.header.metadata.get(f"{self.architecture}.{key}")
        if not isinstance(value, np.ndarray):
            return None
        if value.shape != (layers,) or value.dtype.kind not in "iu" or int(value.min()) < 0:
            raise ModelLoadError(
                f"{self.architecture}.{key} must be a list of {layers} counts, "
                f"not {short_repr(value)}."
            )
        return [int(number) for number in value]

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor of that name."""
        return tensor in self.header.tensors


def architecture_of(header: Header) -> str:
    """Return the file's architecture. Raises `ModelLoadError` for an unsupported one."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelLoadError(
            f"GGUF files of the architecture {short_repr(name)} aren't supported. "
            f"Known: {', '.join(FAMILIES)}."
        )
    return name


def heads_of(header: Header) -> tuple[int, int]:
    """Return the numbers of query heads and of key/value heads."""
    values = Metadata(header)
    heads, key = values.count("attention.head_count"), "attention.head_count_kv"
    if not values.family.states:
        return heads, values.count(key, heads)
    # Layers with a state have no attention heads.
    by_layer = values.counts(key, values.count("block_count"))
    if by_layer is None:
        return heads, values.count(key, heads)
    kinds = set(by_layer) - {0}
    if len(kinds) > 1:
        raise ModelLoadError(
            f"{values.architecture}.{key}: layers of different numbers aren't supported."
        )
    return heads, kinds.pop() if kinds else heads


def short_repr(value: Any) -> str:
    """Return a value of the file, shortened for a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


# -- The files of one model: llama.cpp splits large ones; the first has the metadata.


_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def parts_of(path: Path) -> list[Path]:
    """Return all files of the model that `path` is a part of, in order.

    Raises `ModelLoadError` if one of them is missing.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, _, count = match.groups()
    named = [f"{stem}-{part:05}-of-{count}.gguf" for part in range(1, int(count) + 1)]
    parts = [path.with_name(name) for name in named]
    missing = [part.name for part in parts if not part.is_file()]
    if missing or path not in parts:
        raise ModelLoadError(
            f"{path} is a part of a model whose file {(missing or [path.name])[0]} isn't there."
        )
    return parts


class GGUFFiles:
    """A model's memory-mapped files with a combined header.

    Raises `ModelLoadError` for invalid files, and for files of different models.

    Attributes:
        header: the first file's metadata and the tensors of all.
        size: total size in bytes.
    """

    def __init__(self, path: Path) -> None:
        self._files = [MappedFile(part) for part in parts_of(path)]
        headers = [read_header(file.buffer) for file in self._files]
        self._part_of: dict[str, int] = {}
        tensors: dict[str, TensorInfo] = {}
        for part, header in enumerate(headers):
            _check_part(header, part, len(headers))
            twice = tensors.keys() & header.tensors.keys()
            if twice:
                raise corrupt_file_error(f"{min(twice)!r} is in two of its parts")
            tensors |= header.tensors
            self._part_of |= dict.fromkeys(header.tensors, part)
        self.header = Header(headers[0].metadata, tensors)

    def file_of(self, tensor: str) -> MappedFile:
        """Return the file that contains a tensor."""
        return self._files[self._part_of[tensor]]

    def bytes_of(self, tensor: str) -> bytes:
        """Return a copy of a tensor's bytes."""
        info = self.header.tensors[tensor]
        return self.file_of(tensor).buffer[info.offset : info.offset + info.nbytes]

    def release(self) -> None:
        """Release the memory of tensors read from the file; results stay valid."""
        for file in self._files:
            file.release()


def _check_part(header: Header, part: int, count: int) -> None:
    total = header.metadata.get("split.count", 0)
    if not isinstance(total, int):
        raise corrupt_file_error("split.count is no number")
    number = header.metadata.get("split.no")
    number = number if isinstance(number, int) else None
    if (count > 1 or total) and (total, number) != (count, part):
        if count == 1 and total == 1:
            return
        raise corrupt_file_error(f"it is part {number} of {total}, and not part {part} of {count}")
