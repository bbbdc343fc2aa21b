"""`manage.py bench`: what it refuses, and how it says so, before minutes of measuring."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from benchmarks import http_load
from benchmarks.ceilings import Ceilings
from benchmarks.http_load import Sample
from config.management.commands.bench import Command
from engine.text.tokenizer import load_tokenizer

KEY = "secret"
DEMO = Path(__file__).resolve().parents[2] / "demo" / "model"


class Handler(BaseHTTPRequestHandler):
    """One model; two tokens for each prompt, to whoever has the key, after `full` refusals."""

    full = 0

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def _allowed(self) -> bool:
        if self.headers["Authorization"] == f"Bearer {KEY}":
            return True
        self._answer(401, json.dumps({"error": {"message": "No such key."}}))
        return False

    def _answer(self, status: int, body: str, later: int | None = None) -> None:
        self.send_response(status)
        if later is not None:
            self.send_header("Retry-After", str(later))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self) -> None:
        if self._allowed():
            self._answer(200, json.dumps({"data": [{"id": "tiny"}, {"id": "other"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._allowed():
            return
        if self.full:
            type(self).full -= 1
            self._answer(503, json.dumps({"error": {"message": "Full."}}), later=1)
            return
        assert body["model"] == "tiny"
        texts = [{"choices": [{"text": text}]} for text in ("a", "b")]
        usage = {"choices": [], "usage": {"completion_tokens": 2}}
        lines = [f"data: {json.dumps(event)}\n\n" for event in (*texts, usage)]
        self._answer(200, "".join(lines) + "data: [DONE]\n\n")


@pytest.fixture
def server() -> Iterator[str]:
    """Its address."""
    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{listening.server_port}"
    listening.shutdown()
    thread.join()
    listening.server_close()


def bench(*args: str) -> str:
    out = StringIO()
    call_command("bench", *args, stdout=out, stderr=out)
    return out.getvalue()


def test_serve_asks_the_server_for_its_model(server: str, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    printed = bench(
        *("serve", "--base-url", server, "--api-key", KEY, "--max-concurrency", "2"),
        *("--num-prompts", "3", "--random-input-len", "4-6", "--seed", "1"),
        *("--output-json", str(out)),
    )
    row = json.loads(out.read_text())
    assert (row["model"], row["concurrency"]) == ("tiny", 2)
    assert (row["completed"], row["failed"], row["output_tokens"]) == (3, 0, 6)
    assert 12 <= row["prompt_tokens"] <= 18
    for name in ("ttft", "itl", "tpot", "e2e"):
        assert row[f"{name}_p50_ms"] <= row[f"{name}_p99_ms"]
        assert f"{name}_p99_ms" in printed


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_shows_how_many_requests_are_finished(
    server: str,
    is_terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    bench("serve", "--url", server, "--api-key", KEY, "--num-prompts", "4", "--concurrency", "2")
    drawn = capsys.readouterr().err
    assert (f"Requests [{'#' * 15}{'.' * 15}]  50%" in drawn) == is_terminal
    assert drawn.endswith("\r\x1b[K") == is_terminal
    assert ("Requests: 50%\n" in drawn) != is_terminal


def test_an_open_loop_of_any_rate(server: str) -> None:
    printed = bench(
        *("serve", "--url", server, "--api-key", KEY, "--model", "tiny", "--num-prompts", "2"),
        *("--request-rate", "inf", "--input-len", "4"),
    )
    assert "request_rate" in printed
    assert "inf" in printed


def test_a_full_server_is_asked_again_when_it_says(
    server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Handler, "full", 1)
    out = tmp_path / "figures.json"
    ask = ["serve", "--url", server, "--api-key", KEY, "--model", "tiny", "--num-prompts", "1"]
    bench(*ask, "--concurrency", "1", "--retry", "--json", str(out))
    row = json.loads(out.read_text())
    assert (row["completed"], row["failed"], row["refused"]) == (1, 0, 1)
    assert row["retry_after_p50_ms"] == 1000
    monkeypatch.setattr(Handler, "full", 1)
    with pytest.raises(CommandError, match="All requests failed: The server answered 503"):
        bench(*ask, "--concurrency", "1")


def test_a_wrong_key_is_told_with_a_hint(server: str) -> None:
    with pytest.raises(
        CommandError, match=r"answered 401 Unauthorized: No such key\. Give --api-key"
    ):
        bench("serve", "--url", server, "--api-key", "wrong")
    with pytest.raises(CommandError, match="All requests failed: The server answered 401"):
        bench("serve", "--url", server, "--model", "tiny", "--num-prompts", "1")


def test_nobody_there_is_told_with_the_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(CommandError, match=f"No server answers at {url} .*manage.py up"):
            bench("serve", "--url", url)


@pytest.mark.system
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["latency", "--batch-size", "0"], "--batch-size: must be a whole number of at least 1"),
        (["latency", "--output-len", "1"], "--output-len: must be a whole number of at least 2"),
        (["throughput", "--num-prompts", "x"], "must be a whole number of at least 1, got 'x'"),
        (["throughput", "--input-len", "9-3"], "must be N or LOW-HIGH, rising from at least 1"),
        (["serve", "--concurrency", "1,0"], "must be a whole number of at least 1, got '0'"),
        (["serve", "--request-rate", "-1"], "must be a number above 0, or inf, got '-1'"),
        (["serve", "--url", "localhost:8000"], "--url must be an http:// or https:// address"),
        (["latency", "--json", "/nowhere/x"], "/nowhere/x can't be written: No such file"),
        (["latency", "--model", "/nowhere"], "/nowhere"),
        (["latency", "--dtype", "float8"], "--dtype: invalid choice: 'float8'"),
        (["speed"], "invalid choice: 'speed'"),
    ],
)
def test_what_is_refused_is_refused_before_anything_runs(args: list[str], message: str) -> None:
    with pytest.raises(CommandError) as refused:
        bench(*args)
    assert message in str(refused.value)


def test_a_server_without_models_is_told(monkeypatch: pytest.MonkeyPatch, server: str) -> None:
    monkeypatch.setattr(Handler, "do_GET", lambda self: self._answer(200, '{"data": []}'))
    with pytest.raises(CommandError, match="lists no model at /v1/models: give --model"):
        bench("serve", "--url", server)


def test_time_for_each_token_after_the_first() -> None:
    assert Sample(ttft=1.0, gaps=[0.2, 0.4], tokens=4, total=1.6).tpot == pytest.approx(0.2)


def test_a_failure_halfway_is_counted(monkeypatch: pytest.MonkeyPatch, server: str) -> None:
    async def broken(*args: object) -> Sample:
        raise asyncio.IncompleteReadError(b"", 3)

    monkeypatch.setattr(http_load, "_request", broken)
    with pytest.raises(CommandError, match="All requests failed: IncompleteReadError"):
        bench("serve", "--url", server, "--model", "tiny", "--num-prompts", "2", "--api-key", KEY)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's limits, not measured."""
    monkeypatch.setattr("benchmarks.ceilings.measure", lambda: Ceilings(1e10, 1e11))


