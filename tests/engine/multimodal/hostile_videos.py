"""Videos as nobody should send them: each is read as far as it goes, or refused by its part."""

from __future__ import annotations

import functools
import io
import struct
from collections.abc import Callable, Iterator
from random import Random

import av
import numpy as np

from tests.engine.multimodal.hostile_pictures import (
    in_turns,
    truncated,
    with_flipped_bytes,
    with_repeated_part,
)
from tests.engine.multimodal.test_videos import animation, encoded, repeated, silence

#: Containers that PyAV writes, each with a codec.
CONTAINERS = {
    "mp4": "mpeg4", "mov": "mjpeg", "matroska": "mpeg4", "avi": "mjpeg", "mpegts": "mpeg2video",
    "flv": "flv1", "asf": "mpeg4",
}  # fmt: skip


def hostile_videos(count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """The names of so many files' kinds, in turns, and the files; the same for the same seed."""
    return in_turns(KINDS, count, seed)


def _undamaged(rng: Random) -> bytes:
    container = rng.choice([*CONTAINERS, "GIF", "WEBP"])
    if container in CONTAINERS:
        return encoded(container, CONTAINERS[container], rng.randint(1, 30))
    return animation(container)


def _truncated(rng: Random) -> bytes:
    return truncated(rng, _undamaged(rng))


def _flipped_bytes(rng: Random) -> bytes:
    return with_flipped_bytes(rng, _undamaged(rng), 40)


def _forged_header(rng: Random) -> bytes:
    data = bytearray(_undamaged(rng))
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(min(600, len(data)))] = rng.choice([0, 1, 127, 128, 255])
    return bytes(data)


def _repeated_part(rng: Random) -> bytes:
    return with_repeated_part(rng, _undamaged(rng), 500)


def _frame_count_that_lies(rng: Random) -> bytes:
    data = bytearray(encoded("avi", "mjpeg"))
    count = rng.choice([0, 1, 10**9, 2**32 - 1])
    struct.pack_into("<I", data, data.index(b"avih") + 24, count)  # dwTotalFrames
    return bytes(data)


def _table_that_lies(rng: Random) -> bytes:
    data = bytearray(encoded("mp4", "mpeg4"))
    table = rng.choice([b"stts", b"stsz", b"stsc", b"stco", b"mdhd", b"tkhd"])
    for field in range(rng.randint(1, 4)):
        value = rng.choice([0, 1, 2**31 - 1, 2**32 - 1])
        struct.pack_into(">I", data, data.index(table) + 8 + 4 * field, value)
    return bytes(data)


def _many_frames(rng: Random) -> bytes:
    return repeated(encoded("mp4", "mpeg4"), rng.choice([300, 1_200]))


def _interlaced(rng: Random) -> bytes:
    flags = rng.choice(["+ildct+ilme", "+ildct", "+ilme"])
    return encoded("mpegts", "mpeg2video", rng.randint(1, 30), flags=flags)


def _large_frames(rng: Random) -> bytes:
    width, height = rng.choice([(3_840, 2_160), (8_000, 16), (16, 8_000), (9_000, 9_000)])
    return _blank(width, height, 2, "mov", "mjpeg")


def _bomb(rng: Random) -> bytes:
    """Frames that take gigabytes, in some megabytes of a file."""
    return _blank(*rng.choice([(8_000, 8_000), (4_000, 4_000)]), 40)


def _forged_size(rng: Random) -> bytes:
    data = bytearray(_blank(64, 48, 3))
    struct.pack_into(">HH", data, data.index(b"mp4v") + 28, *rng.choice([(0, 0), (65_535, 65_535)]))
    return bytes(data)


def _sizes_that_change(rng: Random) -> bytes:
    """Transport streams one after the other are a transport stream."""
    codec = "mpeg2video"
    return b"".join(
        encoded("mpegts", codec, rng.randint(1, 9)) + _blank(*size, 3, "mpegts", codec)
        for size in rng.sample([(16, 16), (320, 240), (48, 1_200)], 2)
    )


def _times_that_jump(rng: Random) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as output:
        stream = output.add_stream("mjpeg", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        moment = 0
        for _ in range(rng.randint(2, 20)):
            frame = av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")
            frame.pts = moment
            output.mux(stream.encode(frame))
            moment += rng.choice([1, 10**6, 10**9])
        output.mux(stream.encode(None))
    return file.getvalue()


def _audio_only(rng: Random) -> bytes:
    return silence(rng.choice(["wav", "matroska"]))


def _playlist(rng: Random) -> bytes:
    return rng.choice([
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        b"v=0\no=- 0 0 IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nm=video 9 RTP/AVP 96\n",
    ])  # fmt: skip


def _two_formats(rng: Random) -> bytes:
    return (
        _undamaged(rng) + rng.choice([b"PK\x03\x04", b"%PDF-1.7\n", b"<script>"]) + _undamaged(rng)
    )


def _no_video(rng: Random) -> bytes:
    heads = [
        b"", b"\0", b"GIF89a", b"RIFF\xff\xff\xff\xffWEBP", b"\x1aE\xdf\xa3", b"FLV\1\5", b"OggS",
        b"\0\0\0\x18ftypisom", b"G" * 188, b"\0\0\1\xba",
    ]  # fmt: skip
    return rng.choice(heads) + rng.randbytes(rng.choice([0, 10, 5_000]))


@functools.cache
def _blank(
    width: int, height: int, count: int, container: str = "mp4", codec: str = "mpeg4"
) -> bytes:
    """A file of equal frames of one color."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=10)
        pixels = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.width, stream.height, stream.pix_fmt = width, height, pixels
        frame = av.VideoFrame(width, height, pixels)
        for plane in frame.planes:
            plane.update(bytes(plane.buffer_size))
        for number in range(count):
            frame.pts = number
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


KINDS: tuple[Callable[[Random], bytes], ...] = (
    _undamaged, _truncated, _flipped_bytes, _forged_header, _repeated_part, _frame_count_that_lies,
    _table_that_lies, _many_frames, _interlaced, _large_frames, _bomb, _forged_size,
    _sizes_that_change, _times_that_jump, _audio_only, _playlist, _two_formats, _no_video,
)  # fmt: skip
