"""Sound in a running product: OpenAI's SDK transcribes real speech with Whisper tiny.en."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import sqlite3
import time
import wave
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.e2e.product import Product, product_pids, running
from tests.engine.speech.damaged import damaged_files
from tests.engine.speech.models import (
    DICKENS,
    DICKENS_TEXT,
    JFK,
    JFK_TEXT,
    read_wav,
    tiny_en,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.xdist_group("speech")


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    folder = tmp_path_factory.mktemp("whisper")
    flags = ("--model", str(tiny_en()), "--served-model-name", "whisper", "--dtype", "float32")
    with running(folder, *flags) as started:
        yield started


@pytest.fixture
def client(product: Product) -> openai.OpenAI:
    return openai.OpenAI(base_url=product.base_url, api_key=product.api_key, max_retries=0)


def words(text: str) -> list[str]:
    """Its words without marks."""
    return re.sub(r"[^a-z' ]", "", text.lower()).split()


def wav(samples: np.ndarray, rate: int = 16_000) -> bytes:
    """A file of 16 bits."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


def test_a_speech_is_transcribed_without_an_error(client: openai.OpenAI) -> None:
    result = client.audio.transcriptions.create(model="whisper", file=JFK)
    assert words(result.text) == words(JFK_TEXT)
    assert result.usage is not None
    assert (result.usage.type, result.usage.seconds) == ("duration", 11)


def test_a_page_of_dickens_is_heard_without_an_error(client: openai.OpenAI) -> None:
    result = client.audio.transcriptions.create(model="whisper", file=DICKENS)
    assert words(result.text) == words(DICKENS_TEXT)


def test_every_form_of_answer(client: openai.OpenAI) -> None:
    def ask(response_format: Any, **options: Any) -> Any:
        return client.audio.transcriptions.create(
            model="whisper", file=JFK, response_format=response_format, **options
        )

    assert words(ask("text")) == words(JFK_TEXT)
    verbose = ask("verbose_json", timestamp_granularities=["segment"], language="en")
    assert (verbose.task, verbose.language, verbose.duration) == ("transcribe", "en", 11.0)
    assert words("".join(segment.text for segment in verbose.segments)) == words(JFK_TEXT)
    ends = [segment.end for segment in verbose.segments]
    assert ends == sorted(ends)
    assert 9.5 < ends[-1] <= 11
    assert all(segment.avg_logprob > -1 for segment in verbose.segments)
    assert verbose.words is None
    timed = ask("verbose_json", timestamp_granularities=["word"])
    assert timed.segments is None
    assert words(" ".join(word.word for word in timed.words)) == words(JFK_TEXT)
    starts = {word.word: word.start for word in timed.words}
    # As faster-whisper has it on the same weights.
    assert starts["Americans"] == pytest.approx(1.76, abs=0.1)
    assert [word.end for word in timed.words] == sorted(word.end for word in timed.words)
    assert all(0 <= word.start <= word.end <= 11 for word in timed.words)
    subtitles = ask("srt")
    assert subtitles.startswith("1\n00:00:0")
    assert words(re.sub(r"[\d:,>\-]+", " ", subtitles)) == words(JFK_TEXT)
    assert ask("vtt").startswith("WEBVTT\n\n00:0")
    detection: Any = {"type": "server_vad", "silence_duration_ms": 1000, "prefix_padding_ms": 400}
    assert words(ask("json", chunking_strategy=detection).text) == words(JFK_TEXT)
    scored = ask("json", include=["logprobs"])
    assert "".join(entry.token for entry in scored.logprobs).strip() == scored.text


def test_a_stream_has_the_same_text(client: openai.OpenAI) -> None:
    events = list(client.audio.transcriptions.create(model="whisper", file=JFK, stream=True))
    assert [event.type for event in events[-1:]] == ["transcript.text.done"]
    deltas = "".join(e.delta for e in events if e.type == "transcript.text.delta")
    assert deltas == events[-1].text
    assert words(deltas) == words(JFK_TEXT)


