"""A real replica process, and a gateway's side of the protocol to talk to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from engine.contract import messages as protocol
from engine.contract import redis_keys
from engine.contract.messages import (
    AbortRequest,
    ControlReply,
    ControlRequest,
    EngineRequest,
    Heartbeat,
    InboxMessage,
    TokenDelta,
)

ROOT = Path(__file__).resolve().parents[2]


class Gateway:
    """Sends messages to one replica and collects what comes back."""

    def __init__(self, url: str, prefix: str, replica_id: str = "r1") -> None:
        self.redis = redis.Redis.from_url(url)
        self.prefix, self.replica_id = prefix, replica_id
        self.deltas: dict[str, list[TokenDelta]] = {}
        self.replies: dict[str, ControlReply] = {}
        self.steps: list[int] = []
        self._last = "0"

    def send(self, message: InboxMessage) -> bytes:
        """XADD to the inbox; returns the entry id."""
        key = redis_keys.inbox_key(self.replica_id, self.prefix)
        return self.redis.xadd(key, {protocol.STREAM_FIELD: protocol.encode(message)})

    def request(self, request_id: str, prompt: list[int], **sampling: object) -> bytes:
        """Send a request of this gateway."""
        fields = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, **sampling}
        params = protocol.SamplingParams(**fields)  # type: ignore[arg-type]
        return self.send(
            EngineRequest(
                request_id=request_id, gateway_id="g1", prompt_token_ids=prompt, sampling=params
            )
        )

    def hold(self, name: str, prompt: list[int], **sampling: object) -> str:
        """Send a request that gets its first tokens and then stands still until `resume`: its id.

        A quick replica may end it before the pause has come; then it's tried once more.
        """
        for attempt in range(20):
            request_id = f"{name}{attempt}"
            self.request(request_id, prompt, max_tokens=240, **sampling)
            self.wait(lambda request_id=request_id: bool(self.tokens(request_id)))
            self.control("pause", mode="keep")
            self.read(block_ms=1)
            if not self.is_finished(request_id):
                return request_id
            self.control("resume")
        raise TimeoutError(f"{name} ended before each of 20 pauses.")

    def abort(self, request_id: str) -> None:
        """Abort a request."""
        self.send(AbortRequest(request_id=request_id))

    def control(self, command: str, **details: Any) -> ControlReply:
        """Send a command and wait for the reply."""
        control_id = f"{command}-{time.time()}"
        self.send(
            ControlRequest(command=command, control_id=control_id, gateway_id="g1", **details)
        )
        self.wait(lambda: control_id in self.replies)
        return self.replies[control_id]

    def read(self, block_ms: int = 100) -> None:
        """Take over what the outbox holds."""
        key = redis_keys.outbox_key("g1", self.prefix)
        messages = self.redis.xread({key: self._last}, block=block_ms)
        for _, entries in messages or []:
            for entry_id, fields in entries:
                self._last = entry_id
                batch = protocol.decode_outbox(fields[protocol.STREAM_FIELD])
                self.steps.append(batch.step)
                for delta in batch.deltas:
                    self.deltas.setdefault(delta.request_id, []).append(delta)
                for reply in batch.replies:
                    self.replies[reply.control_id] = reply

    def wait(self, done: Callable[[], bool], timeout: float = 30.0) -> None:
        """Read until `done()`; fails after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"Nothing for {timeout} s; have {list(self.deltas)}")
            self.read()

    def finish(self, *request_ids: str, timeout: float = 30.0) -> None:
        """Read until these requests (of one output each) have ended."""
        self.wait(lambda: all(self.is_finished(r) for r in request_ids), timeout)

    def is_finished(self, request_id: str) -> bool:
        """Whether the request's final delta has come."""
        deltas = self.deltas.get(request_id, [])
        return bool(deltas) and deltas[-1].finish_reason is not None

    def tokens(self, request_id: str) -> list[int]:
        """All tokens of output 0 so far; what a former incarnation had sent already is dropped."""
        token_ids: list[int] = []
        for delta in self.deltas.get(request_id, []):
            if delta.index == 0:
                token_ids += delta.token_ids[max(0, len(token_ids) - delta.start) :]
        return token_ids

    def heartbeat(self) -> Heartbeat | None:
        """The replica's heartbeat, if it has one."""
        data = self.redis.get(redis_keys.replica_key(self.replica_id, self.prefix))
        return protocol.decode_heartbeat(data) if data else None

    def pending(self) -> int:
        """Inbox entries that are read and not acknowledged."""
        key = redis_keys.inbox_key(self.replica_id, self.prefix)
        return self.redis.xpending(key, protocol.CONSUMER_GROUP)["pending"]

    def await_state(self, *states: str, timeout: float = 60.0) -> Heartbeat:
        """Wait until the heartbeat shows one of the states."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            heartbeat = self.heartbeat()
            if heartbeat is not None and heartbeat.state in states:
                return heartbeat
            time.sleep(0.05)
        raise TimeoutError(f"The replica isn't {states} after {timeout} s: {self.heartbeat()}")


@contextmanager
def replica(
    url: str, prefix: str, model: Path, *flags: str, replica_id: str = "r1"
) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m engine.serving` as long as the block lasts."""
    command = [sys.executable, "-m", "engine.serving", "--replica-id", replica_id]
    command += ["--redis-url", url, "--key-prefix", prefix, "--model", str(model)]
    command += ["--num-gpu-blocks-override", "64", "--max-model-len", "256", *flags]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(60)
