"""What our GGUF reader and Redis client save over libraries: `python -m benchmarks.libraries`.

Needs `redis-server` and the packages of the tests.
"""

from __future__ import annotations

import asyncio
import mmap
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import gguf
from redis.asyncio import BlockingConnectionPool, Redis

from engine.checkpoints.gguf.file import read_header
from engine.system.redis_client import RedisPipeline, async_client

NUM_TOKENS, NUM_MERGES = 151_936, 151_387
NUM_COMMANDS, NUM_TASKS = 20_000, 200
XADD = ("XADD", "stream", "MAXLEN", "~", 1000, "*", "data", b"x" * 200)


def write_vocabulary(path: Path) -> None:
    """A GGUF file with the vocabulary of a large model and no tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"token{i}" for i in range(NUM_TOKENS)])
    writer.add_token_types([1] * NUM_TOKENS)
    writer.add_token_merges([f"a{i} b{i}" for i in range(NUM_MERGES)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def read_ours(path: Path) -> None:
    """The header by our reader."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        read_header(data)


async def in_tasks(execute: Callable[..., Awaitable[object]]) -> None:
    """All commands, each awaited by one of many tasks."""

    async def task() -> None:
        for _ in range(NUM_COMMANDS // NUM_TASKS):
            await execute(*XADD)

    await asyncio.gather(*(task() for _ in range(NUM_TASKS)))


async def by_link(url: str) -> None:
    """Our client: commands of a turn of the loop in one write."""
    link = RedisPipeline(url)
    await in_tasks(link.execute)
    await link.close()


async def by_pool(url: str) -> None:
    """redis-py: a connection a command."""
    pool = BlockingConnectionPool.from_url(url, max_connections=50)
    client = Redis(connection_pool=pool)
    await in_tasks(client.execute_command)
    await client.aclose()


async def by_pipelines(url: str) -> None:
    """redis-py: a pipeline for the commands of a turn, which whoever has them must collect."""
    client = async_client(url)
    for _ in range(NUM_COMMANDS // NUM_TASKS):
        pipeline = client.pipeline(transaction=False)
        for _ in range(NUM_TASKS):
            pipeline.execute_command(*XADD)
        await pipeline.execute()
    await client.aclose()


def main() -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory() as folder:
        path, socket = Path(folder, "model.gguf"), Path(folder, "redis.sock")
        write_vocabulary(path)
        for name, read in (("ours", read_ours), ("gguf", gguf.GGUFReader)):
            started = time.perf_counter()
            read(path)
            print(f"GGUF header, {name}: {time.perf_counter() - started:.2f} s")
        command = ["redis-server", "--port", "0", "--unixsocket", str(socket), "--save", ""]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while not socket.exists():
                time.sleep(0.05)
            for client in (by_link, by_pool, by_pipelines):
                started = time.process_time()
                asyncio.run(client(f"unix://{socket}"))
                cost = (time.process_time() - started) / NUM_COMMANDS
                print(f"Redis, {client.__name__}: {1e6 * cost:.1f} us of CPU time a command")
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
