"""One tenant's flood, in a process of its own whose clients cost the machine little.

Clients that take every event apart need half a core for 6,000 tokens a second, on the loop whose
clock tells what another tenant waits. These look at an answer's head and at its last bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import sys
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec
import uvloop

from tests.inference.bench.two_tenants import prompt

_TOTAL = re.compile(rb'"total_tokens":\s*(\d+)')
_RETRY_AFTER_MS = re.compile(rb"\r\nretry-after-ms: *([\d.]+)", re.IGNORECASE)
#: Of an answer's end, in which its usage stands.
TAIL_BYTES = 2048
#: Until a client comes back that was refused and not told when to.
RETRY_S = 1.0


class Flood(msgspec.Struct, frozen=True):
    """What is sent.

    Attributes:
        url, model, key: whom to ask for what, and as whom.
        at_once: requests that are open at a time.
        prompts, answers: fewest and most tokens of each.
        seed: of prompts and lengths.
    """

    url: str
    model: str
    key: str
    at_once: int
    prompts: tuple[int, int]
    answers: tuple[int, int]
    seed: str


class Counts(msgspec.Struct):
    """Of answers so far: the whole ones, their prompts' and their own tokens; the refused ones."""

    answered: int = 0
    tokens: int = 0
    refused: int = 0

    def since(self, earlier: Counts) -> Counts:
        """What came later."""
        return Counts(
            self.answered - earlier.answered,
            self.tokens - earlier.tokens,
            self.refused - earlier.refused,
        )


class Running:
    """A flood that runs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def counts(self) -> Counts:
        """Of its answers so far. Raises `RuntimeError` where the process has ended."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("The flood has no pipes.")
        stdin.write(b"\n")
        line = await stdout.readline()
        if not line:
            raise RuntimeError("The flood's process has ended.")
        return msgspec.json.decode(line, type=Counts)


@contextlib.asynccontextmanager
async def flooding(what: Flood) -> AsyncIterator[Running]:
    """The flood, until the block ends."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, msgspec.json.encode(what).decode()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Running(process)
    finally:
        if process.stdin is not None:
            process.stdin.close()  # which ends it
        await process.wait()


class _Client(asyncio.Protocol):
    """Asks again and again, each time over a new connection; comes back when it's told to."""

    def __init__(self, what: Flood, host: str, port: int, rng: random.Random, all_: Counts) -> None:
        self._what, self._host, self._port = what, host, port
        self._rng, self._counts = rng, all_
        self._head = self._tail = b""
        self._asking: asyncio.Task[Any] | None = None

    def ask(self) -> None:
        """Open a connection."""
        loop = asyncio.get_running_loop()
        self._head = self._tail = b""
        self._asking = loop.create_task(self._connect(loop))

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            await loop.create_connection(lambda: self, self._host, self._port)
        except OSError:
            self._refused()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        what, rng = self._what, self._rng
        body = json.dumps(
            {"model": what.model, "prompt": prompt(rng, rng.randint(*what.prompts))}
            | {"max_tokens": rng.randint(*what.answers), "temperature": 0, "ignore_eos": True}
            | {"stream": True, "stream_options": {"include_usage": True}}
        ).encode()
        cast(asyncio.WriteTransport, transport).write(
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Connection: close\r\nAuthorization: Bearer {what.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )

    def data_received(self, data: bytes) -> None:
        """Keep the beginning and the end."""
        if b"\r\n\r\n" not in self._head:
            self._head += data
        self._tail = data if len(data) >= TAIL_BYTES else (self._tail + data)[-TAIL_BYTES:]

    def connection_lost(self, error: Exception | None) -> None:
        """The answer is there."""
        used = _TOTAL.search(self._tail)
        if used is None:
            self._refused()
            return
        self._counts.answered += 1
        self._counts.tokens += int(used[1])
        self.ask()

    def _refused(self) -> None:
        self._counts.refused += 1
        match = _RETRY_AFTER_MS.search(self._head)
        wait = float(match[1]) / 1000 if match is not None else RETRY_S
        asyncio.get_running_loop().call_later(wait, self.ask)


async def _run(what: Flood) -> None:
    """Ask; a line on standard input is answered with the counts, its end ends the flood."""
    host, _, port = what.url.rpartition("/")[2].rpartition(":")
    rng, counts = random.Random(what.seed), Counts()
    for _ in range(what.at_once):
        _Client(what, host, int(port), random.Random(rng.getrandbits(64)), counts).ask()
    reader, loop = asyncio.StreamReader(), asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        print(msgspec.json.encode(counts).decode(), flush=True)


if __name__ == "__main__":
    uvloop.run(_run(msgspec.json.decode(sys.argv[1], type=Flood)))