def test_long_sound_keeps_its_clock_and_repeats_nothing(client: openai.OpenAI) -> None:
    speech = read_wav(JFK)[0]
    pause = np.zeros(8 * 16_000, np.float32)
    samples = np.concatenate([*([speech, pause] * 6)])
    result = client.audio.transcriptions.create(
        model="whisper", file=("long.wav", wav(samples)), response_format="verbose_json"
    )
    assert words(result.text) == words(JFK_TEXT) * 6
    starts = [s.start for s in result.segments if words(s.text)[:2] == ["and", "so"]]
    assert starts == pytest.approx([19.0 * index for index in range(6)], abs=0.6)


def test_speech_without_a_pause_goes_on_where_a_segment_ended(client: openai.OpenAI) -> None:
    speech = read_wav(JFK)[0]
    noise = 0.008 * np.random.default_rng(0).standard_normal(6 * len(speech))
    result = client.audio.transcriptions.create(
        model="whisper",
        file=("long.wav", wav(np.concatenate([speech] * 6) + noise)),
        response_format="verbose_json",
        temperature=0,  # without fallback, which is random
    )
    # The smallest Whisper mishears some words in noise, but nothing is lost or said twice.
    assert [words(result.text).count(word) for word in ("country", "so")] == [12, 6]
    assert len({segment.seek for segment in result.segments}) > 2
    starts = [s.start for s in result.segments if words(s.text)[:2] == ["and", "so"]]
    drift = [start - 11.0 * round(start / 11) for start in starts]
    assert max(map(abs, drift)) < 2.0  # of which the model's own timestamps have a half
    assert [segment.start for segment in result.segments] == sorted(
        segment.start for segment in result.segments
    )


def test_a_killed_engine_changes_no_word(product: Product, client: openai.OpenAI) -> None:
    speech = read_wav(JFK)[0]
    pause = np.zeros(8 * 16_000, np.float32)
    parts = [speech[index * 400 :] for index in range(6)]  # none is the same to the encoder
    data = wav(np.concatenate([part for speech in parts for part in (speech, pause)]))
    stream = client.audio.transcriptions.create(
        model="whisper", file=("long.wav", data), stream=True
    )
    (pid,) = product_pids(product, "engine.serving")
    events = []
    for event in stream:
        events.append(event)
        if len(events) == 2:
            os.kill(pid, signal.SIGKILL)
    event = events[-1]
    assert event.type == "transcript.text.done"
    wait_until(lambda: product_pids(product, "engine.serving") not in ([], [pid]))
    again = client.audio.transcriptions.create(model="whisper", file=("long.wav", data))
    assert event.text == again.text
    assert words(again.text).count("country") == 12


