"""A real worker process: SIGKILL in the middle of a batch, SIGTERM, the sweep."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
import redis

from tests.inference import live
from tests.inference.batches.conftest import as_lines, request_line
from tests.platform.instance import internal

pytestmark = pytest.mark.system

WORKER = [sys.executable, "manage.py", "worker"]
END = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(scope="module")
def client(short_tmp: Path) -> Iterator[tuple[openai.OpenAI, live.Instance]]:
    """An installation with a fake replica and a gateway, without a worker."""
    folder = short_tmp / "worker"
    folder.mkdir()
    with live.instance(folder) as of:
        of.environment |= internal(lease_seconds=1, sweep_seconds=1)
        flags = ("--token-delay", "0.02", "--low", "10", "--high", "90", "--vocab-size", "512")
        with (
            live.replica(of, "tests.fakes.fake_replica", *flags),
            live.gateway(of, "uvicorn") as (port, _),
        ):
            url = f"http://127.0.0.1:{port}/v1"
            with openai.OpenAI(base_url=url, api_key=of.key, max_retries=0) as client:
                yield client, of


class Workers:
    """One worker at a time, which a test leaves to the next: to start one takes seconds."""

    def __init__(self, environment: dict[str, str], stack: ExitStack) -> None:
        self._environment, self._stack = environment, stack
        self._running: subprocess.Popen[bytes] | None = None

    def running(self) -> subprocess.Popen[bytes]:
        """The one that is there, or else a new one."""
        if self._running is None or self._running.poll() is not None:
            self._running = self._stack.enter_context(live.process(WORKER, self._environment))
        return self._running


@pytest.fixture(scope="module")
def workers(client: tuple[openai.OpenAI, live.Instance]) -> Iterator[Workers]:
    """Of that installation."""
    with ExitStack() as stack:
        yield Workers(client[1].environment, stack)


def make(client: openai.OpenAI, count: int, **body: Any) -> openai.types.Batch:
    body = {"model": "m", "max_tokens": 20, **body}
    data = as_lines([request_line(number, body=body) for number in range(count)])
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )


def wait(client: openai.OpenAI, batch_id: str, done: int | None = None) -> openai.types.Batch:
    """Until so many requests are done, or until the batch has ended."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        batch = client.batches.retrieve(batch_id)
        if batch.status in END or (done is not None and batch.request_counts.completed >= done):
            return batch
        time.sleep(0.05)
    pytest.fail(f"waited in vain: {batch}")


def test_a_killed_worker_loses_and_repeats_nothing(
    client: tuple[openai.OpenAI, live.Instance], workers: Workers
) -> None:
    sdk, _ = client
    batch = make(sdk, 40)
    stream = sdk.responses.create(
        model="m", input="x", background=True, stream=True, max_output_tokens=250
    )
    first = workers.running()
    events = [next(stream) for _ in range(8)]  # some of its text is told
    partly = wait(sdk, batch.id, done=8)
    assert partly.status == "in_progress"
    first.send_signal(signal.SIGKILL)
    first.wait(60)
    workers.running()
    done = wait(sdk, batch.id)
    events += list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    reported = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert events[-1].type == "response.incomplete"
    assert reported == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens == len(reported) == 250
    assert done.status == "completed"
    assert done.request_counts.model_dump() == {"total": 40, "completed": 40, "failed": 0}
    text = sdk.files.content(done.output_file_id).text
    answers = [json.loads(line) for line in text.splitlines()]
    assert sorted(a["custom_id"] for a in answers) == sorted(f"r{n}" for n in range(40))
    assert all(a["response"]["body"]["usage"]["completion_tokens"] == 20 for a in answers)


def test_a_worker_that_is_told_to_end_gives_its_work_back(
    client: tuple[openai.OpenAI, live.Instance], workers: Workers
) -> None:
    sdk, _ = client
    first = workers.running()
    batch = make(sdk, 64, max_tokens=60)
    wait(sdk, batch.id, done=1)
    first.send_signal(signal.SIGTERM)
    assert first.wait(120) == 0
    partly = sdk.batches.retrieve(batch.id)
    assert partly.status == "in_progress"
    workers.running()
    assert wait(sdk, batch.id).request_counts.completed == 64


def test_fault_47_a_worker_outlives_a_redis_that_takes_no_writes(
    client: tuple[openai.OpenAI, live.Instance], workers: Workers
) -> None:
    """The last test here: the fake replica, unlike a real one, ends at the first refusal."""
    sdk, of = client
    worker = workers.running()
    assert wait(sdk, make(sdk, 4).id).request_counts.completed == 4
    with redis.Redis.from_url(of.redis_url) as server:
        server.execute_command("REPLICAOF", "127.0.0.1", "1")
        time.sleep(1)
        server.execute_command("REPLICAOF", "NO", "ONE")
    with live.replica(of, "tests.fakes.fake_replica"):
        assert wait(sdk, make(sdk, 4).id).request_counts.completed == 4
        assert worker.poll() is None
