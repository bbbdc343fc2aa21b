"""Audio files, and their stretches of speech. Memory is bounded by the length of the stretches.

A file is decoded frame by frame, and silence between stretches is dropped. A stretch begins
shortly before a sound. It ends before a long silence, or at the first pause between words once it
nearly fills a model's window. Without a pause it is longer than a window, and the model's
timestamps determine where its next window begins.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from engine.contract.errors import InvalidRequest
from engine.multimodal.audio import SAMPLE_RATE
from engine.multimodal.inputs import VoiceDetection

#: FFmpeg's demuxers of file formats, without any that opens a URL or another file.
_FORMATS = (
    "aac,ac3,aiff,amr,ape,asf,au,avi,caf,flac,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,mp3,mpeg,"
    "mpegts,ogg,w64,wav,wv"
)
#: Maximum number of windows of a file: an hour of speech. A shorter stretch counts as a window,
#: because its encoding takes as long.
MAX_WINDOWS = 120
#: Maximum length of a file in seconds, including silence.
MAX_SECONDS = 12 * 3600
#: The interval at which loudness is measured, in milliseconds and in samples.
_STEP_MS, _STEP = 100, SAMPLE_RATE // 10
#: Steps below this standard deviation are silent: 60 dB under full scale.
_SILENCE = 1e-3
#: The standard deviation below which a step is silent at a threshold of 1, as in realtime sessions.
_LOUD = 0.02
#: Steps of silence at the beginning of a stretch, and those that end one.
_LEAD, _PAUSE = 2, 50
#: Share of a window, at its end, in which a pause between words ends a stretch.
_CUT_ZONE = 0.2
#: Steps of such a pause, and their maximum loudness relative to the stretch's loudest step, -30 dB.
_SHORT_PAUSE, _QUIET = 10, 0.03
#: Windows after which a stretch without any pause is cut at the quietest step of its end.
_MAX_STRETCH = 10


@dataclass(frozen=True, slots=True)
class SoundPart:
    """A stretch of a file.

    Attributes:
        start: index of its first sample.
        samples: float32 [n].
        lead: number of samples before its first sound.
    """

    start: int
    samples: np.ndarray
    lead: int = 0


def decode_sound(data: bytes, param: str = "file") -> Iterator[np.ndarray]:
    """Yield the samples of a file's first audio stream in chunks, float32 at `SAMPLE_RATE`.

    Damaged packets are skipped. Raises `InvalidRequest` for a file without audio, or with more than
    `MAX_SECONDS`.
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
                for chunk in _decode_packet(packet, resampler):
                    num_samples += len(chunk)
                    if num_samples > MAX_SECONDS * SAMPLE_RATE:
                        raise InvalidRequest(
                            f"The file has more than {MAX_SECONDS // 3600} hours of sound.",
                            param=param,
                        )
                    yield chunk
            for chunk in _resample(None, resampler):
                num_samples += len(chunk)
                yield chunk
    except InvalidRequest:
        raise
    except (av.error.FFmpegError, ValueError, EOFError) as error:
        if not num_samples:
            raise InvalidRequest(
                f"The file can't be read as sound: {error}.", param=param
            ) from error
    if not num_samples:
        raise InvalidRequest("The file holds no sound.", param=param)


def _decode_packet(packet: Any, resampler: Any) -> Iterator[np.ndarray]:
    """Yield the samples of a packet, none of a damaged one."""
    import av

    try:
        frames = packet.decode()
    except av.error.InvalidDataError:
        return
    for frame in frames:
        frame.pts = None  # don't fill gaps in the file's timestamps
        yield from _resample(frame, resampler)


def _resample(frame: Any, resampler: Any) -> Iterator[np.ndarray]:
    """Yield a frame's resampled samples, or with None the resampler's remaining ones."""
    for part in resampler.resample(frame):
        yield np.nan_to_num(part.to_ndarray()[0], posinf=0.0, neginf=0.0)


