"""`WS /v1/realtime`: transcripts while sound comes, by OpenAI's SDK and by raw sockets."""

from __future__ import annotations

import base64
import json
import os
import random
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import SHUT_RDWR
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import websockets.sync.client as websocket_client
from playwright.sync_api import Browser, Playwright, expect, sync_playwright
from prometheus_client.parser import text_string_to_metric_families
from websockets.exceptions import ConnectionClosed

from tests.console.browser.conftest import CHROMIUM, FLAGS
from tests.e2e.product import Product, product_pids, running
from tests.e2e.test_speech import wav, words
from tests.engine.speech.models import JFK, JFK_TEXT, read_wav, tiny_en
from tests.waiting import wait_until

pytestmark = pytest.mark.xdist_group("realtime")

RATE = 24_000
METRICS_TOKEN = "a token for metrics alone"
TRANSCRIPTION = "conversation.item.input_audio_transcription"
#: A busy machine may take longer than the client's 10 s to answer.
PATIENCE: Any = {"max_size": None, "open_timeout": 60, "ping_timeout": None}
FAILURES = ("error", f"{TRANSCRIPTION}.failed")


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    folder = tmp_path_factory.mktemp("realtime")
    flags = ("--model", str(tiny_en()), "--served-model-name", "whisper", "--dtype", "float32")
    with running(folder, "--no-worker", *flags, QUIRE_METRICS_TOKEN=METRICS_TOKEN) as started:
        yield started


@pytest.fixture(scope="module")
def speech() -> bytes:
    """President Kennedy at 24 kHz, and a second of silence."""
    samples = read_wav(JFK)[0]
    times = np.arange(len(samples) * 3 // 2) / 1.5
    resampled = np.interp(times, np.arange(len(samples)), samples)
    return bytes((resampled * 32767).astype("<i2").tobytes()) + bytes(2 * RATE)


def connect(product: Product, key: str | None = None) -> websocket_client.ClientConnection:
    """A raw socket."""
    url = product.base_url.replace("http", "ws", 1) + "/realtime?model=whisper"
    headers = {"Authorization": f"Bearer {product.api_key if key is None else key}"}
    return websocket_client.connect(url, additional_headers=headers, **PATIENCE)


def send(socket: websocket_client.ClientConnection, kind: str, **fields: Any) -> None:
    socket.send(json.dumps({"type": kind, **fields}))


def receive_until(socket: websocket_client.ClientConnection, *kinds: str) -> dict[str, Any]:
    """The next event of these kinds."""
    while (event := json.loads(socket.recv(timeout=60)))["type"] not in kinds:
        assert event["type"] not in FAILURES, event
    return event


def append(socket: websocket_client.ClientConnection, sound: bytes) -> None:
    """In pieces of a fifth of a second."""
    for first in range(0, len(sound), 9_600):
        audio = base64.b64encode(sound[first : first + 9_600]).decode()
        send(socket, "input_audio_buffer.append", audio=audio)


MANUAL = {"type": "transcription", "audio": {"input": {"turn_detection": None}}}


def test_openais_client_hears_turns_end_and_reads_their_text(
    product: Product, speech: bytes
) -> None:
    client = openai.OpenAI(base_url=product.base_url, api_key=product.api_key)
    transcript, kinds = "", []
    with client.realtime.connect(
        model="whisper",
        extra_query={"intent": "transcription"},
        websocket_connection_options=PATIENCE,
    ) as connection:
        connection.session.update(
            session={
                "type": "transcription",
                "audio": {
                    "input": {
                        "format": {"type": "audio/pcm", "rate": 24_000},
                        "transcription": {"model": "whisper", "language": "en"},
                        "turn_detection": {"type": "server_vad", "silence_duration_ms": 800},
                    }
                },
            }
        )
        for first in range(0, len(speech), 9_600):
            audio = base64.b64encode(speech[first : first + 9_600]).decode()
            connection.input_audio_buffer.append(audio=audio)
        connection.input_audio_buffer.clear()
        num_open = 0
        for event in connection:
            kinds.append(event.type)
            assert event.type not in FAILURES, event
            num_open += event.type == "input_audio_buffer.committed"
            if event.type == f"{TRANSCRIPTION}.completed":
                transcript += f" {event.transcript}"
                num_open -= 1
            if "input_audio_buffer.cleared" in kinds and not num_open:
                break
    assert kinds[:2] == ["session.created", "session.updated"]
    first_turn = [
        kind for kind in kinds if kind.startswith("input_audio_buffer") or "added" in kind
    ][:4]
    assert first_turn == [
        "input_audio_buffer.speech_started",
        "input_audio_buffer.speech_stopped",
        "input_audio_buffer.committed",
        "conversation.item.added",
    ]
    assert f"{TRANSCRIPTION}.delta" in kinds
    assert words(transcript).count("country") == 2


def test_a_turn_that_is_committed_has_the_text_of_a_file(product: Product, speech: bytes) -> None:
    with connect(product) as socket:
        session = {**MANUAL, "include": ["item.input_audio_transcription.logprobs"]}
        send(socket, "session.update", session=session)
        updated = receive_until(socket, "session.updated")["session"]
        assert updated["audio"]["input"]["turn_detection"] is None
        assert updated["audio"]["input"]["transcription"]["model"] == "whisper"
        append(socket, speech)
        send(socket, "input_audio_buffer.commit")
        committed = receive_until(socket, "input_audio_buffer.committed")
        assert committed["previous_item_id"] is None
        delta = receive_until(socket, f"{TRANSCRIPTION}.delta")
        done = receive_until(socket, f"{TRANSCRIPTION}.completed")
        assert committed["item_id"] == delta["item_id"] == done["item_id"]
        assert words(done["transcript"]) == words(JFK_TEXT)
        assert delta["delta"] == done["transcript"]
        assert "".join(entry["token"] for entry in done["logprobs"]).strip() == done["transcript"]
        assert done["usage"] == {"type": "duration", "seconds": 12}


def test_errors_name_the_field_and_the_session_goes_on(product: Product, speech: bytes) -> None:
    def sound(**fields: Any) -> dict[str, Any]:
        return {"session": {"type": "transcription", "audio": {"input": fields}}}

    base = "session.audio.input"
    cases: list[tuple[str, dict[str, Any], str | None]] = [
        ("response.create", {}, "type"),
        ("input_audio_buffer.append", {"audio": "no base64!"}, "audio"),
        ("input_audio_buffer.append", {"audio": 7}, "audio"),
        ("input_audio_buffer.append", {"audio": "AAAA"}, "audio"),
        ("input_audio_buffer.commit", {}, None),
        ("session.update", {"session": 1}, "session"),
        ("session.update", {"session": {"type": "realtime"}}, "session.type"),
        ("session.update", {"session": {"voice": "alloy"}}, "session.voice"),
        ("session.update", sound(format={"type": "audio/pcmu"}), f"{base}.format.type"),
        ("session.update", sound(turn_detection={"type": "semantic_vad"}),
         f"{base}.turn_detection.type"),
        ("session.update", sound(noise_reduction={"type": "near_field"}),
         f"{base}.noise_reduction"),
        ("session.update", sound(transcription={"language": "de"}), "language"),
    ]  # fmt: skip
    with connect(product) as socket:
        receive_until(socket, "session.created")
        for number, (kind, fields, param) in enumerate(cases):
            send(socket, kind, event_id=f"event {number}", **fields)
            error = receive_until(socket, "error")["error"]
            assert (error["param"], error["event_id"]) == (param, f"event {number}"), error
            assert error["type"] == "invalid_request_error"
        send(socket, "session.update", session=sound(transcription={"model": "nothing"})["session"])
        assert receive_until(socket, "error")["error"]["code"] == "model_not_found"
        send(socket, "session.update", session=MANUAL)
        receive_until(socket, "session.updated")
        append(socket, speech)
        send(socket, "input_audio_buffer.commit")
        assert receive_until(socket, f"{TRANSCRIPTION}.completed")["transcript"]
        socket.send("no JSON")
        assert receive_until(socket, "error")


def test_a_wrong_key_is_told_why_and_closed(product: Product) -> None:
    with connect(product, "sk-quire-wrong") as socket:
        assert receive_until(socket, "error")["error"]["code"] == "invalid_api_key"
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=60)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 4401


