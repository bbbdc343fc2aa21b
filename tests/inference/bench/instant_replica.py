"""A replica that answers at once: the real protocol, no model, as fast as Python goes.

python -m tests.inference.bench.instant_replica --redis-url URL --model-path FOLDER
"""

from __future__ import annotations

import argparse
import os
import socket
import threading
import time
import uuid
from typing import Any

import hiredis
import redis

from engine.contract import messages as protocol
from engine.contract import redis_keys
from engine.contract.messages import (
    AbortRequest,
    EngineRequest,
    EngineStats,
    FlightRecord,
    Heartbeat,
    ModelInfo,
    OutboxBatch,
    TokenDelta,
)

MAX_TOKENS = 16
BLOCK_MS = 1000


class Pipe:
    """One connection to Redis: commands are written together, replies that matter are read."""

    def __init__(self, url: str) -> None:
        connection: Any = redis.Redis.from_url(url, protocol=2).connection_pool.make_connection()
        connection.connect()
        self._connection = connection
        self._socket: socket.socket = connection._sock
        self._socket.settimeout(None)
        self._reader = hiredis.Reader()
        self._owed = 0
        self._out: list[bytes] = []

    def append(self, *words: bytes | str | int) -> None:
        """A command whose reply nobody needs."""
        self._out.append(hiredis.pack_command(words))  # type: ignore[arg-type]
        self._owed += 1

    def ask(self, *words: bytes | str | int) -> Any:
        """Write all that was added, and this; its reply."""
        self.append(*words)
        self._socket.sendall(b"".join(self._out))
        self._out.clear()
        reply: Any = None
        while self._owed:
            reply = self._reader.gets()
            if reply is False:
                self._reader.feed(self._socket.recv(65536))
                continue
            if isinstance(reply, Exception):
                raise reply
            self._owed -= 1
        return reply


class InstantReplica:
    """Each step gives every running request one token (id 100 + position modulo 100).

    A step is an outbox entry of its own, as an engine's. All steps of a request are written at
    once; with `--lockstep` a step waits until Redis has taken the one before, and with `--pace-ms`
    only the first token comes at once and the others in steps that far apart.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.pipe = Pipe(args.redis_url)
        self.id, self.incarnation = f"instant-{os.getpid()}", uuid.uuid4().hex
        self.inbox = redis_keys.inbox_key(self.id, args.key_prefix)
        self.running: dict[str, tuple[EngineRequest, bytes, int]] = {}
        self.steps = 0
        self.started: list[str] = []

    def beat(self) -> None:
        client = redis.Redis.from_url(self.args.redis_url)
        args = self.args
        model = ModelInfo(
            name=args.model_name,
            path=args.model_path,
            max_model_len=1 << 16,
            vocab_size=512,
            dtype="float32",
            kv_capacity_tokens=1 << 30,
            eos_token_ids=[2],
        )
        while True:
            now = time.time()
            stats = EngineStats(
                num_requests_running=len(self.running),
                num_requests_waiting=args.waiting,
                steps_total=self.steps,
                num_blocks=10_000,
            )
            beat = Heartbeat(
                replica_id=self.id,
                incarnation=self.incarnation,
                state="ready",
                model=model,
                at=now,
                progress_at=now,
                stats=stats,
            )
            client.sadd(redis_keys.replicas_key(args.key_prefix), self.id)
            client.set(
                redis_keys.replica_key(self.id, args.key_prefix), protocol.encode(beat), px=5000
            )
            time.sleep(0.5)

    def run(self) -> None:
        group = protocol.CONSUMER_GROUP
        self.pipe.ask("XGROUP", "CREATE", self.inbox, group, "0", "MKSTREAM")
        threading.Thread(target=self.beat, daemon=True).start()
        pace_s = self.args.pace_ms / 1000
        next_step = time.monotonic()
        # What it reads at once delays the next step: of large requests hundreds would.
        read = ("XREADGROUP", "GROUP", group, "e", "COUNT", 4 if pace_s else 512)
        where = ("STREAMS", self.inbox, ">")
        while True:
            if self.running and pace_s:  # a server's own timeouts are too coarse for this
                time.sleep(min(0.001, max(0.0, next_step - time.monotonic())))
            block = () if self.running else ("BLOCK", BLOCK_MS)
            response = self.pipe.ask(*read, *block, *where)
            for entry_id, fields in response[0][1] if response else ():
                self.receive(entry_id, protocol.decode_inbox(fields[1]))
            now = time.monotonic()
            if now >= next_step:
                self.step(list(self.running))
                next_step = now + pace_s
            elif self.started:
                self.step(self.started)
            self.started = []
            while self.running and not pace_s and not self.args.lockstep:
                self.step(list(self.running))

    def receive(self, entry_id: bytes, message: Any) -> None:
        if isinstance(message, EngineRequest):
            self.running[message.request_id] = (message, entry_id, 0)
            self.started.append(message.request_id)
            return
        if isinstance(message, AbortRequest) and message.request_id in self.running:
            request, of, _ = self.running.pop(message.request_id)
            delta = TokenDelta(request_id=request.request_id, finish_reason="abort")
            self.write({request.gateway_id: [delta]}, [of])
        self.write({}, [entry_id])

    def step(self, names: list[str]) -> None:
        if not names:
            return
        self.steps += 1
        out: dict[str, list[TokenDelta]] = {}
        done = []
        for name in names:
            request, entry_id, count = self.running[name]
            delta = TokenDelta(
                request_id=name, token_ids=[100 + count % 100], start=count, num_prompt_tokens=1
            )
            count += 1
            if count >= (request.sampling.max_tokens or MAX_TOKENS):
                delta.finish_reason, delta.flight = "length", FlightRecord(num_steps=count)
                del self.running[name]
                done.append(entry_id)
            else:
                self.running[name] = (request, entry_id, count)
            out.setdefault(request.gateway_id, []).append(delta)
        self.write(out, done)

    def write(self, out: dict[str, list[TokenDelta]], done: list[bytes]) -> None:
        """Goes out with the next look into the inbox."""
        for gateway_id, deltas in out.items():
            batch = OutboxBatch(
                replica_id=self.id, incarnation=self.incarnation, step=self.steps, deltas=deltas
            )
            key = redis_keys.outbox_key(gateway_id, self.args.key_prefix)
            limit = protocol.OUTBOX_MAXLEN
            data = protocol.encode(batch)
            self.pipe.append("XADD", key, "MAXLEN", "~", limit, "*", protocol.STREAM_FIELD, data)
        if done:
            self.pipe.append("XACK", self.inbox, protocol.CONSUMER_GROUP, *done)
            self.pipe.append("XDEL", self.inbox, *done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--key-prefix", default=redis_keys.KEY_PREFIX)
    parser.add_argument("--model-name", default="m")
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--pace-ms", type=float, default=0.0)
    parser.add_argument("--lockstep", action="store_true")
    parser.add_argument("--waiting", type=int, default=0, help="requests that it says wait")
    InstantReplica(parser.parse_args()).run()


if __name__ == "__main__":
    main()
