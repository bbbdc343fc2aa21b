"""The path without a gateway: requests into a replica's inbox, tokens out of an outbox of its own.

What a gateway does between these two, and HTTP on top, is what it adds.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid

from engine.contract import messages as protocol
from engine.contract import redis_keys
from engine.contract.messages import EngineRequest, OutboxBatch
from engine.contract.sampling_params import SamplingParams
from engine.system.redis_client import RedisPipeline
from tests.inference.bench.load import Timings

PROMPT = [100, 101, 102, 103, 104, 105, 106, 107]


class RawClient:
    """Asks one replica through Redis, as a gateway would."""

    def __init__(self, url: str, replica_id: str) -> None:
        self._link, self._reading = RedisPipeline(url), RedisPipeline(url, timeout_s=30.0)
        self._id = f"raw-{uuid.uuid4().hex}"
        self._inbox = redis_keys.inbox_key(replica_id)
        self._waiting: dict[str, asyncio.Queue[protocol.TokenDelta]] = {}
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        key, last = redis_keys.outbox_key(self._id), b"0-0"
        read = ("XREAD", "COUNT", 256, "BLOCK", 1000, "STREAMS", key)
        while True:
            reply = await self._reading.execute(*read, last)
            for entry_id, fields in reply[0][1] if reply else ():
                last = entry_id
                self._apply_delta(protocol.decode_outbox(fields[1]))

    def _apply_delta(self, batch: OutboxBatch) -> None:
        for delta in batch.deltas:
            self._waiting[delta.request_id].put_nowait(delta)

    async def ask(self, tokens: int, timings: Timings) -> None:
        """One request to its end."""
        name = uuid.uuid4().hex
        deltas = self._waiting[name] = asyncio.Queue()
        started = time.perf_counter()
        request = EngineRequest(
            request_id=name,
            gateway_id=self._id,
            prompt_token_ids=PROMPT,
            sampling=SamplingParams(max_tokens=tokens),
        )
        data = protocol.encode(request)
        self._link.send("XADD", self._inbox, "*", protocol.STREAM_FIELD, data)
        delta = await deltas.get()
        timings.first.append(time.perf_counter() - started)
        while delta.finish_reason is None:
            delta = await deltas.get()
        timings.totals.append(time.perf_counter() - started)
        timings.tokens += tokens
        del self._waiting[name]

    async def close(self) -> None:
        """Leave nothing in Redis."""
        self._reader.cancel()
        await self._link.execute("DEL", redis_keys.outbox_key(self._id))
        await self._link.close()
        await self._reading.close()


async def run_raw_level(
    url: str, replica_id: str, concurrency: int, seconds: float, tokens: int, pause_s: float
) -> Timings:
    """What `load.run_level` does, without the gateway."""
    client, timings = RawClient(url, replica_id), Timings()
    started = time.perf_counter()

    async def worker() -> None:
        while time.perf_counter() < started + seconds:
            await asyncio.sleep(random.uniform(0, pause_s))
            await client.ask(tokens, timings)

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    timings.wall = time.perf_counter() - started
    await client.close()
    return timings
