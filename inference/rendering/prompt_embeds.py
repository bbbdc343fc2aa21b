"""Reads tensors for `prompt_embeds`, `image_embeds` and `audio_embeds` that `torch.save` wrote,
without torch and without unpickling.

Such a file is a zip archive of the raw numbers, and a pickle that describes their type and shape.
Only the few pickle operations that such a tensor needs are interpreted, as data: nothing is
imported or called, whatever the pickle contains.
"""

from __future__ import annotations

import base64
import binascii
import io
import pickletools
import struct
import zipfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from engine.contract.errors import InvalidRequest
from engine.contract.messages import ITEM_BYTES, PromptEmbeds

#: Maximum size of the pickle that describes type and shape; a tensor's has about 200 bytes.
_MAX_HEAD_BYTES = 4096
_MAX_FILES = 16
_MAX_OPERATIONS = 256
_STORAGES = {
    "torch FloatStorage": "float32",
    "torch HalfStorage": "float16",
    "torch BFloat16Storage": "bfloat16",
    "torch LongStorage": "int64",
}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_VALUES = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"})
IGNORED_OPS = frozenset({"PROTO", "BINPUT", "LONG_BINPUT", "MEMOIZE", "FRAME"})
_MARK = object()
#: Errors that reading a damaged archive may raise.
CorruptFile = (
    zipfile.BadZipFile,
    EOFError,
    LookupError,
    NotImplementedError,
    OSError,
    OverflowError,
    RuntimeError,
    ValueError,
    struct.error,
)


class _Name(NamedTuple):
    """Name that an unpickler would import."""

    name: str


class PersistentRef(NamedTuple):
    """Persistent id that an unpickler would resolve."""

    key: Any


class _Call(NamedTuple):
    """Call that an unpickler would make."""

    what: Any
    arguments: Any


def read_embeds(
    text: str, size: int, field: str = "prompt_embeds", param: str = "prompt_embeds"
) -> PromptEmbeds:
    """The vectors of one prompt, [rows, size], from a base64-encoded file.

    Raises `InvalidRequest` for anything else, with `field` in its message and `param` set.
    """
    try:
        dtype, rows, data = _read_tensor(text, size, ITEM_BYTES)
    except _RefusedTensor as refused:
        raise InvalidRequest(f"{field} {refused}.", param=param) from None
    return PromptEmbeds(dtype, rows, size, data)


def read_grid(text: str, field: str, param: str) -> tuple[int, int, int]:
    """Frames, rows and columns of a picture, from a base64-encoded file of int64 [1, 3].

    Raises `InvalidRequest` as `read_embeds` does.
    """
    try:
        _, rows, data = _read_tensor(text, 3, {"int64": 8})
        if rows != 1:
            raise _RefusedTensor("must be [1, 3]")
    except _RefusedTensor as refused:
        raise InvalidRequest(f"{field} {refused}.", param=param) from None
    return struct.unpack("<3q", data)


def to_float32(embeds: PromptEmbeds) -> bytes:
    """The numbers as float32, little-endian."""
    if embeds.dtype == "float16":
        return np.frombuffer(embeds.data, "<f2").astype("<f4").tobytes()
    if embeds.dtype == "bfloat16":
        return (np.frombuffer(embeds.data, "<u2").astype("<u4") << 16).tobytes()
    return embeds.data


class _RefusedTensor(Exception):
    """Reason why a field is not an accepted tensor."""


def _read_tensor(text: str, size: int, item_bytes: Mapping[str, int]) -> tuple[str, int, bytes]:
    """Type, rows and numbers of a tensor [rows, size]. Raises `_RefusedTensor`.

    `item_bytes`: bytes of a number, by the types that are accepted.
    """
    try:
        file = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _RefusedTensor("must be base64") from None
    try:
        with zipfile.ZipFile(io.BytesIO(file)) as archive:
            head, numbers, dtype = _split_storage(archive)
    except CorruptFile:
        raise _RefusedTensor("must be a tensor that torch.save wrote") from None
    start, rows, width = head
    if dtype not in item_bytes:
        raise _RefusedTensor(f"must be {' or '.join(item_bytes)}")
    if width != size:
        raise _RefusedTensor(f"must be [num_tokens, {size}] for this model, got [{rows}, {width}]")
    item = item_bytes[dtype]
    data = numbers[start * item : (start + rows * width) * item]
    if len(data) != rows * width * item:
        raise _RefusedTensor("has fewer numbers than its shape says")
    return dtype, rows, data


