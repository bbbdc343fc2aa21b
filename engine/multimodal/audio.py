"""Log-mel features of audio, computed with numpy.

They equal those of OpenAI's Whisper and of `transformers`' `WhisperFeatureExtractor`: a short-time
Fourier transform of 25 ms every 10 ms, Slaney's mel filters, and the logarithm to base 10, clipped
at 8 below its maximum and scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from engine.contract.errors import InvalidRequest
from engine.multimodal.inputs import MediaTensors

#: Samples per second of the models' input.
SAMPLE_RATE = 16_000
#: Samples between two frames.
HOP = 160
#: Samples per frame.
_FRAME = 400
#: Frames of silence after sound that isn't padded to a window: with 3 s and less Whisper tiny.en
#: repeats the last words of some sounds.
_SILENCE = 500
#: Name of the tensor with an audio encoder's input.
FEATURES = "features"
_MIN_POWER = 1e-10
#: Frames that are computed at once, and neighboring frames on either side that share samples with
#: them.
_PART_FRAMES, _CONTEXT = 3000, _FRAME // HOP + 1
#: Maximum multiplications of a matrix product that OpenBLAS runs in the calling thread alone (its
#: interface/gemm.c). For larger ones it wakes other threads, which then spin for some 20 ms on
#: processors that the engine needs.
_MAX_PRODUCTS = 4 * 65_536


def check_samples(samples: Any, param: str = "multi_modal_data") -> np.ndarray:
    """Return audio samples as float32 [n]. The channels of [n, channels] are averaged.

    Raises `InvalidRequest` for other shapes or dtypes, for no samples, and for NaN or infinity.
    """
    values = np.asarray(samples)
    if values.dtype.kind not in "fiu" or values.ndim not in (1, 2) or not values.size:
        raise InvalidRequest(
            "Sound must be an array of numbers, [samples] or [samples, channels].", param=param
        )
    if values.dtype.kind in "iu":
        values = values.astype(np.float32) / -float(np.iinfo(values.dtype).min or -1)
    values = values.astype(np.float32, copy=False)
    if values.ndim == 2:
        values = values.mean(axis=1)
    if not np.isfinite(values).all():
        raise InvalidRequest("Sound holds NaN or infinity.", param=param)
    return values


def check_sample_rate(rate: Any, param: str = "multi_modal_data") -> None:
    """Raise `InvalidRequest` unless the rate is an integer from 1000 to 768000."""
    if not isinstance(rate, int | np.integer) or not 1_000 <= rate <= 768_000:
        raise InvalidRequest(
            f"The sample rate must be from 1000 to 768000, got {rate!r:.40}.", param=param
        )


def resample(samples: np.ndarray, rate: int) -> np.ndarray:
    """Resample float32 [n] from `rate` to `SAMPLE_RATE` with FFmpeg's filter."""
    if rate == SAMPLE_RATE:
        return samples
    import av

    frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
    frame.sample_rate = int(rate)
    resampler = av.AudioResampler(format="fltp", layout="mono", rate=SAMPLE_RATE)
    parts = [
        part.to_ndarray()[0] for part in (*resampler.resample(frame), *resampler.resample(None))
    ]
    return np.concatenate([np.zeros(0, dtype=np.float32), *parts])


def log_mel(samples: np.ndarray, num_mels: int, num_frames: int) -> np.ndarray:
    """Return features, float32 [num_mels, num_frames], of samples at `SAMPLE_RATE`, which are
    padded with silence or cut.
    """
    num_computed = min(num_heard(samples), num_frames)
    return scale_window(log_powers(samples, num_mels, num_computed), num_frames)


def num_heard(samples: np.ndarray) -> int:
    """Return the number of frames up to the last one that contains any of the samples."""
    return len(samples) // HOP + _FRAME // HOP + 1


