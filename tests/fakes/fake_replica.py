"""A replica without a model: the engine's real protocol, made-up but deterministic tokens.

In a test's own loop:

    async with FakeReplica(redis_url, model_name="m", model_path="demo/model") as replica:
        ...

As a process, in the place of `python -m engine.serving`:

    python -m tests.fakes.fake_replica --redis-url URL --model-name m --model-path demo/model

Output token `i` of output `k` depends on the prompt, `k` and `i` alone: a resumed request goes on
exactly where it stopped, and a test computes what it must get with `expected_tokens`.
"""

# ruff: noqa: E402 - redis-py is imported without what it would load

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import signal
import socket
import sys
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from engine.contract import redis_keys
from engine.system.light_imports import import_redis

import_redis()

from redis import asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff
from redis.exceptions import ResponseError

from engine.contract import messages as protocol
from engine.contract.messages import (
    AbortRequest,
    ControlReply,
    ControlRequest,
    EngineRequest,
    EngineStats,
    ErrorInfo,
    FollowPrefill,
    Heartbeat,
    ModelInfo,
    OutboxBatch,
    TokenDelta,
    TokenLogprobs,
)
from engine.contract.replica_state import KVHandover, Numerics
from engine.system.step_record import SharedStepWriter


def expected_token(prompt: list[int], index: int, position: int, low: int, high: int) -> int:
    """The token in [low, high) that every fake replica makes at this place."""
    seed = f"{prompt}:{index}:{position}".encode()
    return low + int.from_bytes(hashlib.sha256(seed).digest()[:4], "big") % (high - low)


def expected_tokens(
    prompt: list[int], count: int, *, index: int = 0, low: int = 100, high: int = 200
) -> list[int]:
    """The first `count` tokens of one output."""
    return [expected_token(prompt, index, i, low, high) for i in range(count)]


@dataclass
class Sequence:
    """One of the outputs of a running request."""

    index: int
    num_tokens: int
    first: bool = True
    finish_reason: str | None = None


@dataclass
class Running:
    """A request and the inbox entry that is acknowledged when it ends."""

    request: EngineRequest
    entry_id: bytes
    sequences: list[Sequence] = field(default_factory=list)


class SimulatedDeath(Exception):
    """The replica stopped without a word, as a killed process does."""


