"""From a file of sound to the windows that a model hears, in memory bounded by their number.

A file is decoded frame by frame. What lies between sounds is left out where it is silent, so a
window begins with a sound, and ends before a long silence or at the quietest place near its end.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from engine.contract.errors import InvalidRequest
from engine.multimodal.audio import SAMPLE_RATE

#: Demuxers of FFmpeg that read files: none that opens an address or another file.
_FORMATS = (
    "aac,ac3,aiff,amr,ape,asf,au,avi,caf,flac,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,mp3,mpeg,"
    "mpegts,ogg,w64,wav,wv"
)
#: Windows of one file: an hour of speech.
MAX_WINDOWS = 120
#: Seconds of sound of one file, silence included.
MAX_SECONDS = 12 * 3600
#: Samples by which loudness is measured: 100 ms.
_STEP = SAMPLE_RATE // 10
#: Steps below this root mean square are silent: 60 dB under full scale.
_SILENCE = 1e-3
#: Steps of silence before a sound that its window begins with, and those that end a window.
_LEAD, _PAUSE = 2, 50
#: Part of a window, at its end, in which it may be cut.
_CUT_ZONE = 0.2


@dataclass(frozen=True, slots=True)
class SoundWindow:
    """A part of a file. `start`: its first sample's number. `samples`: float32 [n]."""

    start: int
    samples: np.ndarray


def decode_sound(data: bytes, param: str = "file") -> Iterator[np.ndarray]:
    """The samples of a file's first sound stream, float32 at `SAMPLE_RATE`, piece by piece.

    Packets that are damaged are left out. Raises `InvalidRequest` for what holds no sound, and for
    more than `MAX_SECONDS`.
    """
    import av

    resampler = av.AudioResampler(format="fltp", layout="mono", rate=SAMPLE_RATE)
    num_samples = 0
    options = {"format_whitelist": _FORMATS, "protocol_whitelist": "pipe"}
    try:
        with av.open(
            io.BytesIO(data), "r", container_options=options, metadata_errors="ignore"
        ) as file:
            if not file.streams.audio:
                raise InvalidRequest("The file holds no sound.", param=param)
            stream = file.streams.audio[0]
            for packet in file.demux(stream):
                for piece in _decode_packet(packet, resampler):
                    num_samples += len(piece)
                    if num_samples > MAX_SECONDS * SAMPLE_RATE:
                        raise InvalidRequest(
                            f"The file has more than {MAX_SECONDS // 3600} hours of sound.",
                            param=param,
                        )
                    yield piece
            for frame in resampler.resample(None):
                num_samples += frame.samples
                yield frame.to_ndarray()[0]
    except (av.error.FFmpegError, ValueError, EOFError) as error:
        if not num_samples:
            raise InvalidRequest(
                f"The file can't be read as sound: {error}.", param=param
            ) from error
    if not num_samples:
        raise InvalidRequest("The file holds no sound.", param=param)


def _decode_packet(packet: object, resampler: object) -> Iterator[np.ndarray]:
    """The samples of one packet; none of a damaged one."""
    import av

    try:
        frames = packet.decode()  # type: ignore[attr-defined]
    except av.error.InvalidDataError:
        return
    for frame in frames:
        frame.pts = None  # gaps in a file's clock aren't sound
        for part in resampler.resample(frame):  # type: ignore[attr-defined]
            yield np.nan_to_num(part.to_ndarray()[0], posinf=0.0, neginf=0.0)


class WindowSplitter:
    """Cuts sound that comes in pieces into windows.

    Args:
        max_samples: length of a window.

    Attributes:
        num_samples: number of samples so far.
    """

    def __init__(self, max_samples: int) -> None:
        self._max_steps = max_samples // _STEP
        self.num_samples = 0
        self._rest = np.zeros(0, dtype=np.float32)
        #: Steps of the window that is being filled, and the loudness of each.
        self._steps: list[np.ndarray] = []
        self._levels: list[float] = []
        self._first_step = self._next_step = 0

    def push(self, samples: np.ndarray) -> Iterator[SoundWindow]:
        """Add samples; gives the windows that they complete."""
        self.num_samples += len(samples)
        whole = np.concatenate((self._rest, samples))
        end = len(whole) // _STEP * _STEP
        self._rest = whole[end:]
        for step in whole[:end].reshape(-1, _STEP):
            yield from self._push_step(step)

    def finish(self) -> Iterator[SoundWindow]:
        """The last windows."""
        if len(self._rest):
            yield from self._push_step(self._rest)
            self._rest = self._rest[:0]
        yield from self._cut(len(self._steps))

    def _push_step(self, step: np.ndarray) -> Iterator[SoundWindow]:
        level = float(np.sqrt(np.mean(np.square(step, dtype=np.float64))))
        if not self._steps:
            self._first_step = self._next_step
        self._steps.append(step)
        self._levels.append(level)
        self._next_step += 1
        heard = [index for index, value in enumerate(self._levels) if value >= _SILENCE]
        if not heard:
            self._drop(len(self._steps) - _LEAD)
        elif len(self._levels) - 1 - heard[-1] >= _PAUSE:
            yield from self._cut(heard[-1] + 1 + _LEAD)
        elif len(self._steps) >= self._max_steps:
            first = int(self._max_steps * (1 - _CUT_ZONE))
            yield from self._cut(first + 1 + int(np.argmin(self._levels[first:])))

    def _cut(self, end: int) -> Iterator[SoundWindow]:
        """End the window after so many of its steps; the others begin the next."""
        if any(level >= _SILENCE for level in self._levels[:end]):
            samples = np.concatenate(self._steps[:end])
            yield SoundWindow(self._first_step * _STEP, samples)
        self._drop(end)

    def _drop(self, count: int) -> None:
        """Leave out the first steps."""
        if count > 0:
            del self._steps[:count], self._levels[:count]
            self._first_step += count


def split_sound(data: bytes, max_samples: int) -> tuple[int, list[SoundWindow]]:
    """A file's number of samples, and its windows. Raises `InvalidRequest`."""
    splitter, windows = WindowSplitter(max_samples), list[SoundWindow]()
    pieces = (splitter.push(piece) for piece in decode_sound(data))
    for window in chain(chain.from_iterable(pieces), splitter.finish()):
        if len(windows) == MAX_WINDOWS:
            raise InvalidRequest(
                f"The file has more speech than {MAX_WINDOWS} windows of "
                f"{max_samples / SAMPLE_RATE:g} s hold. Cut it into several files.",
                param="file",
            )
        windows.append(window)
    return splitter.num_samples, windows
