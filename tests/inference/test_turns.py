"""Sound that comes piece by piece is cut into turns where its speaker pauses."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import wave
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inference.api.audio import realtime
from inference.api.audio.realtime import RealtimeConsumer
from inference.api.audio.turns import SoundBuffer, TurnChange, TurnDetection, wav_file

RATE = 24_000


def tone(seconds: float, loudness: float = 0.1) -> bytes:
    """A tone of this amplitude."""
    wave_ = loudness * np.sin(np.arange(int(seconds * RATE)) * 0.1)
    return (wave_ * 32767).astype("<i2").tobytes()


def changes(buffer: SoundBuffer, sound: bytes, size: int) -> tuple[list[TurnChange], list[bytes]]:
    """What happens while sound comes in pieces of so many bytes."""
    seen, turns = [], []
    for first in range(0, len(sound), size):
        buffer.append(sound[first : first + size])
        while (change := buffer.next_change()) is not None:
            seen.append(change)
            if change.kind == "stopped":
                turns.append(buffer.pop_turn())
    return seen, turns


@pytest.mark.parametrize("size", [2, 960, 7_002, 1 << 20])
def test_turns_are_the_same_however_sound_is_cut(size: int) -> None:
    silence = tone(1, 0)
    sound = silence + tone(1) + silence + tone(0.5) + tone(0.3, 0) + tone(0.5) + silence
    seen, turns = changes(SoundBuffer(RATE, TurnDetection()), sound, size)
    assert seen == [
        TurnChange("started", 700),
        TurnChange("stopped", 2_500),
        TurnChange("started", 2_700),
        TurnChange("stopped", 4_800),
    ]
    assert [len(turn) / 2 / RATE for turn in turns] == pytest.approx([1.8, 2.1])
    assert turns[0] == sound[int(0.7 * RATE) * 2 : int(2.5 * RATE) * 2]


def test_silence_takes_no_memory() -> None:
    buffer = SoundBuffer(RATE, TurnDetection())
    for _ in range(60):
        buffer.append(tone(10, 0.001))
        assert buffer.next_change() is None
        assert buffer.duration_ms <= 400


def test_a_click_begins_no_turn_and_a_hum_ends_one() -> None:
    buffer = SoundBuffer(RATE, TurnDetection())
    assert changes(buffer, tone(1, 0) + tone(0.03) + tone(1, 0), 960) == ([], [])
    seen, _ = changes(buffer, tone(60, 0.05), 9_600)
    assert [change.kind for change in seen] == ["started", "stopped"]


def test_a_higher_threshold_needs_louder_speech() -> None:
    sound = tone(1, 0) + tone(1, 0.02) + tone(1, 0)
    for threshold, count in ((0.1, 2), (1.0, 0)):
        buffer = SoundBuffer(RATE, TurnDetection(threshold))
        assert len(changes(buffer, sound, 960)[0]) == count


def test_without_detection_all_sound_is_one_turn() -> None:
    buffer = SoundBuffer(RATE, None)
    sound = tone(1) + tone(2, 0)
    assert changes(buffer, sound, 999) == ([], [])
    assert (buffer.pop_all(), len(buffer)) == (sound, 0)


def test_a_turn_is_a_file() -> None:
    sound = tone(0.5)
    with wave.open(io.BytesIO(wav_file(sound, RATE))) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, RATE)
        assert file.readframes(file.getnframes()) == sound


@pytest.mark.django_db(transaction=True)
async def test_a_client_that_left_while_an_event_was_sent_leaves_no_task() -> None:
    consumer = RealtimeConsumer()
    consumer._tasks = [asyncio.create_task(consumer._transcribe_turns())]

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        raise ConnectionResetError

    scope = {"type": "websocket", "headers": [], "path": "/v1/realtime"}
    with pytest.raises(ConnectionResetError):
        await consumer(scope, receive, send)
    assert consumer._tasks[0].cancelled()


class _Session:
    """A session whose turns nobody transcribes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def load_model(*_: object) -> tuple[None, None]:
            return None, None

        monkeypatch.setattr(realtime, "load_model", load_model)
        monkeypatch.setattr(realtime, "Transcription", lambda *_: None)
        self.consumer = RealtimeConsumer()
        caller: Any = SimpleNamespace(tenant="ada")
        self.consumer._caller = caller
        self.consumer.base_send = self._hear
        self._events: list[dict[str, Any]] = []

    async def _hear(self, message: dict[str, Any]) -> None:
        self._events.append(json.loads(message["text"]))

    async def events(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        """Those that an event of the client brings."""
        self._events = []
        await self.consumer.receive(json.dumps({"type": kind, **fields}))
        return self._events

    async def append(self, sound: bytes) -> list[dict[str, Any]]:
        audio = base64.b64encode(sound).decode()
        return await self.events("input_audio_buffer.append", audio=audio)

    async def detect(self, detection: dict[str, Any] | None) -> None:
        session = {"audio": {"input": {"turn_detection": detection}}}
        [event] = await self.events("session.update", session=session)
        assert event["type"] == "session.updated", event


async def test_a_commit_that_is_refused_loses_no_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    session = _Session(monkeypatch)
    await session.append(tone(0.05, 0))
    [event] = await session.events("input_audio_buffer.commit")
    assert event["error"]["code"] == "input_audio_buffer_commit_empty"
    await session.append(tone(0.05, 0))
    committed, _ = await session.events("input_audio_buffer.commit")
    assert committed["type"] == "input_audio_buffer.committed"
    assert session.consumer._turns.get_nowait().num_bytes == RATE // 5


async def test_the_shortest_turn_that_is_heard_is_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = _Session(monkeypatch)
    await session.detect({"prefix_padding_ms": 0, "silence_duration_ms": 20})
    events = await session.append(tone(1, 0) + tone(0.06) + tone(1, 0))
    assert [event["type"].split(".")[-1] for event in events] == [
        "speech_started",
        "speech_stopped",
        "committed",
        "added",
    ]


async def test_times_count_sound_that_was_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    session = _Session(monkeypatch)
    await session.append(tone(2, 0))
    await session.events("input_audio_buffer.clear")
    started, *_ = await session.append(tone(1, 0) + tone(1))
    assert started["audio_start_ms"] == 2_700


async def test_another_turn_detection_loses_no_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    session = _Session(monkeypatch)
    [started] = await session.append(tone(1, 0) + tone(1))
    await session.detect(None)
    await session.append(tone(1, 0))
    committed, _ = await session.events("input_audio_buffer.commit")
    assert committed["item_id"] == started["item_id"]
    assert session.consumer._turns.get_nowait().num_bytes == 23 * RATE // 5