@pytest.mark.slow
def test_an_engine_that_is_killed_changes_no_word(product: Product, speech: bytes) -> None:
    with connect(product) as socket:
        send(socket, "session.update", session=MANUAL)
        append(socket, speech)
        (pid,) = product_pids(product, "engine.serving")
        send(socket, "input_audio_buffer.commit")
        receive_until(socket, "input_audio_buffer.committed")
        os.kill(pid, signal.SIGKILL)
        done = receive_until(socket, f"{TRANSCRIPTION}.completed")
    assert words(done["transcript"]) == words(JFK_TEXT)
    wait_until(lambda: product_pids(product, "engine.serving") not in ([], [pid]))


@pytest.mark.parametrize("count", [10, pytest.param(1_000, marks=pytest.mark.slow)])
def test_sockets_that_are_cut_anywhere_leave_nothing(
    product: Product, speech: bytes, count: int
) -> None:
    numbers = random.Random(count)
    for _ in range(count):
        socket = connect(product)
        if numbers.random() < 0.5:
            send(socket, "session.update", session=MANUAL)
        for _ in range(numbers.randrange(3)):
            append(socket, speech[: 2 * numbers.randrange(RATE * 2)])
            if numbers.random() < 0.7:
                send(socket, "input_audio_buffer.commit")
        if numbers.random() < 0.3:
            receive_until(socket, "session.created")
        if numbers.random() < 0.5:
            socket.socket.shutdown(SHUT_RDWR)  # without a closing frame, as a lost connection
        else:
            socket.close()
    # All three are shown once the engine is back.
    wait_until(lambda: [*_running(product).values()] == [0, 0, 0])
    with connect(product) as socket:  # and the next one is served
        send(socket, "session.update", session=MANUAL)
        append(socket, speech)
        send(socket, "input_audio_buffer.commit")
        done = receive_until(socket, f"{TRANSCRIPTION}.completed")
    assert words(done["transcript"]) == words(JFK_TEXT)