ENGINE = ("--num-gpu-blocks-override", "64", "--num-threads", "1", "--max-model-len", "128")


@pytest.mark.parametrize(
    ("args", "rate", "percent"),
    [
        (
            ("latency", "--input-len", "4", "--output-len", "3", "--repeats", "1"),
            "decode_tok_s",
            "decode_bandwidth_percent",
        ),
        (
            ("throughput", "--num-prompts", "2", "--input-len", "4-8", "--output-len", "3"),
            "output_tok_s",
            "sgemm_percent",
        ),
    ],
)
def test_figures_come_with_their_limit_and_percentiles(
    args: tuple[str, ...],
    rate: str,
    percent: str,
    quick: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: args[0] == "latency")
    out = tmp_path / "figures.json"
    printed = bench(*args, *ENGINE, "--json", str(out))
    drawn = capsys.readouterr().err
    if args[0] == "latency":  # a bar: one batch to warm up, one that counts
        assert f"Batches [{'#' * 15}{'.' * 15}]  50%" in drawn
        assert f"[{'#' * 30}] 100%" in drawn
    else:
        assert [line for line in drawn.splitlines() if line.startswith("Tokens: ")][-1:] == [
            "Tokens: 100%"
        ]
    row = json.loads(out.read_text())
    assert row["benchmark"] == args[0]
    assert row[rate] > 0
    assert row[percent] > 0
    for name in ("ttft", "itl"):
        assert 0 < row[f"{name}_p50_ms"] <= row[f"{name}_p99_ms"]
        assert f"{name}_p99_ms" in printed


