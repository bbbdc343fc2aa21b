"""A replica's `/live` and `/ready`, as a kubelet asks."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.contract.errors import ConfigError
from engine.contract.messages import DEAD_AFTER_S, EXIT_CONFIG, STALL_TIMEOUT_S
from engine.serving.probes import ProbeServer, ReplicaProgress
from tests.engine.replica import Gateway, replica


@contextmanager
def probes(state: str, stalled_s: float = 0.0) -> Iterator[int]:
    server = ProbeServer(0, lambda: ReplicaProgress(state, time.time() - stalled_s))
    server.start()
    try:
        yield server.port
    finally:
        server.stop()


def ask(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("state", "stalled_s", "live", "ready"),
    [
        ("loading", 0, 200, 503),
        ("loading", 10 * DEAD_AFTER_S, 200, 503),
        ("ready", 0, 200, 200),
        ("ready", STALL_TIMEOUT_S + 1, 200, 503),
        ("ready", DEAD_AFTER_S + 1, 503, 503),
        ("sleeping", 0, 200, 200),
        ("draining", 0, 200, 503),
        ("draining", DEAD_AFTER_S + 1, 503, 503),
        ("failed", 0, 200, 503),
    ],
)
def test_live_and_ready_say_what_the_state_and_the_last_progress_mean(
    state: str, stalled_s: float, live: int, ready: int
) -> None:
    with probes(state, stalled_s) as port:
        assert (ask(port, "/live")[0], ask(port, "/ready")[0]) == (live, ready)
        assert json.loads(ask(port, "/ready")[1])["state"] == state
        assert ask(port, "/metrics")[0] == 404


def test_a_connection_that_says_nothing_keeps_no_probe_waiting() -> None:
    with (
        probes("ready") as port,
        socket.create_connection(("127.0.0.1", port)) as silent,
    ):
        silent.sendall(b"GET /live")
        started = time.monotonic()
        assert ask(port, "/live")[0] == 200
        assert time.monotonic() - started < 4


def test_a_port_that_is_taken_is_refused_by_name() -> None:
    with probes("ready") as port, pytest.raises(ConfigError, match=f"health_port={port}") as raised:
        ProbeServer(port, lambda: ReplicaProgress("ready", time.time()))
    assert raised.value.param == "health_port"
    with pytest.raises(ConfigError, match="health_port=70000"):
        ProbeServer(70000, lambda: ReplicaProgress("ready", time.time()))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.service
def test_a_replica_answers_probes_from_its_start_until_it_ends(
    redis_url: str, model_folder: Callable[[str], Path]
) -> None:
    prefix, port = f"probes{time.time_ns()}", free_port()
    model = model_folder("llama")
    with replica(redis_url, prefix, model, "--health-port", str(port)) as process:
        Gateway(redis_url, prefix).await_state("ready")
        assert ask(port, "/ready")[0] == 200
        with replica(
            redis_url, prefix, model, "--health-port", str(port), replica_id="r2"
        ) as second:
            assert second.wait(60) == EXIT_CONFIG
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    with pytest.raises(OSError):
        ask(port, "/live")