class FakeReplica:
    """Args:
    redis_url, key_prefix, replica_id: where and as whom it serves.
    model_name, model_path, max_model_len, vocab_size, eos_token_ids: its `ModelInfo`.
    token_delay: seconds between two steps (one token of each running output a step).
    load_seconds: how long it says "loading" first.
    eos_after: end with EOS (finish reason "stop") after so many tokens, or None.
    die_after: vanish after so many steps that made tokens, or None.
    low, high: tokens are made in [low, high).
    numerics, spare, kv_handover: as in `Heartbeat`.
    """

    def __init__(
        self,
        redis_url: str,
        *,
        model_name: str = "fake",
        model_path: str = "",
        key_prefix: str = redis_keys.KEY_PREFIX,
        replica_id: str = "",
        max_model_len: int = 2048,
        vocab_size: int = 256,
        eos_token_ids: tuple[int, ...] = (2,),
        token_delay: float = 0.001,
        load_seconds: float = 0.0,
        eos_after: int | None = None,
        die_after: int | None = None,
        low: int = 100,
        high: int = 200,
        numerics: Numerics | None = None,
        spare: bool = False,
        kv_handover: KVHandover | None = None,
    ) -> None:
        self.numerics, self.spare, self.kv_handover = numerics, spare, kv_handover
        #: What it tells of each output when it ends.
        self.flight: protocol.FlightRecord | None = None
        self.kv_transfer_params: dict[str, Any] | None = None
        self.redis_url, self.prefix = redis_url, key_prefix
        self.replica_id = replica_id or f"fake-{uuid.uuid4().hex[:8]}"
        self.incarnation = uuid.uuid4().hex
        self.model = ModelInfo(
            name=model_name,
            path=model_path,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            dtype="float32",
            kv_capacity_tokens=max_model_len * 8,
            cache_config={"kv_cache_size_tokens": str(max_model_len * 16)},
            eos_token_ids=list(eos_token_ids),
        )
        self.token_delay, self.load_seconds = token_delay, load_seconds
        self.eos_after, self.die_after = eos_after, die_after
        self.low, self.high = low, high
        self.state = "loading"
        self.steps = 0
        self.aborted: list[str] = []
        self.by_operator: set[str] = set()
        self.received: list[EngineRequest] = []
        self.followed: list[EngineRequest] = []
        self.running: dict[str, Running] = {}
        self.recorder = SharedStepWriter.inherited(self.incarnation)
        self.stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # -- life ---------------------------------------------------------------------------------

    async def __aenter__(self) -> FakeReplica:
        # As the real one does, it outlives a restart of Redis.
        self.redis = aioredis.from_url(self.redis_url, retry=Retry(ConstantBackoff(0.1), 100))
        self.inbox = redis_keys.inbox_key(self.replica_id, self.prefix)
        with contextlib.suppress(ResponseError):  # the group is there since the last incarnation
            await self.redis.xgroup_create(
                self.inbox, protocol.CONSUMER_GROUP, id="0", mkstream=True
            )
        await self.redis.sadd(redis_keys.replicas_key(self.prefix), self.replica_id)
        await self._beat()
        if not self.load_seconds:
            self.state = "ready"
            await self._beat()
        self._tasks = [asyncio.create_task(t) for t in (self._heart(), self._read(), self._run())]
        return self

    async def __aexit__(self, *_: object) -> None:
        # Again and again: below the Redis client, Python 3.11's wait_for swallows some.
        while pending := [task for task in self._tasks if not task.done()]:
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=0.1)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.state != "dead":
            await self.redis.delete(redis_keys.replica_key(self.replica_id, self.prefix))
        await self.redis.aclose()

    async def wait(self) -> None:
        """Until it has drained, or `SimulatedDeath` when `die_after` was reached."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if not task.cancelled():
                task.result()

    def drain(self) -> None:
        """Finish what runs, take nothing new, then end."""
        self.state = "draining"
        self.stopping.set()

    # -- heartbeat ----------------------------------------------------------------------------

    async def _beat(self) -> None:
        now = time.time()
        beat = Heartbeat(
            replica_id=self.replica_id,
            incarnation=self.incarnation,
            state=self.state,
            model=self.model,
            at=now,
            progress_at=now,
            pid=os.getpid(),
            host=socket.gethostname(),
            load_progress=0.0 if self.state == "loading" else 1.0,
            numerics=self.numerics,
            spare=self.spare,
            kv_handover=self.kv_handover,
            stats=EngineStats(num_requests_running=len(self.running), steps_total=self.steps),
        )
        key = redis_keys.replica_key(self.replica_id, self.prefix)
        await self.redis.set(key, protocol.encode(beat), px=int(protocol.HEARTBEAT_TTL_S * 1000))

    async def _heart(self) -> None:
        started = time.monotonic()
        while self.state != "dead":
            if self.state == "loading" and time.monotonic() - started >= self.load_seconds:
                self.state = "ready"
            await self._beat()
            await asyncio.sleep(min(0.05, protocol.HEARTBEAT_INTERVAL_S))

    # -- inbox --------------------------------------------------------------------------------

    async def _read(self) -> None:
        cursor = "0"  # first what an earlier incarnation left pending, then what is new
        while not self.stopping.is_set() and self.state != "dead":
            reply = await self.redis.xreadgroup(
                protocol.CONSUMER_GROUP, "engine", {self.inbox: cursor}, count=64, block=100
            )
            entries = list(_entries(reply))
            for entry_id, data in entries:
                await self._consume(entry_id, data)
                if cursor != ">":
                    cursor = entry_id.decode()
            if not entries:
                cursor = ">"
        await asyncio.Event().wait()

    async def _consume(self, entry_id: bytes, data: bytes) -> None:
        message = protocol.decode_inbox(data)
        if isinstance(message, EngineRequest):
            await self._start(entry_id, message)
            return
        if isinstance(message, AbortRequest):
            self._abort(message)
        elif isinstance(message, ControlRequest):
            await self._control(message)
        elif isinstance(message, FollowPrefill):
            self.followed.append(message.request)
        await self._done(entry_id)

    async def _start(self, entry_id: bytes, request: EngineRequest) -> None:
        self.received.append(request)
        if old := self.running.pop(request.request_id, None):
            await self._done(old.entry_id)
        if len(request.prompt_token_ids) >= self.model.max_model_len:
            delta = TokenDelta(
                request_id=request.request_id,
                finish_reason="error",
                error=ErrorInfo(
                    message="The prompt is longer than the context.",
                    status=400,
                    error_type="invalid_request_error",
                    code="context_length_exceeded",
                    param="prompt",
                ),
            )
            await self._write(request.gateway_id, [delta])
            await self._done(entry_id)
            return
        resumed = request.resume_token_ids
        sequences = [
            Sequence(i, len(resumed[i]) if i < len(resumed) else 0)
            for i in range(request.sampling.num_sequences)
        ]
        budget = request.sampling.output_budget(
            len(request.prompt_token_ids), self.model.max_model_len
        )
        for sequence in sequences:
            if sequence.num_tokens >= budget:
                sequence.finish_reason = "length"
        self.running[request.request_id] = Running(request, entry_id, sequences)

    def _abort(self, message: AbortRequest) -> None:
        running = self.running.get(message.request_id)
        if running is None:
            self.followed = [one for one in self.followed if one.request_id != message.request_id]
            return
        self.aborted.append(message.request_id)
        for sequence in running.sequences:
            if message.index in (None, sequence.index):
                sequence.finish_reason = sequence.finish_reason or message.finish_reason

    async def _control(self, message: ControlRequest) -> None:
        if message.command == "drain":
            self.drain()
        if message.command == "abort_requests":
            for running in self.running.values():
                self.by_operator.add(running.request.request_id)
                self._abort(AbortRequest(request_id=running.request.request_id))
        if message.gateway_id:
            reply = ControlReply(control_id=message.control_id, ok=True, detail="fake")
            await self._write(message.gateway_id, [], [reply])

    async def _done(self, entry_id: bytes) -> None:
        await self.redis.xack(self.inbox, protocol.CONSUMER_GROUP, entry_id)
        await self.redis.xdel(self.inbox, entry_id)

    # -- steps --------------------------------------------------------------------------------

    async def _run(self) -> None:
        while self.running or not self.stopping.is_set():
            if self.running and self.state != "loading":
                await self._step()
            await asyncio.sleep(self.token_delay)
        await self._beat()

    async def _step(self) -> None:
        self.recorder.write(list(self.running))
        if self.die_after is not None and self.steps >= self.die_after:
            self.state = "dead"
            for task in self._tasks[:2]:
                task.cancel()
            raise SimulatedDeath
        self.steps += 1
        outgoing: dict[str, list[TokenDelta]] = {}
        for running in list(self.running.values()):
            deltas = [
                self._advance(running.request, s)
                for s in running.sequences
                if not (s.finish_reason and s.num_tokens < 0)
            ]
            outgoing.setdefault(running.request.gateway_id, []).extend(deltas)
        for gateway_id, deltas in outgoing.items():
            await self._write(gateway_id, deltas)
        for request_id, running in list(self.running.items()):
            if all(s.num_tokens < 0 for s in running.sequences):
                del self.running[request_id]
                await self._done(running.entry_id)

    def _advance(self, request: EngineRequest, sequence: Sequence) -> TokenDelta:
        """The next token of one output; a finished one gets `num_tokens` -1."""
        prompt, sampling = request.prompt_token_ids, request.sampling
        start, token = sequence.num_tokens, None
        delta = TokenDelta(request_id=request.request_id, index=sequence.index, start=start)
        if sequence.finish_reason is None:
            token = self._token(request, sequence, delta)
        if sequence.first or sequence.finish_reason:
            delta.num_prompt_tokens = len(prompt)
        if sequence.first and sampling.prompt_logprobs is not None:
            delta.prompt_logprobs = [
                TokenLogprobs([t], [-0.5], [1]) if i else None for i, t in enumerate(prompt)
            ]
        if token is not None and sampling.logprobs is not None:
            top = range(token + 1, token + 1 + sampling.logprobs)
            ids = [token, *([token] if sampling.logprobs else []), *list(top)[:-1]]
            delta.logprobs = [
                TokenLogprobs(ids, [-0.1 * (i or 1) for i in range(len(ids))], [1] * len(ids))
            ]
        delta.finish_reason = sequence.finish_reason
        if sequence.finish_reason:
            delta.flight, delta.kv_transfer_params = self.flight, self.kv_transfer_params
        if sequence.finish_reason == "abort" and request.request_id in self.by_operator:
            delta.stop_reason = protocol.ABORTED_BY_OPERATOR
        sequence.first = False
        if sequence.finish_reason:
            sequence.num_tokens = -1
        return delta

    def _token(self, request: EngineRequest, sequence: Sequence, delta: TokenDelta) -> int:
        prompt, sampling = request.prompt_token_ids, request.sampling
        position = sequence.num_tokens
        token = expected_token(prompt, sequence.index, position, self.low, self.high)
        if self.eos_after is not None and position >= self.eos_after and not sampling.ignore_eos:
            token, sequence.finish_reason = self.model.eos_token_ids[0], "stop"
        elif token in (sampling.stop_token_ids or ()):
            sequence.finish_reason, delta.stop_reason = "stop", token
        budget = sampling.output_budget(len(prompt), self.model.max_model_len)
        sequence.num_tokens += 1
        if sequence.finish_reason is None and sequence.num_tokens >= budget:
            sequence.finish_reason = "length"
        # The engine counts a cap over all outputs; here each has an equal part.
        cap = request.token_cap
        if cap is not None and sequence.num_tokens >= cap // sampling.num_sequences:
            sequence.finish_reason = sequence.finish_reason or "budget"
        delta.token_ids = [token]
        return token

    async def _write(
        self, gateway_id: str, deltas: list[TokenDelta], replies: list[ControlReply] | None = None
    ) -> None:
        batch = OutboxBatch(
            replica_id=self.replica_id,
            incarnation=self.incarnation,
            step=self.steps,
            deltas=deltas,
            replies=replies or [],
        )
        written = [w for pair in protocol.written_token_counts(deltas).items() for w in pair]
        await self.redis.execute_command(
            "EVAL",
            _WRITE,
            2,
            redis_keys.outbox_key(gateway_id, self.prefix),
            redis_keys.written_tokens_key(self.prefix),
            protocol.encode(batch),
            protocol.OUTBOX_MAXLEN,
            *written,
        )


#: KEYS: an outbox, what is written of open requests. ARGV: a batch, the most entries, what is
#: written.
_WRITE = """
if #ARGV > 2 then redis.call('HSET', KEYS[2], unpack(ARGV, 3)) end
return redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', 'm', ARGV[1])
"""


def _entries(reply: object) -> list[tuple[bytes, bytes]]:
    """(entry id, message) pairs of an XREADGROUP reply, in RESP2's or RESP3's shape."""
    if not reply:
        return []
    if isinstance(reply, dict):
        batches = [batch for value in reply.values() for batch in value]
        if batches and isinstance(batches[0], list):
            batches = [item for batch in batches for item in batch]
    else:
        batches = [item for _, items in reply for item in items]  # type: ignore[attr-defined]
    return [(entry_id, fields[protocol.STREAM_FIELD]) for entry_id, fields in batches if fields]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redis-url", default=os.environ.get("REDIS_URL"))
    parser.add_argument("--key-prefix", default=redis_keys.KEY_PREFIX)
    parser.add_argument("--replica-id", default="")
    parser.add_argument("--model-name", "--served-model-name", dest="model_name", default=None)
    parser.add_argument("--model-path", "--model", dest="model_path", default="")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--vocab-size", type=int, default=256)
    parser.add_argument("--token-delay", type=float, default=0.001, help="seconds a step")
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--eos-after", type=int, default=None)
    parser.add_argument("--die-after", type=int, default=None, help="steps, then exit 137")
    parser.add_argument("--low", type=int, default=100)
    parser.add_argument("--high", type=int, default=200)
    parser.add_argument("--spare", action="store_true")
    return parser


async def _main(options: dict[str, object]) -> int:
    options["model_name"] = options["model_name"] or options["model_path"] or "fake"
    url = str(options.pop("redis_url"))
    async with FakeReplica(url, **options) as replica:  # type: ignore[arg-type]
        loop = asyncio.get_running_loop()
        for sign in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sign, replica.drain)
        print(f"fake replica {replica.replica_id} is ready", flush=True)
        try:
            await replica.wait()
        except SimulatedDeath:
            os._exit(137)
    return 0


if __name__ == "__main__":
    # The real service takes every engine flag; those that mean nothing here are ignored.
    registered, _ = _parser().parse_known_args()
    sys.exit(asyncio.run(_main(vars(registered))))