def _split_storage(archive: zipfile.ZipFile) -> tuple[tuple[int, int, int], bytes, str]:
    """Return (offset of the numbers, rows, size), the numbers, and their type."""
    files = archive.infolist()
    if len(files) > _MAX_FILES or any(file.compress_type != zipfile.ZIP_STORED for file in files):
        raise _RefusedTensor("must be a tensor that torch.save wrote")
    by_name = {file.filename.partition("/")[2]: file for file in files}
    if by_name["data.pkl"].file_size > _MAX_HEAD_BYTES:
        raise _RefusedTensor("must be a single tensor")
    if "byteorder" in by_name and archive.read(by_name["byteorder"]) != b"little":
        raise _RefusedTensor("must be little-endian")
    dtype, key, *head = _tensor(_read_pickle_ops(archive.read(by_name["data.pkl"])))
    return (head[0], head[1], head[2]), archive.read(by_name[f"data/{key}"]), dtype


def _read_pickle_ops(pickled: bytes) -> Any:
    """Interpret a pickle's operations as data. Raises `_RefusedTensor` for unexpected ones."""
    stack: list[Any] = []
    try:
        for count, (operation, argument, _) in enumerate(pickletools.genops(pickled)):
            name = operation.name
            if name in IGNORED_OPS:
                continue
            if count > _MAX_OPERATIONS:
                break
            if name == "STOP":
                return stack.pop()
            if name == "MARK":
                stack.append(_MARK)
            elif name == "GLOBAL":
                stack.append(_Name(str(argument)))
            elif name in _VALUES:
                stack.append(argument)
            elif name in ("NEWTRUE", "NEWFALSE"):
                stack.append(name == "NEWTRUE")
            elif name in _TUPLES:
                _collect_tuple(stack, len(stack) - _TUPLES[name])
            elif name == "TUPLE":
                mark = max(index for index, item in enumerate(stack) if item is _MARK)
                _collect_tuple(stack, mark + 1)
                del stack[-2]
            elif name == "BINPERSID":
                stack.append(PersistentRef(stack.pop()))
            elif name == "REDUCE":
                arguments = stack.pop()
                stack.append(_Call(stack.pop(), arguments))
            else:
                break
    except (ValueError, IndexError, UnicodeDecodeError):
        pass
    raise _RefusedTensor("must be a single tensor")


def _collect_tuple(stack: list[Any], start: int) -> None:
    """Replace the items from `start` on by a tuple of them."""
    if start < 0:
        raise IndexError
    stack[start:] = [tuple(stack[start:])]


def _tensor(call: Any) -> tuple[str, str, int, int, int]:
    """Type and name of the storage, offset of the numbers, rows and size."""
    match call:
        case _Call(
            _Name("torch._utils _rebuild_tensor_v2"),
            (
                PersistentRef(("storage", _Name(storage), str(key), str(), int())),
                int(start),
                tuple(shape),
                tuple(strides),
                *_,
            ),
        ):
            pass
        case _:
            raise _RefusedTensor("must be a single tensor")
    if storage not in _STORAGES:
        raise _RefusedTensor("must be float32, float16 or bfloat16")
    if not all(type(number) is int and number >= 0 for number in (start, *shape, *strides)):
        raise _RefusedTensor("must be a single tensor")
    if len(shape) == 3 and shape[0] == 1:
        shape, strides = shape[1:], strides[1:]
    if len(shape) != 2 or len(strides) != 2 or not shape[0] or not shape[1]:
        raise _RefusedTensor("must be [num_tokens, hidden]")
    rows, size = shape
    if (size > 1 and strides[1] != 1) or (rows > 1 and strides[0] != size):
        raise _RefusedTensor("must be contiguous; save tensor.contiguous()")
    return _STORAGES[storage], key, start, rows, size
