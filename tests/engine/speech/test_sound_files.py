"""Files of sound in any container become windows; what is no sound is a refusal that says so."""

from __future__ import annotations

import io
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import av
import msgspec
import numpy as np
import pytest

from engine.contract.errors import InvalidRequest
from engine.multimodal import sound_files
from engine.multimodal.audio import SAMPLE_RATE
from engine.multimodal.inputs import (
    ANSWERS,
    PreparedSound,
    PrepareSoundRequest,
    Refusal,
    VoiceDetection,
)
from engine.multimodal.sound_files import StretchSplitter, decode_sound, split_sound
from tests.engine.speech.damaged import damaged_files, encoded
from tests.engine.speech.models import JFK, read_wav, sound

WINDOW = 30 * SAMPLE_RATE


@pytest.mark.parametrize(
    ("container", "codec", "rate", "layout"),
    [
        ("wav", "pcm_s16le", 8_000, "mono"),
        ("wav", "pcm_s24le", 96_000, "stereo"),
        ("flac", "flac", 44_100, "stereo"),
        ("ogg", "libvorbis", 48_000, "mono"),
        ("webm", "libopus", 48_000, "stereo"),
        ("mp3", "libmp3lame", 44_100, "mono"),
        ("mp4", "aac", 48_000, "stereo"),
    ],
)
def test_any_container_rate_and_channels_give_the_same_sound(
    container: str, codec: str, rate: int, layout: str
) -> None:
    samples = read_wav(JFK)[0][: 4 * SAMPLE_RATE]
    try:
        data = encoded(container, codec, samples, rate, layout)
    except (av.error.FFmpegError, ValueError, LookupError) as error:
        pytest.skip(f"This FFmpeg doesn't write {codec}: {error}")
    heard = np.concatenate(list(decode_sound(data)))
    assert abs(len(heard) - len(samples)) < 0.15 * SAMPLE_RATE
    best = max(
        np.corrcoef(heard[shift : shift + 60_000], samples[:60_000])[0, 1]
        for shift in range(0, 2_500, 4)
    )
    assert best > 0.9


def test_windows_begin_with_sound_and_keep_their_place() -> None:
    silence, tone = np.zeros(20 * SAMPLE_RATE, np.float32), sound(1, 3)
    splitter = StretchSplitter(WINDOW)
    windows = []
    for chunk in np.array_split(np.concatenate((silence, tone, silence, tone)), 977):
        windows += splitter.push(chunk)
    windows += splitter.finish()
    assert [window.start / SAMPLE_RATE for window in windows] == pytest.approx(
        [19.8, 42.8], abs=0.11
    )
    assert all(3 <= len(window.samples) / SAMPLE_RATE < 4 for window in windows)
    assert [window.lead / SAMPLE_RATE for window in windows] == pytest.approx([0.2, 0.2])


def test_a_constant_is_silence() -> None:
    splitter = StretchSplitter(WINDOW)
    assert not [*splitter.push(np.full(9 * SAMPLE_RATE, 0.1, np.float32)), *splitter.finish()]


@pytest.mark.parametrize("noise", [0.0, 0.005])
def test_a_stretch_that_nearly_fills_a_window_ends_at_a_pause(noise: float) -> None:
    loud = sound(2, 70)
    loud[10 * SAMPLE_RATE : 11 * SAMPLE_RATE] *= 0.01  # too early to end anything
    loud[27 * SAMPLE_RATE : 28 * SAMPLE_RATE] *= 0.01
    loud += noise * np.random.default_rng(0).standard_normal(len(loud)).astype(np.float32)
    splitter = StretchSplitter(WINDOW)
    stretches = [*splitter.push(loud), *splitter.finish()]
    lengths = [len(stretch.samples) / SAMPLE_RATE for stretch in stretches]
    assert lengths == pytest.approx([27.5, 42.5], abs=0.11)  # nobody pauses in the second
    np.testing.assert_array_equal(np.concatenate([part.samples for part in stretches]), loud)
    assert [part.start for part in stretches] == [0, len(stretches[0].samples)]


