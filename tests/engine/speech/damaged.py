"""Files of sound in several containers, and what damage makes of them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av
import numpy as np

from engine.multimodal.audio import SAMPLE_RATE
from tests.engine.speech.models import JFK, sound

CONTAINERS = (
    ("wav", "pcm_s16le", 8_000),
    ("flac", "flac", 16_000),
    ("mp3", "libmp3lame", 44_100),
    ("webm", "libopus", 48_000),
    ("mp4", "aac", 48_000),
)


def encoded(container: str, codec: str, samples: np.ndarray, rate: int, layout: str) -> bytes:
    """A file that FFmpeg wrote."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream: Any = file.add_stream(codec, rate=rate, layout=layout)
        channels = 1 if layout == "mono" else 2
        frame = av.AudioFrame.from_ndarray(
            np.repeat(samples[None], channels, axis=0), format="fltp", layout=layout
        )
        frame.sample_rate, frame.time_base = SAMPLE_RATE, Fraction(1, SAMPLE_RATE)
        frame.pts = 0
        resampler = av.AudioResampler(format=stream.format, layout=layout, rate=rate)
        fifo = av.AudioFifo()
        for part in (*resampler.resample(frame), *resampler.resample(None)):
            fifo.write(part)
        size = stream.codec_context.frame_size or 1024
        while part := fifo.read(size, partial=True):
            file.mux(stream.encode(part))
        file.mux(stream.encode(None))
    return buffer.getvalue()


def damaged_files(count: int) -> Iterator[bytes]:
    """Files that are cut off, with bytes changed at random places."""
    random = np.random.default_rng(count)
    files = [JFK.read_bytes()[:60_000]]
    for container, codec, rate in CONTAINERS:
        with contextlib.suppress(av.error.FFmpegError, ValueError, LookupError):  # not built in
            files.append(encoded(container, codec, sound(1, 2), rate, "mono"))
    for number in range(count):
        data = files[number % len(files)]
        damaged = bytearray(data[: int(random.integers(20, len(data)))])
        # Half of them in the header, which says how much there is of what.
        end = min(len(damaged), 200) if number % 2 else len(damaged)
        for position in random.integers(0, end, int(random.integers(1, 9))):
            damaged[position] = int(random.integers(256))
        yield bytes(damaged)