class StretchSplitter:
    """Splits audio that arrives in chunks into stretches.

    Args:
        max_samples: length of a model's window.
        detection: parameters of where stretches begin and end; None for the module's constants.

    Attributes:
        num_samples: number of samples so far.
    """

    def __init__(self, max_samples: int, detection: VoiceDetection | None = None) -> None:
        self._silence, self._lead, self._pause = _SILENCE, _LEAD, _PAUSE
        if detection is not None:
            self._silence = max(_SILENCE, _LOUD * detection.threshold)
            self._lead = -(-detection.prefix_padding_ms // _STEP_MS)
            self._pause = max(1, -(-detection.silence_duration_ms // _STEP_MS))
        self._window_steps = max_samples // _STEP
        self.num_samples = 0
        self._rest = np.zeros(0, dtype=np.float32)
        #: Steps of the current stretch, and the loudness of each.
        self._steps: list[np.ndarray] = []
        self._levels: list[float] = []
        self._first_step = self._next_step = 0
        #: The loudness of its loudest step, its last step that isn't silent, and its last that
        #: isn't quiet.
        self._loudest = 0.0
        self._last_heard = self._last_loud = -1

    def push(self, samples: np.ndarray) -> Iterator[SoundPart]:
        """Add samples, and yield the stretches that they complete."""
        self.num_samples += len(samples)
        joined = np.concatenate((self._rest, samples))
        end = len(joined) // _STEP * _STEP
        self._rest = joined[end:]
        for step in joined[:end].reshape(-1, _STEP):
            yield from self._push_step(step)

    def finish(self) -> Iterator[SoundPart]:
        """Yield the last stretches."""
        if len(self._rest):
            yield from self._push_step(self._rest)
            self._rest = self._rest[:0]
        yield from self._cut(len(self._steps))

    def _push_step(self, step: np.ndarray) -> Iterator[SoundPart]:
        if not self._steps:
            self._first_step = self._next_step
        self._steps.append(step)
        self._next_step += 1
        self._measure(float(np.std(step, dtype=np.float64)))  # a constant offset is silent
        count = len(self._steps)
        if self._last_heard < 0:
            self._drop(count - self._lead)
        elif count - 1 - self._last_heard >= self._pause:
            yield from self._cut(min(count, self._last_heard + 1 + self._lead))
        elif (
            count > self._window_steps * (1 - _CUT_ZONE)
            and count - 1 - self._last_loud >= _SHORT_PAUSE
        ):
            yield from self._cut(self._last_loud + 1 + _SHORT_PAUSE // 2)
        elif count >= self._window_steps * _MAX_STRETCH:
            first = count - int(self._window_steps * _CUT_ZONE)
            yield from self._cut(first + 1 + int(np.argmin(self._levels[first:])))

    def _measure(self, level: float) -> None:
        """Record the loudness of the next step."""
        index = len(self._levels)
        self._levels.append(level)
        self._loudest = max(self._loudest, level)
        if level >= self._silence:
            self._last_heard = index
            if level >= _QUIET * self._loudest:
                self._last_loud = index

    def _cut(self, end: int) -> Iterator[SoundPart]:
        """End the stretch after `end` of its steps. The remaining steps begin the next one."""
        heard = (index for index, level in enumerate(self._levels[:end]) if level >= self._silence)
        first_heard = next(heard, None)
        if first_heard is not None:
            samples = np.concatenate(self._steps[:end])
            yield SoundPart(self._first_step * _STEP, samples, first_heard * _STEP)
        self._drop(end)

    def _drop(self, count: int) -> None:
        """Remove the first `count` steps."""
        if count <= 0:
            return
        levels = self._levels[count:]
        del self._steps[:count]
        self._first_step += count
        self._levels, self._loudest = [], 0.0
        self._last_heard = self._last_loud = -1
        for level in levels:
            self._measure(level)


def split_sound(
    data: bytes, max_samples: int, detection: VoiceDetection | None = None
) -> tuple[int, list[SoundPart]]:
    """Return a file's number of samples, and its stretches.

    Raises the errors of `decode_sound`, and `InvalidRequest` for more than `MAX_WINDOWS`.
    """
    splitter, stretches = StretchSplitter(max_samples, detection), list[SoundPart]()
    num_windows = 0
    chunks = (splitter.push(chunk) for chunk in decode_sound(data))
    for stretch in chain(chain.from_iterable(chunks), splitter.finish()):
        num_windows += -(-len(stretch.samples) // max_samples)
        if num_windows > MAX_WINDOWS:
            raise InvalidRequest(
                f"The file has more speech than {MAX_WINDOWS} windows of "
                f"{max_samples / SAMPLE_RATE:g} s hold. Cut it into several files."
                if detection is None
                else f"The voice detector cuts the file into more than {MAX_WINDOWS} stretches. "
                "Raise silence_duration_ms, or leave chunking_strategy out.",
                param="file",
            )
        stretches.append(stretch)
    return splitter.num_samples, stretches
