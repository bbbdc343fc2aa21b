"""Sound becomes the frames that Whisper was trained on, whatever its rate and channels."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import transformers as tf

from engine.contract.errors import InvalidRequest
from engine.multimodal import sound_processor
from engine.multimodal.audio import (
    SAMPLE_RATE,
    check_samples,
    log_mel,
    resample,
    scale_window,
    stretch_powers,
)
from engine.multimodal.sound_processor import SoundProcessor
from tests.engine.speech.models import JFK, read_wav, sound


@pytest.mark.parametrize("num_mels", [80, 128])
@pytest.mark.parametrize("which", ["speech", "noise", "silence", "short"])
def test_frames_equal_those_of_the_feature_extractor(num_mels: int, which: str) -> None:
    samples = {
        "speech": read_wav(JFK)[0],
        "noise": sound(3, 30),
        "silence": np.zeros(1_000, np.float32),
        "short": sound(1, 0.0001),
    }[which]
    extractor = tf.WhisperFeatureExtractor(feature_size=num_mels)
    expected_tensor = extractor(
        samples, sampling_rate=SAMPLE_RATE, return_tensors="np"
    ).input_features[0]
    frames = log_mel(samples, num_mels, 3000)
    assert frames.shape == expected_tensor.shape
    assert frames.dtype == np.float32
    assert np.abs(frames - expected_tensor).max() < 1e-4


@pytest.mark.parametrize("rate", [8_000, 11_025, 44_100, 48_000])
def test_a_tone_stays_the_same_tone_at_another_rate(rate: int) -> None:
    times = np.arange(rate * 2) / rate
    samples = np.sin(2 * np.pi * 440 * times).astype(np.float32)
    heard = resample(samples, rate)
    assert abs(len(heard) - 2 * SAMPLE_RATE) <= 32
    expected = np.sin(2 * np.pi * 440 * np.arange(len(heard)) / SAMPLE_RATE)
    middle = slice(2_000, -2_000)
    assert np.abs(heard[middle] - expected[middle]).max() < 0.02


def test_channels_are_averaged_and_integers_scaled() -> None:
    stereo = np.array([[16384, -16384], [32767, 32767]], np.int16)
    heard = check_samples(stereo)
    assert heard.dtype == np.float32
    np.testing.assert_allclose(heard, [0, 32767 / 32768], atol=1e-6)


@pytest.mark.parametrize(
    "audio",
    [
        np.zeros(0, np.float32),
        np.array([1.0, np.nan], np.float32),
        np.array([np.inf], np.float32),
        "text",
        np.zeros((2, 2, 2), np.float32),
        (np.zeros(100, np.float32), 0),
        (np.zeros(100, np.float32), "fast"),
        np.zeros(31 * SAMPLE_RATE, np.float32),
    ],
)
def test_what_is_no_sound_or_too_long_is_refused_by_field(audio: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SoundProcessor(80, 3000).prepare(audio)
    assert refused.value.param == "multi_modal_data"


def test_sound_that_is_too_long_is_refused_before_it_is_resampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sound_processor, "resample", None)
    with pytest.raises(InvalidRequest, match=r"has 31\.0 s"):
        SoundProcessor(80, 3000).prepare((np.zeros(31 * 8_000, np.float32), 8_000))


@pytest.mark.parametrize("seconds", [0.013, 1.0, 30.0, 67.3])
def test_a_window_of_a_stretch_is_what_its_own_samples_give(seconds: float) -> None:
    samples = sound(3, seconds)
    powers = stretch_powers(samples, 80)
    assert np.abs(scale_window(powers[:3000], 3000) - log_mel(samples, 80, 3000))[:, :-2].max() < (
        1e-6
    )
    full = log_mel(samples, 80, len(powers) + 100)
    rebuilt = scale_window(powers, len(powers) + 100)
    assert np.abs(rebuilt - full).max() < 1e-6


IDLE_THREADS = """
import time
from pathlib import Path
import numpy as np
from engine.multimodal.audio import log_mel

def others_ticks():
    stats = [path.read_text() for path in Path("/proc/self/task").glob("*/stat")]
    fields = [stat.rpartition(")")[2].split() for stat in stats[1:]]
    return sum(int(user) + int(system) for user, system in (each[11:13] for each in fields))

before = others_ticks()
for _ in range(10):
    log_mel(np.ones(30 * 16_000, np.float32), 128, 3000)
    time.sleep(0.02)
print(others_ticks() - before)
"""


def test_features_take_no_other_threads_time() -> None:
    """OpenBLAS's threads would spin for a while where the engine wants the processors."""
    command = [sys.executable, "-c", IDLE_THREADS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "0\n"
