"""`SoundProcessor`: preprocessing of audio samples for an encoder with one window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.contract.errors import InvalidRequest
from engine.multimodal.audio import (
    FEATURES,
    HOP,
    SAMPLE_RATE,
    check_sample_rate,
    check_samples,
    log_mel,
    num_encoded,
    num_heard,
    resample,
)
from engine.multimodal.inputs import encode_tensors, media_digest
from engine.multimodal.processor import PreparedMedia


def read_samples(audio: Any, max_seconds: float) -> np.ndarray:
    """Convert (samples, rate), or samples at `SAMPLE_RATE`, to float32 [n] at that rate.

    Raises `InvalidRequest` for invalid audio, or more than `max_seconds`.
    """
    samples, rate = audio, SAMPLE_RATE
    if isinstance(audio, tuple | list) and len(audio) == 2 and not np.isscalar(audio[0]):
        samples, rate = audio
    values = check_samples(samples)
    check_sample_rate(rate)
    # Before resampling, which needs more memory.
    if len(values) / rate > max_seconds:
        raise InvalidRequest(
            f"The audio has {len(values) / rate:.1f} s; the model hears {max_seconds:g} s at once. "
            "Cut it into windows.",
            param="multi_modal_data",
        )
    return resample(values, rate)


@dataclass(frozen=True, slots=True)
class SoundProcessor:
    """The audio processor of a model.

    Attributes:
        num_mels, num_frames: sizes of a window.
        pads: see `num_encoded`.
    """

    num_mels: int
    num_frames: int
    pads: bool = True

    @property
    def window_seconds(self) -> float:
        """Length of a window in seconds."""
        return self.num_frames * HOP / SAMPLE_RATE

    def prepare(self, audio: Any) -> PreparedMedia:
        """Prepare (samples, rate), or samples at `SAMPLE_RATE`, for the encoder.

        Raises `InvalidRequest` for invalid audio, or audio longer than a window.
        """
        values = read_samples(audio, self.window_seconds)
        num_frames = num_encoded(num_heard(values), self.num_frames, pads=self.pads)
        tensors = {FEATURES: log_mel(values, self.num_mels, num_frames)}
        encoded = encode_tensors(tensors)
        return PreparedMedia(
            kind="audio",
            digest=media_digest("audio", encoded),
            replacement="",
            num_vectors=0,
            tensors=tensors,
            encoded=encoded,
        )