def conversation(*texts: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": text} for text in texts]}


def test_prompts_and_lengths_of_output_are_a_datasets(quick: None, tmp_path: Path) -> None:
    dataset, out = tmp_path / "sharegpt.json", tmp_path / "figures.json"
    question, reply = "Tell me where the river begins.", "It begins in the mountains."
    usable = conversation(question, reply, "And where does it end?")
    too_long = conversation(question, "far away " * 200)
    conversations = [conversation(question), conversation("a", "b"), too_long, usable]
    dataset.write_text(json.dumps(conversations))
    bench("throughput", "--dataset", str(dataset), *ENGINE, "--json", str(out))
    row, encode = json.loads(out.read_text()), load_tokenizer(str(DEMO)).encode
    assert row["requests"] == 1
    assert row["prompt_tokens"] == len(encode(question))
    assert row["output_tokens"] == len(encode(reply))


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        (None, (), "can't be read: No such file"),
        ("{", (), "isn't JSON"),
        ('{"a": 1}', (), 'must be a list of {"conversations"'),
        ('[{"conversations": [{"value": 1}, {"value": "b"}]}]', (), 'must be a list of {"conver'),
        ('[{"conversations": [{"value": "a"}]}]', (), "No conversation of the dataset fits"),
        ("[]", ("--output-len", "4"), "leave --input-len and --output-len out"),
    ],
)
def test_a_dataset_that_cant_be_used_is_refused(
    text: str | None, flags: tuple[str, ...], message: str, quick: None, tmp_path: Path
) -> None:
    dataset = tmp_path / "sharegpt.json"
    if text is not None:
        dataset.write_text(text)
    with pytest.raises(CommandError) as refused:
        bench("throughput", "--dataset", str(dataset), *flags, *ENGINE)
    assert message in str(refused.value)


@pytest.mark.parametrize("form", ["latency", "throughput"])
def test_lengths_beyond_the_context_are_told_with_their_flags(form: str, quick: None) -> None:
    lengths = ("--input-len", "100", "--output-len", "29")
    with pytest.raises(
        CommandError, match=r"outputs of 29 tokens \(--input-len, --output-len\) .* context of 128"
    ):
        bench(form, *lengths, *ENGINE)


def test_engine_settings_may_come_from_a_file(tmp_path: Path, capsys: Any) -> None:
    """The context that the file gives is too short for what is measured by default."""
    file = tmp_path / "engine.yaml"
    file.write_text("max_model_len: 64\n")
    words = ["manage.py", "bench", "latency", "--model", str(DEMO), "--config"]
    with pytest.raises(SystemExit):
        Command().run_from_argv([*words, str(file)])
    assert "don't fit the model's context of 64" in capsys.readouterr().err
    with pytest.raises(SystemExit) as finished_error:
        Command().run_from_argv([*words, str(tmp_path / "none.yaml")])
    assert finished_error.value.code == 2
    assert "none.yaml can't be read" in capsys.readouterr().err