def test_sound_without_a_pause_is_cut_where_it_is_quietest() -> None:
    loud = sound(2, 400)
    loud[297 * SAMPLE_RATE : 297 * SAMPLE_RATE + 1_600] *= 0.5
    splitter = StretchSplitter(WINDOW)
    parts = [*splitter.push(loud), *splitter.finish()]
    assert [part.start / SAMPLE_RATE for part in parts] == pytest.approx([0, 297.1], abs=0.11)
    np.testing.assert_array_equal(np.concatenate([part.samples for part in parts]), loud)


def test_a_file_that_is_too_long_is_refused_and_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sound_files, "MAX_SECONDS", 3)
    assert split_sound(_wav(sound(1, 3)), WINDOW)[0] == 3 * SAMPLE_RATE
    with pytest.raises(InvalidRequest, match="hours of sound"):
        split_sound(_wav(sound(1, 4)), WINDOW)


def test_what_is_no_number_at_a_files_end_is_silent() -> None:
    samples = sound(1, 2)
    samples[-1] = np.nan
    data = encoded("wav", "pcm_f32le", samples, 44_100, "mono")
    assert np.isfinite(np.concatenate(list(decode_sound(data)))).all()


def test_a_voice_detector_says_where_stretches_end() -> None:
    rest = np.zeros(SAMPLE_RATE // 2, np.float32)
    samples = np.concatenate((rest, sound(1, 1), rest, 0.02 * sound(2, 1), rest, sound(3, 1)))

    def starts(detection: VoiceDetection | None) -> list[float]:
        splitter = StretchSplitter(WINDOW, detection)
        stretches = [*splitter.push(samples), *splitter.finish()]
        return [stretch.start / SAMPLE_RATE for stretch in stretches]

    assert starts(None) == [0.3]
    assert starts(VoiceDetection(0.0, 100, 300)) == pytest.approx([0.4, 1.9, 3.4])
    assert starts(VoiceDetection(1.0, 0, 400)) == pytest.approx([0.5, 3.5])
    assert starts(VoiceDetection(1.0, 5000, 600)) == pytest.approx([0.0, 2.1])


def test_a_file_of_more_stretches_than_are_taken_is_refused_by_what_ends_them() -> None:
    spoken, rest = sound(1, 0.5), np.zeros(SAMPLE_RATE // 2, np.float32)
    data = _wav(np.tile(np.concatenate((spoken, rest)), sound_files.MAX_WINDOWS + 1))
    split_sound(data, WINDOW)
    with pytest.raises(InvalidRequest, match="silence_duration_ms"):
        split_sound(data, WINDOW, VoiceDetection())


def test_hours_of_silence_take_no_memory() -> None:
    splitter = StretchSplitter(WINDOW)
    silence = np.zeros(60 * SAMPLE_RATE, np.float32)
    for _ in range(30):
        assert not list(splitter.push(silence))
        assert len(splitter._steps) < 5
    [window] = [*splitter.push(sound(1, 2)), *splitter.finish()]
    assert window.start / SAMPLE_RATE == pytest.approx(1800, abs=0.3)


def write_flac(path: Path, speech: np.ndarray, minutes_of_silence: int) -> None:
    """Speech with silence around it: as much before as behind."""
    with av.open(str(path), "w") as file:
        stream: Any = file.add_stream("flac", rate=SAMPLE_RATE, layout="mono")
        second = np.zeros((1, SAMPLE_RATE), "<i2")
        silence = [second] * (30 * minutes_of_silence)
        for samples in (*silence, (speech[None] * 32767).astype("<i2"), *silence):
            frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
            frame.sample_rate = SAMPLE_RATE
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))


