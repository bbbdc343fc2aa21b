"""Real processes killed, clients that vanish: nothing is lost, nothing leaks."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import openai
import pytest
import redis

from config.connections import socket_url
from engine.contract import messages as protocol
from engine.contract import redis_keys
from tests.e2e.product import Product
from tests.engine.replica import Gateway
from tests.platform.test_processes import gone
from tests.waiting import wait_until

#: As many at a time, each of which is asked for twice.
STREAMS, REQUESTS = 64, int(os.environ.get("QUIRE_TEST_STRESS_REQUESTS", "128"))


def replica_of(product: Product) -> Gateway:
    """A protocol-level connection to the replica of the product's first model."""
    url = socket_url(product.data_dir)
    prefix = redis_keys.KEY_PREFIX
    ids = redis.Redis.from_url(url).smembers(redis_keys.replicas_key(prefix))
    for replica_id in ids:
        gateway = Gateway(url, prefix, replica_id.decode())
        heartbeat = gateway.heartbeat()
        if heartbeat is not None and heartbeat.model.name == product.model:
            return gateway
    raise RuntimeError(f"No live replica of {product.model} among {ids}.")


async def one_stream(client: httpx.AsyncClient, product: Product, rng: random.Random) -> bool:
    """Start a stream, go away in the middle of two in three; True when it came to its end."""
    body = {
        "model": product.model,
        "messages": [{"role": "user", "content": f"Tell me a story about {rng.random()}."}],
        "stream": True,
        "max_tokens": rng.randint(10, 150),
        "ignore_eos": True,
        "temperature": rng.choice([0, 1]),
    }
    # Early: at high speed a stream's tokens come in few events.
    leave_after = rng.randint(0, 10) if rng.random() < 2 / 3 else None
    headers = {"Authorization": f"Bearer {product.api_key}"}
    url = f"{product.base_url}/chat/completions"
    async with client.stream("POST", url, json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        seen = 0
        async for line in response.aiter_lines():
            assert "error" not in line[:20], line
            seen += line.startswith("data:")
            if leave_after is not None and seen > leave_after:
                return False
            if line == "data: [DONE]":
                return True
    raise AssertionError("The stream ended without [DONE].")


async def test_64_streams_with_clients_that_vanish_leave_the_pool_whole(product: Product) -> None:
    rng = random.Random(1)
    finished = num_disconnected = 0
    asked = iter(range(REQUESTS))
    limits = httpx.Limits(max_connections=STREAMS * 2)
    async with httpx.AsyncClient(limits=limits, timeout=120) as client:

        async def reader() -> None:
            nonlocal finished, num_disconnected
            for _ in asked:  # all readers share it
                if await one_stream(client, product, rng):
                    finished += 1
                else:
                    num_disconnected += 1

        await asyncio.gather(*(reader() for _ in range(STREAMS)))
    assert finished > REQUESTS // 4
    assert num_disconnected > REQUESTS // 4
    gateway = replica_of(product)
    idle(gateway)
    assert gateway.control("check_integrity").ok
    stats = gateway.await_state("ready").stats
    assert stats.num_free_blocks == stats.num_blocks


def idle(gateway: Gateway) -> None:
    """Wait until the replica has nothing to do."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        stats = gateway.await_state("ready").stats
        if not stats.num_requests_running and not stats.num_requests_waiting:
            time.sleep(2 * protocol.HEARTBEAT_INTERVAL_S)
            return
        time.sleep(0.1)
    raise TimeoutError("The replica is still busy.")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["27-killed", "48-frozen"])
def test_fault_a_lost_engine_costs_a_stream_a_pause_and_no_token(
    product: Product, client: openai.OpenAI, number: signal.Signals
) -> None:
    """Health is red as long as it's away."""

    def ask(kill: int | None) -> tuple[str, str | None]:
        chunks: list[str] = []
        finish = None
        stream = client.completions.create(
            model=product.model,
            prompt="Once upon a time",
            max_tokens=400,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for chunk in stream:
            for choice in chunk.choices:
                chunks.append(choice.text)
                finish = choice.finish_reason or finish
            if kill and len(chunks) == 5:
                os.kill(kill, number)
                kill = None
        return "".join(chunks), finish

    calm = ask(kill=None)
    initial = replica_of(product).heartbeat()
    assert initial is not None
    with watching_health(product) as seen:
        assert ask(kill=initial.pid) == calm
    assert 503 in seen
    assert calm[1] == "length"
    # The rest came from another process, not from what the first had written by then.
    after = replica_of(product).heartbeat()
    assert after is not None
    assert after.incarnation != initial.incarnation
    # Found and replaced: a frozen process that was left alone would still be there.
    assert gone(initial.pid)


@contextmanager
def watching_health(product: Product) -> Iterator[list[int]]:
    """The statuses that `/health` answers with meanwhile, and until it's green again."""
    seen: list[int] = []

    def check_instance() -> bool:
        seen.append(httpx.get(f"{product.url}/health", timeout=10).status_code)
        return seen[-1] == 200

    def watch() -> None:
        while not finished_event.wait(0.2):
            check_instance()

    finished_event = threading.Event()
    assert check_instance()
    with ThreadPoolExecutor(1) as threads:
        watched = threads.submit(watch)
        try:
            yield seen
        finally:
            finished_event.set()
        watched.result()
    wait_until(check_instance)
