"""The header of a GGUF file: metadata, and where its tensors lie. Torch-free.

A file is written by anyone: every count is held against the bytes that are left before anything is
made of it.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from engine.contract.errors import ModelLoadError
from engine.models.gguf.types import BLOCKS, name_of

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 4
#: Strings of all arrays together: the largest vocabularies have a quarter of a million, and as many
#: merges again.
_MOST_STRINGS = 1 << 23
_MOST_STRING_BYTES = 1 << 26

_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "<u1",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""Types of metadata values, as numpy spells them."""


class Buffer(Protocol):
    """What the file is read from: bytes, or a mapping of it."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies.

    Attributes:
        shape: outermost dimension first.
        kind: ggml's number of its type.
        offset: from the file's beginning, in bytes.
        nbytes: what it takes.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata by key (arrays are lists of str or numpy arrays), and tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(buffer: Buffer) -> Header:
    """Raises `ModelLoadError` for anything but a sound GGUF file of version 2 or 3."""
    cursor = _Cursor(buffer)
    if cursor.take(4) != _MAGIC:
        raise broken("it doesn't begin with GGUF")
    version = cursor.number("<u4")
    if version not in _VERSIONS:
        raise broken(f"its version is {version}; {_VERSIONS} are read")
    num_tensors, num_values = cursor.number("<u8"), cursor.number("<u8")
    metadata: dict[str, Any] = {}
    cursor.check_count(num_values, 13)
    for _ in range(num_values):
        key = cursor.string()
        if key in metadata:
            raise broken(f"{key} is given twice")
        metadata[key] = cursor.value(cursor.number("<u4"))
    cursor.check_count(num_tensors, 25)
    found = [_tensor(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise broken(f"general.alignment is {alignment!r}, which is no power of two")
    start = -(-cursor.at // alignment) * alignment
    return Header(metadata, _placed(found, start, alignment, len(buffer)))


def broken(what: str) -> ModelLoadError:
    """The error of a file that isn't sound."""
    return ModelLoadError(f"This is no sound GGUF file: {what}.", param="model")


def _tensor(cursor: _Cursor) -> TensorInfo:
    """A tensor with its offset from the data's start."""
    name = cursor.string()
    dimensions = cursor.number("<u4")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise broken(f"{name!r} has {dimensions} dimensions")
    sizes = [cursor.number("<u8") for _ in range(dimensions)]
    kind, offset = cursor.number("<u4"), cursor.number("<u8")
    block = BLOCKS.get(kind)
    if block is None:
        known = ", ".join(entry.name for entry in BLOCKS.values())
        raise ModelLoadError(
            f"{name!r} is kept as {name_of(kind)}, which isn't supported. Known: {known}.",
            param="model",
        )
    if sizes[0] % block.values or not all(sizes):
        raise broken(f"{name!r} {sizes} has no whole blocks of {block.values}")
    nbytes = math.prod(sizes) // block.values * block.nbytes
    return TensorInfo(name, tuple(reversed(sizes)), kind, offset, nbytes)


def _placed(
    found: list[TensorInfo], start: int, alignment: int, size: int
) -> dict[str, TensorInfo]:
    """Tensors by name, offsets from the file's start. They lie within it and apart."""
    tensors: dict[str, TensorInfo] = {}
    end = start
    for info in sorted(found, key=lambda info: info.offset):
        at = start + info.offset
        if info.offset % alignment or at < end or at + info.nbytes > size:
            raise broken(
                f"{info.name!r} ({info.nbytes} bytes at {at}) overlaps another tensor, isn't "
                f"aligned or lies outside of the file's {size} bytes"
            )
        if info.name in tensors:
            raise broken(f"{info.name!r} is there twice")
        tensors[info.name] = TensorInfo(info.name, info.shape, info.kind, at, info.nbytes)
        end = at + info.nbytes
    return tensors


class _Cursor:
    """Reads on from where it is, never past the end."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer, self._size = buffer, len(buffer)
        self.at = 0
        self._strings_left = _MOST_STRINGS

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        self.check_count(count, 1)
        self.at += count
        return self._buffer[self.at - count : self.at]

    def check_count(self, count: int, least: int) -> None:
        """Raise unless `count` things of at least `least` bytes may follow."""
        if count * least > self._size - self.at:
            raise broken(f"at byte {self.at} it promises more than its {self._size} bytes hold")

    def number(self, kind: str) -> Any:
        """One number."""
        code = {"<u1": "<B", "<u4": "<I", "<u8": "<Q"}.get(kind)
        if code is not None:
            return struct.unpack(code, self.take(int(kind[2])))[0]
        return np.frombuffer(self.take(int(kind[2])), kind)[0].item()

    def string(self) -> str:
        """One string; bytes that are no UTF-8 are replaced."""
        count = self.number("<u8")
        if count > _MOST_STRING_BYTES:
            raise broken(f"a string of {count} bytes")
        return self.take(count).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """One metadata value."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _NUMBERS:
            raise broken(f"a value of the unknown type {kind}")
        number = self.number(_NUMBERS[kind])
        return bool(number) if kind == _BOOL else number

    def _array(self) -> list[str] | np.ndarray:
        kind, count = self.number("<u4"), self.number("<u8")
        if kind == _STRING:
            self.check_count(count, 8)
            self._strings_left -= count
            if self._strings_left < 0:
                raise broken(f"more than {_MOST_STRINGS} strings")
            return [self.string() for _ in range(count)]
        if kind not in _NUMBERS:
            raise broken(f"an array of type {kind}")
        dtype = np.dtype(_NUMBERS[kind])
        self.check_count(count, dtype.itemsize)
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)
