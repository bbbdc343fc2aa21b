"""Two tenants of one instance that runs, and what their clients see by the clock."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from config.connections import socket_url
from tests.e2e.product import Product, running

WORDS = (
    *("ship", "river", "garden", "letter", "morning", "captain", "window", "forest", "story"),
    *("lantern", "market", "bridge", "silver", "winter", "kitchen", "mountain", "doctor", "paper"),
)
#: With its space before it, by the demo's tokenizer.
TOKENS_A_WORD = 1.76


@dataclass
class Pair:
    """An instance, and the API keys of two tenants that it has."""

    product: Product
    a: str
    b: str


@contextmanager
def pair(*flags: str) -> Iterator[Pair]:
    """`manage.py up` of the demo in a folder of its own, with tenants A and B."""
    with (
        tempfile.TemporaryDirectory(prefix="q-", dir="/tmp") as folder,
        running(Path(folder), *flags) as product,
    ):
        keys = []
        for name in ("a", "b"):
            product.manage("create_tenant", name)
            keys.append(product.manage("create_key", "--tenant", name, "--plain").strip())
        yield Pair(product, *keys)


def redis_url(of: Pair) -> str:
    """Of the instance's own server."""
    return socket_url(of.product.data_dir)


def prompt(rng: random.Random, tokens: int) -> str:
    """About so many tokens, which nobody has sent before."""
    return " ".join(rng.choice(WORDS) for _ in range(round(tokens / TOKENS_A_WORD)))


@dataclass
class Seen:
    """What one client saw. Times in seconds since it sent its request."""

    status: int = 0
    first: float = 0.0
    totals: float = 0.0
    retry_after: float = 1.0
    request_id: str = ""
    usage: dict[str, Any] = field(default_factory=dict)


async def ask(product: Product, key: str, text: str, tokens: int) -> Seen:
    """One completion as a stream, over a connection of its own."""
    url = urlsplit(product.url)
    body = json.dumps(
        {"model": product.model, "prompt": text, "max_tokens": tokens, "temperature": 0}
        | {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
    ).encode()
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    seen, began = Seen(), time.perf_counter()
    try:
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n"
            f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        async for line in _lines(reader, seen):
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            seen.first = seen.first or time.perf_counter() - began
            seen.usage = event.get("usage") or seen.usage
    finally:
        writer.close()
    seen.totals = time.perf_counter() - began
    return seen


async def _lines(reader: asyncio.StreamReader, seen: Seen) -> AsyncIterator[bytes]:
    """Of the body, with the lines of its chunks among them, which begin with no "data"."""
    seen.status = int((await reader.readline()).split()[1])
    while (line := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode("latin1").lower().partition(":")
        if name == "retry-after-ms":
            seen.retry_after = float(value) / 1000
        elif name == "x-request-id":
            seen.request_id = value.strip()
    while line := await reader.readline():
        yield line


def share(values: list[float], part: float) -> float:
    """The value below which `part` of them lie, in milliseconds."""
    ordered = sorted(values)
    return round(1000 * ordered[min(int(part * len(ordered)), len(ordered) - 1)], 1)
