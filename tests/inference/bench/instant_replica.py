"""A replica that answers at once: the real protocol, no model, as fast as Python goes.

python -m tests.inference.bench.instant_replica --redis-url URL --model-path FOLDER
"""

from __future__ import annotations

import argparse
import os
import threading
import time
import uuid
from typing import Any

import redis

from engine import protocol
from engine.protocol import (
    AbortRequest,
    EngineRequest,
    EngineStats,
    FlightRecord,
    Heartbeat,
    ModelInfo,
    OutboxBatch,
    TokenDelta,
)


class InstantReplica:
    """Each step gives every running request one token (id 100 + position modulo 100).

    With `--pace-ms` only the first token comes at once; the others come in steps that far apart.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.redis = redis.Redis.from_url(args.redis_url)
        self.id, self.incarnation = f"instant-{os.getpid()}", uuid.uuid4().hex
        self.inbox = protocol.inbox_key(self.id, args.key_prefix)
        self.running: dict[str, tuple[EngineRequest, bytes, int]] = {}
        self.steps = 0
        self.fresh: list[str] = []

    def beat(self) -> None:
        client = redis.Redis.from_url(self.args.redis_url)
        args = self.args
        model = ModelInfo(
            name=args.model_name,
            path=args.model_path,
            max_model_len=8192,
            vocab_size=512,
            dtype="float32",
            kv_capacity_tokens=1 << 30,
            eos_token_ids=[2],
        )
        while True:
            now = time.time()
            stats = EngineStats(num_requests_running=len(self.running), steps_total=self.steps)
            beat = Heartbeat(
                replica_id=self.id,
                incarnation=self.incarnation,
                state="ready",
                model=model,
                at=now,
                progress_at=now,
                stats=stats,
            )
            client.sadd(protocol.replicas_key(args.key_prefix), self.id)
            client.set(
                protocol.replica_key(self.id, args.key_prefix), protocol.encode(beat), px=5000
            )
            time.sleep(0.5)

    def run(self) -> None:
        self.redis.xgroup_create(self.inbox, protocol.CONSUMER_GROUP, id="0", mkstream=True)
        threading.Thread(target=self.beat, daemon=True).start()
        pace_s = self.args.pace_ms / 1000
        next_step = time.monotonic()
        while True:
            block = None if self.running else 1000
            if self.running and pace_s:  # a server's own timeouts are too coarse for this
                time.sleep(min(0.001, max(0.0, next_step - time.monotonic())))
            found: Any = self.redis.xreadgroup(
                protocol.CONSUMER_GROUP, "e", {self.inbox: ">"}, count=512, block=block
            )
            for _, entries in found or []:
                for entry_id, fields in entries:
                    self.take(entry_id, protocol.decode_inbox(fields[protocol.FIELD]))
            now = time.monotonic()
            if now >= next_step:
                self.step(list(self.running))
                next_step = now + pace_s
            elif self.fresh:
                self.step(self.fresh)
            self.fresh = []

    def take(self, entry_id: bytes, message: Any) -> None:
        if isinstance(message, EngineRequest):
            self.running[message.request_id] = (message, entry_id, 0)
            self.fresh.append(message.request_id)
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
            if count >= (request.sampling.max_tokens or 16):
                delta.finish_reason, delta.flight = "length", FlightRecord(num_steps=count)
                del self.running[name]
                done.append(entry_id)
            else:
                self.running[name] = (request, entry_id, count)
            out.setdefault(request.gateway_id, []).append(delta)
        self.write(out, done)

    def write(self, out: dict[str, list[TokenDelta]], done: list[bytes]) -> None:
        pipe = self.redis.pipeline(transaction=True)
        for gateway_id, deltas in out.items():
            batch = OutboxBatch(
                replica_id=self.id, incarnation=self.incarnation, step=self.steps, deltas=deltas
            )
            key = protocol.outbox_key(gateway_id, self.args.key_prefix)
            pipe.xadd(key, {protocol.FIELD: protocol.encode(batch)}, maxlen=100_000)
        if done:
            pipe.xack(self.inbox, protocol.CONSUMER_GROUP, *done)
            pipe.xdel(self.inbox, *done)
        pipe.execute()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--key-prefix", default=protocol.KEY_PREFIX)
    parser.add_argument("--model-name", default="m")
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--pace-ms", type=float, default=0.0)
    InstantReplica(parser.parse_args()).run()


if __name__ == "__main__":
    main()