def num_encoded(num_frames: int, window: int, *, pads: bool) -> int:
    """Return how many frames Whisper's encoder reads for sound of `num_frames`: a window, or else
    an even number of those of the sound and of silence after it.
    """
    return window if pads else min(window, -(-(num_frames + _SILENCE) // 2) * 2)


def pads_windows(options: Mapping[str, Any], param: str = "mm_processor_kwargs") -> bool:
    """Whether Whisper's encoder reads whole windows: by mm_processor_kwargs with the `padding` of
    `transformers`, "max_length" or "longest". Raises `InvalidRequest` for other options.
    """
    padding = options.get("padding", "max_length")
    if options.keys() - {"padding"} or padding not in ("max_length", "longest"):
        raise InvalidRequest(
            f'{param} of Whisper may be {{"padding": "max_length"}} or {{"padding": "longest"}}; '
            f"got {dict(options)!r:.80}.",
            param=param,
        )
    return padding == "max_length"


def log_powers(samples: np.ndarray, num_mels: int, num_frames: int) -> np.ndarray:
    """Return mel powers' logarithms to base 10, float32 [num_frames, num_mels], of samples at
    `SAMPLE_RATE`, which are padded with silence or cut.

    They are computed in parts, so that temporary memory doesn't grow with the number of frames.
    """
    parts = []
    for first in range(0, num_frames, _PART_FRAMES):
        start, end = max(0, first - _CONTEXT), min(first + _PART_FRAMES, num_frames)
        stop = min(end + _CONTEXT, num_frames)
        powers = _part_powers(samples[start * HOP : stop * HOP], num_mels, stop - start)
        parts.append(powers[first - start : end - start])
    return np.concatenate(parts)


def _part_powers(samples: np.ndarray, num_mels: int, num_frames: int) -> np.ndarray:
    """Return `log_powers` of samples that are reflected at both ends."""
    padded = np.zeros(num_frames * HOP, dtype=np.float32)
    padded[: len(samples)] = samples
    centered = np.pad(padded, _FRAME // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(centered, _FRAME)[::HOP][:num_frames]
    # In float64, as in `transformers`, for the precision of quiet frames.
    spectrum = np.abs(np.fft.rfft(frames * _window(), axis=1)) ** 2
    filters = _mel_filters(num_mels)
    num_rows = max(1, _MAX_PRODUCTS // filters.size)
    parts = [spectrum[i : i + num_rows] @ filters for i in range(0, len(spectrum), num_rows)]
    mel = np.maximum(_MIN_POWER, np.concatenate(parts))
    return np.log10(mel).astype(np.float32)


def scale_window(powers: np.ndarray, num_frames: int) -> np.ndarray:
    """Return the encoder's input for a window, float32 [num_mels, num_frames], from the first of
    `log_powers` [n, num_mels], padded with silence.
    """
    window = np.full((powers.shape[1], num_frames), np.log10(_MIN_POWER), dtype=np.float32)
    window[:, : len(powers)] = powers[:num_frames].T
    window = np.maximum(window, window.max() - np.float32(8))
    return (window + np.float32(4)) / np.float32(4)


def stretch_powers(samples: np.ndarray, num_mels: int) -> np.ndarray:
    """Return `log_powers` of all frames that contain any of the samples."""
    return log_powers(samples, num_mels, num_heard(samples))


def window_tensors(powers: np.ndarray, num_frames: int) -> MediaTensors:
    """Return the encoder's tensors for a window, from its `log_powers` [n, num_mels]."""
    return {FEATURES: scale_window(powers, num_frames)}


@cache
def _window() -> np.ndarray:
    """Return a periodic Hann window."""
    return np.hanning(_FRAME + 1)[:-1]


@cache
def _mel_filters(num_mels: int) -> np.ndarray:
    """Return triangular filters of equal area on Slaney's mel scale from 0 to 8 kHz, float64
    [frequencies, num_mels].
    """
    frequencies = np.linspace(0, SAMPLE_RATE / 2, _FRAME // 2 + 1)
    edges = _mel_to_hertz(np.linspace(0, _hertz_to_mel(SAMPLE_RATE / 2), num_mels + 2))
    slopes = edges[None, :] - frequencies[:, None]
    widths = np.diff(edges)
    falling = -slopes[:, :-2] / widths[:-1]
    rising = slopes[:, 2:] / widths[1:]
    triangles = np.maximum(0.0, np.minimum(falling, rising))
    return triangles * (2.0 / (edges[2:] - edges[:-2]))


#: Slaney's scale is linear up to 1 kHz and logarithmic above.
_LINEAR_HERTZ, _LINEAR_MELS = 1000.0, 15.0
_LOG_STEP = np.log(6.4) / 27.0


def _hertz_to_mel(hertz: float) -> float:
    return _LINEAR_MELS + float(np.log(hertz / _LINEAR_HERTZ)) / _LOG_STEP


def _mel_to_hertz(mels: np.ndarray) -> np.ndarray:
    linear = mels * (_LINEAR_HERTZ / _LINEAR_MELS)
    logarithmic = _LINEAR_HERTZ * np.exp(_LOG_STEP * (mels - _LINEAR_MELS))
    return np.where(mels < _LINEAR_MELS, linear, logarithmic)
