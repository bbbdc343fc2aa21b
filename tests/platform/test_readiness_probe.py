"""`up` and `serve` are ready once their model answers, whatever its task."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from config.up.processes import ReadinessProbe

#: Answers by path; others are 404.
answers: dict[str, int] = {}
asked: list[str] = []


class Gateway(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "m"
        asked.append(self.path)
        self.send_response(answers.get(self.path, 404))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@pytest.fixture
def url() -> Iterator[str]:
    answers.clear()
    asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "statuses",
    [
        {"/v1/completions": 200},
        {"/v1/completions": 400, "/pooling": 200},
        {"/v1/completions": 400, "/pooling": 400, "/score": 200},
        {"/v1/completions": 400, "/pooling": 400, "/score": 400},
    ],
    ids=["generates", "pools", "scores", "something else"],
)
def test_a_model_of_any_task_is_ready_once_it_answers(url: str, statuses: dict[str, int]) -> None:
    answers.update(statuses)
    probe = ReadinessProbe(url, "key", "m")
    probe.start()
    assert probe.ready.wait(60)
    assert asked == list(statuses)


def test_a_model_that_no_replica_serves_yet_is_asked_again(url: str) -> None:
    answers["/v1/completions"] = 503
    probe = ReadinessProbe(url, "key", "m")
    probe.start()
    while len(asked) < 3:
        assert not probe.ready.is_set()
    answers["/v1/completions"] = 200
    assert probe.ready.wait(60)
    assert set(asked) == {"/v1/completions"}
