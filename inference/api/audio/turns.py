"""`SoundBuffer`: splits audio that a client sends in chunks into turns at pauses."""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np

#: Milliseconds per loudness measurement, and of loud audio that starts a turn.
FRAME_MS, ONSET_MS = 20, 60
#: Standard deviation of the quietest speech at a threshold of 1: 34 dB below full scale.
_LOUD = 0.02
#: Ratio of speech to background noise, and the factor by which the noise estimate rises per frame.
_SPEECH_TO_NOISE, _NOISE_RISE = 3.0, 1.005
_MIN_NOISE = 1e-4


@dataclass(frozen=True, slots=True)
class TurnDetection:
    """Start and end of turns, as in OpenAI's `server_vad`.

    Attributes:
        threshold: 0 to 1; the higher, the louder speech must be.
        prefix_padding_ms: audio before the speech that belongs to the turn.
        silence_duration_ms: silence that ends a turn.
    """

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500


@dataclass(frozen=True, slots=True)
class TurnChange:
    """A turn begins or ends. `time_ms`: position in all the audio that the client sent."""

    kind: Literal["started", "stopped"]
    time_ms: int


class SoundBuffer:
    """Audio since the last turn, 16 bits a sample.

    Args:
        rate: samples per second.
        detection: None: only the client ends turns.

    Attributes:
        is_speaking: whether a turn has begun.
    """

    def __init__(self, rate: int, detection: TurnDetection | None) -> None:
        self.rate, self.detection = rate, detection
        self._data = bytearray()
        #: Bytes of the buffer that were measured, and bytes dropped before it.
        self._num_measured = self._num_dropped = 0
        #: Loudness of the frames to be processed next.
        self._levels = deque[float]()
        self.is_speaking = False
        self._loud_ms = self._quiet_ms = 0
        self._noise = 1.0

    def __len__(self) -> int:
        """Number of bytes."""
        return len(self._data)

    @property
    def duration_ms(self) -> int:
        return self._ms(len(self._data))

    def append(self, data: bytes) -> None:
        """Add samples, which `next_change` will measure."""
        self._data += data

    def next_change(self) -> TurnChange | None:
        """Measure until a turn begins or ends; None if none does in the buffered audio."""
        if self.detection is None:
            return None
        size = self._bytes(FRAME_MS)
        if not self._levels and len(self._data) - self._num_measured >= size:
            self._levels.extend(self._frame_levels(size))
        while self._levels:
            self._num_measured += size
            change = self._measure(self._levels.popleft())
            if change is not None:
                return change
            if not self.is_speaking:
                self._trim()
        return None

    def _frame_levels(self, size: int) -> list[float]:
        """Loudness of all unmeasured frames; computed at once, which is much faster."""
        first = self._num_measured
        end = first + (len(self._data) - first) // size * size
        samples = np.frombuffer(self._data[first:end], dtype="<i2").astype(np.float32) / 32768
        levels: list[float] = np.std(samples.reshape(-1, size // 2), axis=1).tolist()
        return levels  # a constant signal has a deviation of 0: it is silent

    def pop_turn(self) -> bytes:
        """The audio up to the last measured frame, or all of it without detection."""
        end = len(self._data) if self.detection is None else self._num_measured
        turn = bytes(self._data[:end])
        self._drop(end)
        self.is_speaking = False
        self._loud_ms = self._quiet_ms = 0
        return turn

    def pop_all(self) -> bytes:
        """All of it, measured or not."""
        self._num_measured = len(self._data)
        self._levels.clear()
        return self.pop_turn()

    def _measure(self, level: float) -> TurnChange | None:
        detection = self.detection
        if detection is None:
            return None
        self._noise = max(_MIN_NOISE, min(level, self._noise * _NOISE_RISE))
        is_loud = level >= max(_LOUD * detection.threshold, _SPEECH_TO_NOISE * self._noise)
        self._loud_ms = self._loud_ms + FRAME_MS if is_loud else 0
        self._quiet_ms = 0 if is_loud else self._quiet_ms + FRAME_MS
        if not self.is_speaking and self._loud_ms >= ONSET_MS:
            self.is_speaking = True
            return TurnChange("started", self._ms(self._num_dropped))
        if self.is_speaking and self._quiet_ms >= detection.silence_duration_ms:
            return TurnChange("stopped", self._ms(self._num_dropped + self._num_measured))
        return None

    def _trim(self) -> None:
        """Drop audio that can't belong to any turn."""
        if self.detection is not None:
            padding_ms = self.detection.prefix_padding_ms + ONSET_MS - FRAME_MS
            self._drop(self._num_measured - self._bytes(padding_ms))

    def _drop(self, count: int) -> None:
        if count > 0:
            del self._data[:count]
            self._num_dropped += count
            self._num_measured = max(0, self._num_measured - count)

    def _bytes(self, milliseconds: int) -> int:
        return self.rate * milliseconds // 1000 * 2

    def _ms(self, num_bytes: int) -> int:
        return num_bytes * 500 // self.rate


def wav_file(samples: bytes, rate: int) -> bytes:
    """A WAV file with one channel of 16 bits."""
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
    data = struct.pack("<4sI", b"data", len(samples)) + samples
    return struct.pack("<4sI4s", b"RIFF", 4 + len(form) + len(data), b"WAVE") + form + data
