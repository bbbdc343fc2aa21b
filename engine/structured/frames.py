"""Frames on a pipe: four bytes of length, little-endian, then the payload."""

from __future__ import annotations

import struct
from typing import BinaryIO

_HEAD = struct.Struct("<I")
MAX_FRAME = 256 * 2**20


def write_frame(stream: BinaryIO, payload: bytes) -> None:
    """Write one frame. Raises OSError when the other side is gone."""
    view = memoryview(_HEAD.pack(len(payload)) + payload)
    while view:
        # An unbuffered pipe may take a part only.
        view = view[stream.write(view) :]
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame; None at the stream's end. Raises ValueError for a frame over MAX_FRAME."""
    head = _read_exactly(stream, _HEAD.size)
    if head is None:
        return None
    (length,) = _HEAD.unpack(head)
    if length > MAX_FRAME:
        raise ValueError(f"A frame of {length} bytes is over the limit.")
    return _read_exactly(stream, length)


def _read_exactly(stream: BinaryIO, count: int) -> bytes | None:
    parts = []
    while count:
        part = stream.read(count)
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
