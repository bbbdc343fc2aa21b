"""`manage.py run_batch`: a file of requests, with and without a server."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.core.management import CommandError, call_command

from common.commands import ProgressBar
from config.batch_client import BatchClient, NoServer, private_server
from config.management.commands.run_batch import Command, _counted
from tests.inference.batches.conftest import as_lines, request_line
from tests.platform.instance import manage, tiny_model_folder


def run(folder: Path, lines: bytes, *words: str, check: bool = True) -> Any:
    (folder / "in.jsonl").write_bytes(lines)
    files = ("-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"))
    return manage(folder / "data", "run_batch", *files, *words, check=check)


@pytest.mark.system
def test_without_a_server_one_is_started_for_as_long_as_it_takes(short_tmp: Path) -> None:
    folder = short_tmp / "run_batch"
    folder.mkdir()
    model = tiny_model_folder(folder / "model")
    (folder / "engine.yaml").write_text("seed: 3\n")
    lines = as_lines(
        [
            *(request_line(number, body={"model": "m"}) for number in range(5)),
            request_line(5, body={"model": "m", "max_tokens": 0}),
            request_line(6) | {"url": "/metrics"},
            request_line(7) | {"custom_id": 7},
        ]
    ) + b"{\n\n"  # fmt: skip
    settings = ("--config", str(folder / "engine.yaml"), "--max_model_len", "256")
    done = run(folder, lines, "--model", str(model), "--served-model-name", "m", *settings)
    assert "5 completed, 4 failed" in done.stderr
    assert "Requests sent: 100%\n" in done.stderr
    results = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    by_id = {result["custom_id"]: result for result in results}
    assert len(results) == 9
    for number in range(5):
        response = by_id[f"r{number}"]["response"]
        assert response["status_code"] == 200
        assert response["body"]["usage"]["completion_tokens"] == 5
    assert by_id["r5"]["response"]["body"]["error"]["param"] == "max_tokens"
    assert (by_id["r6"]["response"], by_id["r6"]["error"]["message"][:3]) == (None, "url")
    assert not list(folder.glob(".*partial"))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--url", "http://127.0.0.1:9"), "can't be reached"),
        (("--url", "http://x", "--model", "m"), "can't be used together"),
        (("--concurrency", "0"), "--concurrency must be in"),
    ],
)
def test_what_can_not_work_is_said_and_leaves_no_file(
    tmp_path: Path, words: tuple[str, ...], text: str
) -> None:
    (tmp_path / "in.jsonl").write_bytes(as_lines([request_line(1)]))
    files = ("-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"))
    with pytest.raises(CommandError, match=text):
        call_command("run_batch", *files, *words)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.system
def test_without_an_instance_it_ends_with_one_line(tmp_path: Path) -> None:
    failed = run(tmp_path, as_lines([request_line(1)]), check=False)
    assert failed.returncode == 1
    assert "No instance runs" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_settings_that_cant_be_read_are_a_mistake_of_the_command_line(capsys: Any) -> None:
    words = ["-i", "in.jsonl", "-o", "out.jsonl", "--config", "nowhere.yaml"]
    with pytest.raises(SystemExit) as finished_error:
        Command().run_from_argv(["manage.py", "run_batch", *words])
    assert finished_error.value.code == 2
    assert "run_batch: --config nowhere.yaml can't be read" in capsys.readouterr().err


async def test_what_a_proxy_says_instead_is_an_error() -> None:
    def proxy(_: httpx.Request) -> httpx.Response:
        return httpx.Response(502, text="<html>Bad gateway</html>")

    client = BatchClient("http://server", "key", 1)
    client._client = httpx.AsyncClient(transport=httpx.MockTransport(proxy), base_url="http://x")
    output = io.StringIO()
    totals = await client.run([as_lines([request_line(1)])], output)
    response = json.loads(output.getvalue())["response"]
    assert (totals.failed, response["status_code"]) == (1, 502)
    assert response["body"]["error"]["message"] == "<html>Bad gateway</html>"


@pytest.mark.system
def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(NoServer, match="nonsense"), private_server(["--nonsense"]):
        pytest.fail("it started")


def test_requests_may_come_from_a_pipe() -> None:
    end, start = os.pipe()
    os.write(start, b"1\n2\n")
    os.close(start)
    with os.fdopen(end, "rb") as lines, ProgressBar("Requests sent") as bar:
        assert list(_counted(lines, bar)) == [b"1\n", b"2\n"]