_PEAK = """
import resource, sys
from pathlib import Path
from engine.multimodal.sound_files import split_sound
num_samples, stretches = split_sound(Path(sys.argv[1]).read_bytes(), 30 * 16_000)
spoken = sum(len(stretch.samples) for stretch in stretches)
print(num_samples, spoken, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_ten_hours_of_silence_around_three_spoken_minutes_take_no_memory(tmp_path: Path) -> None:
    speech = np.tile(read_wav(JFK)[0], 17)[: 180 * SAMPLE_RATE]
    peaks = []
    for minutes in (1, 597):
        path = tmp_path / f"{minutes}.flac"
        write_flac(path, speech, minutes)
        output = subprocess.run(
            [sys.executable, "-c", _PEAK, str(path)], capture_output=True, check=True, text=True
        )
        num_samples, spoken, peak_kb = map(int, output.stdout.split())
        assert num_samples == (180 + 60 * minutes) * SAMPLE_RATE
        assert 180 <= spoken / SAMPLE_RATE <= 182
        peaks.append(peak_kb)
    assert peaks[1] < peaks[0] + 32 * 1024


def _wav(samples: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no sound at all" * 99,
        b"RIFF\xff\xff\xff\xffWAVEfmt ",
        b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        _wav(np.zeros(0, np.float32)),
        JFK.read_bytes()[:44],
    ],
)
def test_files_without_sound_are_refused_by_field(data: bytes) -> None:
    with pytest.raises(InvalidRequest) as refused:
        split_sound(data, WINDOW)
    assert refused.value.param == "file"


@pytest.mark.parametrize("count", [50, pytest.param(500, marks=pytest.mark.slow)])
def test_damaged_files_give_what_they_hold_or_a_refusal(count: int) -> None:
    from engine.system.worker_process import WorkerProcess

    outcomes = set()
    worker = WorkerProcess("engine.multimodal.worker", "media worker")
    try:
        for number, data in enumerate(damaged_files(count)):
            request = PrepareSoundRequest(data, 80, 3000)
            answer = worker.request(msgspec.msgpack.encode(request), 60)
            assert answer is not None, number
            outcomes.add(type(ANSWERS.decode(answer)))
    finally:
        worker.close()
    assert outcomes == {PreparedSound, Refusal}


def test_more_speech_than_is_heard_at_once_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sound_files, "MAX_WINDOWS", 2)
    with pytest.raises(InvalidRequest, match="Cut it"):
        split_sound(_wav(sound(1, 100)), WINDOW)


def test_the_worker_answers_for_sound_as_for_pictures(tmp_path: Path) -> None:
    from engine.system.worker_process import WorkerProcess

    worker = WorkerProcess("engine.multimodal.worker", "media worker")
    try:
        encode = msgspec.msgpack.encode
        answer = worker.request(encode(PrepareSoundRequest(JFK.read_bytes(), 80, 3000)), 60)
        prepared = ANSWERS.decode(answer or b"")
        assert isinstance(prepared, PreparedSound)
        assert prepared.seconds == pytest.approx(11, abs=0.01)
        assert len(prepared.stretches) == 1
        answer = worker.request(encode(PrepareSoundRequest(b"x", 80, 3000)), 60)
        assert isinstance(ANSWERS.decode(answer or b""), Refusal)
    finally:
        worker.close()


@pytest.mark.parametrize(("count", "refused"), [(2, False), (3, True)])
def test_the_window_that_a_file_ends_in_counts(
    monkeypatch: pytest.MonkeyPatch, count: int, refused: bool
) -> None:
    monkeypatch.setattr(sound_files, "MAX_WINDOWS", 2)
    pause = np.zeros(8 * 16_000, np.float32)
    data = _wav(np.concatenate([part for _ in range(count) for part in (sound(1, 1), pause)][:-1]))
    if not refused:
        assert len(split_sound(data, WINDOW)[1]) == 2
        return
    with pytest.raises(InvalidRequest, match="Cut it"):
        split_sound(data, WINDOW)


def test_a_worker_whose_answer_is_too_long_is_not_asked_again() -> None:
    from engine.system.worker_process import MAX_FRAME, WorkerProcess

    program = (
        f"import os, time; os.write(1, ({MAX_FRAME} + 1).to_bytes(4, 'little')); time.sleep(60)"
    )
    worker = WorkerProcess((sys.executable, "-c", program), "media worker")
    try:
        assert worker.request(b"x", 30) is None
        assert not worker.alive
    finally:
        worker.close()