def test_silence_has_no_text(client: openai.OpenAI) -> None:
    silence = ("silence.wav", wav(np.zeros(20 * 16_000)))
    assert client.audio.transcriptions.create(model="whisper", file=silence).text == ""
    events = list(client.audio.transcriptions.create(model="whisper", file=silence, stream=True))
    assert [(event.type, event.text) for event in events] == [("transcript.text.done", "")]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "diarized_json"}, "response_format"),
        ({"response_format": "xml"}, "response_format"),
        ({"timestamp_granularities[]": "phone", "response_format": "verbose_json"},
         "timestamp_granularities[]"),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities[]"),
        ({"temperature": "3"}, "temperature"),
        ({"temperature": "nan"}, "temperature"),
        ({"language": "de"}, "language"),
        ({"stream": "maybe"}, "stream"),
        ({"stream": "true", "response_format": "srt"}, "stream"),
        ({"include[]": "secrets"}, "include"),
        ({"seed": "-1"}, "seed"),
        ({"max_completion_tokens": "0"}, "max_completion_tokens"),
        ({"chunking_strategy": "semantic_vad"}, "chunking_strategy"),
        ({"chunking_strategy[threshold]": "0.5"}, "chunking_strategy"),
        ({"chunking_strategy[type]": "server_vad", "chunking_strategy[threshold]": "2"},
         "chunking_strategy[threshold]"),
        ({"unheard_of": "1"}, "unheard_of"),
    ],
)  # fmt: skip
def test_fields_that_cannot_be_are_refused_by_name(
    product: Product, fields: dict[str, str], param: str
) -> None:
    answer = _post(product, JFK.read_bytes(), fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("count", [30, pytest.param(500, marks=pytest.mark.slow)])
def test_damaged_files_are_heard_or_refused_by_field_beside_good_ones(
    product: Product, count: int
) -> None:
    def status(data: bytes) -> int:
        answer = _post(product, data, {"temperature": "0", "max_completion_tokens": "4"})
        if answer.status_code == 400:
            assert answer.json()["error"]["param"] == "file"
        return answer.status_code

    no_sound = [b"", b"no sound", b"#EXTM3U\nfile:///etc/passwd\n"]
    with ThreadPoolExecutor(4) as pool:
        damaged = pool.map(status, damaged_files(count))
        for _ in range(3):
            assert words(_post(product, JFK.read_bytes(), {}).json()["text"]) == words(JFK_TEXT)
        assert set(damaged) == {200, 400}
        assert set(pool.map(status, no_sound)) == {400}


def test_a_model_of_english_translates_nothing(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.audio.translations.create(model="whisper", file=JFK)
    assert refused.value.param == "model"


def test_usage_is_in_the_ledger_once(product: Product, client: openai.OpenAI) -> None:
    def entries(prompt_tokens: int) -> list[tuple[int, int, int]]:
        """Completion tokens, audio and cost of all entries with such a prompt, which no other test
        has.
        """
        query = (
            "SELECT completion_tokens, audio_ms, cost_nanos FROM metering_usageentry "
            "WHERE endpoint = 'audio.transcriptions' AND prompt_tokens = ?"
        )
        with closing(sqlite3.connect(product.data_dir / "quire.sqlite3")) as database:
            return list(database.execute(query, (prompt_tokens,)))

    prices = ("--input", "0", "--output", "0", "--audio-minute", "0.006")
    product.manage("set_price", "whisper", *prices)
    time.sleep(2.5)  # gateways look prices up anew after two seconds
    for count in (31, 41):
        client.audio.transcriptions.create(
            model="whisper",
            file=JFK,
            prompt="Kennedy " * count,
            temperature=0,  # without further tries, which are entries too
            response_format="text",
        )
    # A second entry of the first would come before that of the second.
    wait_until(lambda: entries(3 + 31) and entries(3 + 41))
    [(completion, audio_ms, cost)] = entries(3 + 31)
    assert completion > 20
    # What is heard, a hundredth of a cent a second; nobody speaks at the ends of the file.
    assert 9_000 < audio_ms <= 11_000
    assert cost == 100 * audio_ms


def test_a_batch_transcribes_stored_and_named_files(client: openai.OpenAI) -> None:
    stored = client.files.create(file=JFK, purpose="user_data").id
    address = f"data:audio/wav;base64,{base64.b64encode(JFK.read_bytes()).decode()}"
    bodies: dict[str, dict[str, Any]] = {
        "stored": {"file_id": stored, "response_format": "srt"},
        "named": {"file_url": address, "model": "whisper", "include": ["logprobs"], "top_k": 5},
        "nothing": {"model": "whisper"},
        "no sound": {"file_url": "data:;base64,AAAA"},
        "unknown": {"file_id": stored, "beam_size": 5},
    }
    url = "/v1/audio/transcriptions"
    lines = [
        json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})
        for name, body in bodies.items()
    ]
    file = client.files.create(file=("b.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint=url,  # type: ignore[arg-type]
        completion_window="24h",
    )
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
    batch = client.batches.retrieve(batch.id)

    def read(file_id: str | None) -> dict[str, Any]:
        content = client.files.content(file_id or "").text
        answers = [json.loads(line) for line in content.splitlines()]
        return {answer["custom_id"]: answer["response"]["body"] for answer in answers}

    results, errors = read(batch.output_file_id), read(batch.error_file_id)
    assert results["stored"]["text"].startswith("1\n00:00:0")
    assert words(results["named"]["text"]) == words(JFK_TEXT)
    assert results["named"]["logprobs"]
    assert {name: error["error"]["param"] for name, error in errors.items()} == {
        "nothing": "file_url", "no sound": "file_url", "unknown": "beam_size",
    }  # fmt: skip


def test_the_command_writes_text_and_subtitles(product: Product, tmp_path: Path) -> None:
    printed = product.manage("transcribe", str(JFK))
    assert words(printed) == words(JFK_TEXT)
    product.manage("transcribe", str(JFK), "--format", "srt", "-o", str(tmp_path))
    assert (tmp_path / "jfk.srt").read_text().startswith("1\n00:00:00")
    (tmp_path / "text.wav").write_text("no sound")
    with pytest.raises(RuntimeError, match=r"1 of 2 files") as failed:
        product.manage("transcribe", str(tmp_path / "text.wav"), str(JFK))
    assert words(JFK_TEXT)[5] in str(failed.value)


def _post(product: Product, data: bytes, fields: dict[str, str]) -> httpx.Response:
    return httpx.post(
        f"{product.base_url}/audio/transcriptions",
        headers={"Authorization": f"Bearer {product.api_key}"},
        data={"model": "whisper", **fields},
        files={"file": ("sound", data)},
        timeout=60,
    )


def _clips(count: int) -> list[tuple[str, np.ndarray, bool]]:
    """(kind, sound, whether somebody speaks): noise, silence, hum, and speech that is cut."""
    random, speech = np.random.default_rng(count), read_wav(JFK)[0]
    clips = []
    for number in range(count):
        length = int(random.integers(1, 12) * 16_000)
        times = np.arange(length) / 16_000
        loudness = 10 ** random.uniform(-3, -0.7)
        kind = ("noise", "silence", "hum", "speech")[number % 4]
        if kind == "speech":
            # Where at least a second and a half of the first sentence's words is left.
            start = int(random.uniform(0, 6) * 16_000)
            samples = speech[start : start + int(random.uniform(2.5, 5) * 16_000)]
        elif kind == "noise":
            samples = loudness * random.standard_normal(length)
        elif kind == "hum":
            samples = loudness * np.sign(np.sin(2 * np.pi * random.choice([50, 60, 440]) * times))
        else:
            samples = np.full(length, random.choice([0.0, 0.3, 1e-4]))
        clips.append((kind, samples.astype(np.float32), kind == "speech"))
    return clips


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("count", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_no_clip_loops_and_none_with_speech_is_empty(client: openai.OpenAI, count: int) -> None:
    for number, (kind, samples, is_speech) in enumerate(_clips(count)):
        result = client.audio.transcriptions.create(
            model="whisper", file=("clip.wav", wav(samples)), extra_body={"seed": 1}
        )
        heard = words(result.text)
        about = number, kind, len(samples) / 16_000, result.text
        if is_speech:
            assert heard, about
        if kind == "silence":
            assert not heard, about
        # A loop says more than a mouth can, or the same again and again.
        assert len(heard) <= 6 * len(samples) / 16_000 + 6, about
        assert _compression(result.text) <= 2.4, about


def _compression(text: str) -> float:
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


@pytest.mark.parametrize("minutes", [pytest.param(10, marks=pytest.mark.slow)])
def test_stitched_clips_begin_where_they_were_put(client: openai.OpenAI, minutes: int) -> None:
    speech, random = read_wav(JFK)[0], np.random.default_rng(0)
    onset = int(np.argmax(np.abs(speech) > 0.002))  # where the clip's sound begins
    parts: list[np.ndarray] = []
    starts: list[float] = []
    length = 0
    while length < minutes * 60 * 16_000:
        pause = np.zeros(int(random.uniform(6, 12) * 16_000), np.float32)
        starts.append((length + len(pause) + onset) / 16_000)
        parts += [pause, speech]
        length += len(pause) + len(speech)
    result = client.audio.transcriptions.create(
        model="whisper",
        file=("long.wav", wav(np.concatenate(parts))),
        response_format="verbose_json",
    )
    assert words(result.text) == words(JFK_TEXT) * len(starts)
    begins = [s.start for s in result.segments if words(s.text)[:2] == ["and", "so"]]
    errors = np.asarray(begins) - np.asarray(starts)
    assert np.abs(errors).max() <= 0.1, errors
    drift = np.polyfit(starts, errors, 1)[0] * length / 16_000
    assert abs(drift) < 0.02