def test_the_playground_writes_what_the_microphone_hears(product: Product, tmp_path: Path) -> None:
    """Live text, a player whose lines are sought by a click, subtitles; then a dropped file."""
    spoken = tmp_path / "spoken.wav"
    spoken.write_bytes(wav(np.concatenate([read_wav(JFK)[0][: 5 * 16_000], np.zeros(32_000)])))
    flags = [
        *FLAGS,
        "--use-fake-ui-for-media-stream",
        "--use-fake-device-for-media-stream",
        f"--use-file-for-fake-audio-capture={spoken}%noloop",
        "--autoplay-policy=no-user-gesture-required",
    ]
    with sync_playwright() as playwright, _chromium(playwright, flags) as browser:
        page = browser.new_page()
        page.set_default_timeout(60_000)
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(f"{product.url}/login/")
        page.get_by_label("Username or email address").fill(product.admin_user)
        page.get_by_label("Password").fill(product.admin_password)
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url(f"{product.url}/")
        page.goto(f"{product.url}/console/playground/speech/")
        lines, texts = page.locator("#speech-lines .line"), page.locator(".line-text")
        page.evaluate(RECORD_LEVELS)
        page.get_by_role("button", name="Record").click()
        wait_until(lambda: page.evaluate("loudest") > 0.3)
        expect(texts.first).to_contain_text("fellow")  # while it records
        expect(texts.nth(1)).to_contain_text(re.compile("not", re.IGNORECASE))
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#speech-player")).to_be_visible()
        assert words(" ".join(texts.all_text_contents()))[:4] == words(JFK_TEXT)[:4]
        wait_until(lambda: (page.evaluate(f"{PLAYER}.duration") or 0) > 4)  # NaN until it's read
        lines.last.click()
        expect(lines.last).to_have_attribute("aria-current", "true")
        wait_until(lambda: page.evaluate(f"{PLAYER}.played.length"))
        assert page.evaluate(f"{PLAYER}.currentTime") > 2
        with page.expect_download() as download:
            page.get_by_role("button", name="Save subtitles").click()
        subtitles = download.value.path().read_text()
        assert subtitles.startswith("WEBVTT\n\n00:00:0")
        page.evaluate(DROP, base64.b64encode(JFK.read_bytes()).decode())
        expect(page.locator("#result-figures")).to_contain_text("11 s of sound")
        assert words(" ".join(texts.all_text_contents())) == words(JFK_TEXT)
        page.evaluate(DROP, base64.b64encode(b"no sound").decode())
        expect(page.locator("#run-state")).to_contain_text("sound")
        expect(page.locator("#result")).to_be_hidden()
        assert problems == []


def test_a_page_of_another_site_opens_no_session(product: Product) -> None:
    with httpx.Client(base_url=product.url, timeout=60) as client:
        client.get("/login/")
        [csrf_token] = client.cookies.values()
        form = {
            "login": product.admin_user,
            "password": product.admin_password,
            "csrfmiddlewaretoken": csrf_token,
        }
        assert client.post("/login/", data=form, headers={"Referer": product.url}).is_redirect
        cookies = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
    url = product.base_url.replace("http", "ws", 1) + "/realtime?model=whisper"
    for origin, kind in ((product.url, "session.created"), ("https://example.org", "error")):
        headers = {"Cookie": cookies, "Origin": origin}
        with websocket_client.connect(url, additional_headers=headers, **PATIENCE) as socket:
            assert json.loads(socket.recv(timeout=60))["type"] == kind
    with websocket_client.connect(
        url + "&tenant=nobodys", additional_headers={"Cookie": cookies, "Origin": product.url}
    ) as socket:
        assert json.loads(socket.recv(timeout=60))["error"]["type"] == "permission_error"


PLAYER = "document.getElementById('speech-player')"
#: The level is seen for a tenth of a second, and the spoken seconds may be over when one looks.
RECORD_LEVELS = """() => {
  const meter = document.getElementById("speech-level");
  window.loudest = 0;
  const note = () => (window.loudest = Math.max(window.loudest, meter.value));
  new MutationObserver(note).observe(meter, {attributes: true});
}"""
#: Drops a file on a page.
DROP = """(data) => {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], "speech.wav", {type: "audio/wav"}));
  dispatchEvent(new DragEvent("drop", {dataTransfer: transfer, bubbles: true}));
}"""


@contextmanager
def _chromium(playwright: Playwright, flags: list[str]) -> Iterator[Browser]:
    if not Path(CHROMIUM).exists():
        pytest.skip(f"{CHROMIUM} is missing.")
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
    yield browser
    browser.close()


def _running(product: Product) -> dict[str, float]:
    """Open sockets, and requests that an engine has."""
    headers = {"Authorization": f"Bearer {METRICS_TOKEN}"}
    answer = httpx.get(f"{product.url}/metrics", headers=headers, timeout=60).raise_for_status()
    names = (
        "vllm:websocket_connections_active",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
    )
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.text):
        if family.name in names:
            totals[family.name] = sum(sample.value for sample in family.samples)
    return totals
