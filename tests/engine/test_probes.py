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
from prometheus_client.parser import text_string_to_metric_families

from engine.contract.errors import ConfigError
from engine.contract.lora import AdapterStatus
from engine.contract.messages import (
    DEAD_AFTER_S,
    EXIT_CONFIG,
    STALL_TIMEOUT_S,
    EngineStats,
    Heartbeat,
    ModelInfo,
)
from engine.serving.probes import ProbeServer, ReplicaProgress
from engine.serving.replica_metrics import exposition
from engine.serving.service import _check_endpoint
from tests.engine.replica import Gateway, replica
from tests.waiting import free_port

BEAT = Heartbeat(
    replica_id="r-0",
    incarnation="1",
    state="ready",
    model=ModelInfo(
        name="m",
        path="",
        max_model_len=10,
        vocab_size=10,
        dtype="float32",
        cache_config={"block_size": "16", "num_gpu_blocks": "64"},
    ),
    at=1000.0,
    progress_at=1000.0,
    stats=EngineStats(
        num_requests_running=2, num_requests_waiting=3, kv_cache_usage_perc=0.25, adapter_slots=4
    ),
    adapters=[
        AdapterStatus(digest="1" * 64, name="b", num_running=1, num_waiting=1),
        AdapterStatus(digest="2" * 64, name="a", num_running=1),
    ],
)


@contextmanager
def probes(state: str, stalled_s: float = 0.0) -> Iterator[int]:
    server = ProbeServer(
        0, lambda: ReplicaProgress(state, time.time() - stalled_s), lambda: exposition(BEAT)
    )
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
        assert ask(port, "/health")[0] == 404


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
        ProbeServer(port, lambda: ReplicaProgress("ready", time.time()), bytes)
    assert raised.value.param == "health_port"
    with pytest.raises(ConfigError, match="health_port=70000"):
        ProbeServer(70000, lambda: ReplicaProgress("ready", time.time()), bytes)


def test_metrics_are_those_that_the_inference_extension_reads_of_a_model_server() -> None:
    with probes("ready") as port:
        status, body = ask(port, "/metrics")
    assert status == 200
    samples = {
        sample.name: sample
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }
    values = {
        "vllm:num_requests_waiting": 3,
        "vllm:num_requests_running": 2,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:cache_config_info": 1,
        "vllm:lora_requests_info": 1000,
    }
    assert {name: sample.value for name, sample in samples.items()} == values
    for sample in samples.values():
        assert sample.labels.items() >= {"model_name": "m", "engine": "r-0"}.items()
    labels = samples["vllm:cache_config_info"].labels
    assert (labels["block_size"], labels["num_gpu_blocks"]) == ("16", "64")
    labels = samples["vllm:lora_requests_info"].labels
    assert labels["max_lora"] == "4"
    assert labels["running_lora_adapters"] == "a,b"
    assert labels["waiting_lora_adapters"] == "b"


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [("10.0.0.1:8000", "10.0.0.1:8000"), ("fd00::1:8000", "[fd00::1]:8000"), ("", "")],
)
def test_an_endpoint_is_an_address_with_a_port(endpoint: str, expected: str) -> None:
    assert _check_endpoint(endpoint) == expected


@pytest.mark.parametrize("endpoint", ["10.0.0.1", ":8000", "host:http", "host:0", "host:65536"])
def test_an_endpoint_without_a_port_is_refused_by_name(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="endpoint must be HOST:PORT") as raised:
        _check_endpoint(endpoint)
    assert raised.value.param == "endpoint"


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
        assert process.wait(60) == 0
    with pytest.raises(OSError):
        ask(port, "/live")
